"""What a graph has in it for good: the addresses of a stage's parameters and buffers, and its modules' constants.

A replay runs no Python and looks nothing up. So before a step that replays, all that Python would look up is compared
with what it was when the graphs were made; where anything differs they are made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autosplit.trace.calls import assign_buffer

_CONSTANTS = (bool, int, float, complex, str, tuple, type(None), torch.dtype)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSORS = (torch.Tensor, nn.Parameter)


class _Entry(NamedTuple):
    """Where the model holds a tensor: a table and a key in it."""

    table: Any
    key: Any
    tensor: torch.Tensor
    facts: tuple[Any, ...]


class Watched:
    """What a stage's region names of the model, as it was when this was made.

    Attributes:
        reason: why no graph can stand for the region, or "".
    """

    def __init__(self, region: Any) -> None:
        self.reason = ""
        self._entries: dict[tuple[int, Any], _Entry] = {}
        self._chains: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._modules: dict[int, tuple[nn.Module, tuple[Any, ...]]] = {}
        for node, path in region.named():
            if node.target is assign_buffer:
                self._refuse("it puts a new tensor in a buffer's place")
            elif node.op == "call_method" and node.target == "register_hook":
                self._refuse("it sets hooks on its values")
            elif path:
                self._add(region.root, path)

    def holds(self) -> bool:
        """Tell whether the model is what it was."""
        return (
            all(table.get(name) is module for table, name, module in self._chains.values())
            and all(_at(e.table, e.key) is e.tensor and _facts(e.tensor) == e.facts for e in self._entries.values())
            and all(_constants(module) == constants for module, constants in self._modules.values())
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers."""
        return [entry.tensor for entry in self._entries.values()]

    @contextlib.contextmanager
    def replaced(self, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Put other tensors in the places of some, by identity."""
        held = [entry for entry in self._entries.values() if id(entry.tensor) in others]
        try:
            for entry in held:
                entry.table[entry.key] = others[id(entry.tensor)]
            yield
        finally:
            for entry in held:
                entry.table[entry.key] = entry.tensor

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _add(self, root: nn.Module, path: str) -> None:
        *parents, name = path.split(".")
        holder = root
        for part in parents:
            if part not in holder._modules:
                return self._refuse(f"{path} is no module, parameter or buffer")
            holder = self._child(holder, part)
        if name in holder._modules:
            return self._called(self._child(holder, name), path)
        for table in (holder._parameters, holder._buffers, holder.__dict__):
            if isinstance(table.get(name), torch.Tensor):
                return self._tensor(table, name, path)
        return self._refuse(f"{path} is no module, parameter or buffer")

    def _child(self, holder: nn.Module, name: str) -> Any:
        child = holder._modules[name]
        self._chains[id(holder), name] = (holder._modules, name, child)
        return child

    def _called(self, module: nn.Module, path: str) -> None:
        """Watch a module that runs its own code, and all below it."""
        own = f"{path}, a {type(module).__name__}"
        if not type(module).__module__.startswith("torch.nn.") or "forward" in module.__dict__:
            self._refuse(f"{own}, runs Python of its own")
        if any(getattr(module, hooks) for hooks in _HOOKS):
            self._refuse(f"{own}, has hooks")
        self._modules[id(module)] = (module, _constants(module))
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    self._tensor(table, name, f"{path}.{name}")
        flat = module.__dict__.get("_flat_weights")  # a recurrent layer has its parameters in a list too
        for place, tensor in enumerate(flat if isinstance(flat, list) else ()):
            if tensor is not None:
                self._tensor(flat, place, path)
        for name, child in module._modules.items():
            if child is not None:
                self._called(self._child(module, name), f"{path}.{name}")

    def _tensor(self, table: Any, key: Any, path: str) -> None:
        tensor = table[key]
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            self._refuse(f"{path} is a {type(tensor).__name__} in {tensor.layout}")
        self._entries[id(table), key] = _Entry(table, key, tensor, _facts(tensor))


def _at(table: Any, key: Any) -> Any:
    try:
        return table[key]
    except LookupError:
        return None


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.requires_grad, tensor.dtype, tensor.shape, tensor.stride()


def _constants(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module's own code may choose by, but for its tensors' contents."""
    own = tuple((name, value) for name, value in module.__dict__.items() if isinstance(value, _CONSTANTS))
    there = tuple(name for table in (module._parameters, module._buffers) for name, t in table.items() if t is not None)
    hooks = tuple(bool(getattr(module, hooks)) for hooks in _HOOKS)
    return own, there, hooks, tuple(module._modules), id(module.__dict__.get("_flat_weights"))
