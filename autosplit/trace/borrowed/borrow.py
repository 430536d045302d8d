"""Stand-ins for a model's tensors, so that a run with real values touches nothing of the model's own.

parameters               a new leaf on the same memory: `.grad` and hooks of the model's own stay untouched
buffers, other tensors   copies, which share memory where theirs do: what a forward writes is thrown away
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed import state

_TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, *others: nn.Module, written: Collection[str] = (), registered: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Put stand-ins in the places of a model's tensors; yield those that require gradients, by name.

    Parameters named in ``written``, and tables with ``max_norm``, are copied: a forward changes them. ``others`` are
    modules that hold some of the same tensors as plain attributes. With ``registered`` only parameters and buffers are
    replaced, wherever they are held. All attributes are as before at the end.
    """
    with state.attributes(model, *others):
        stands = _StandIns(model, written)
        for path, module in model.named_modules():
            for table in _TABLES[:2]:
                entries = module.__dict__[table]
                entries.update({name: stands.of(t, f"{path}.{name}".strip(".")) for name, t in entries.items()})
        for path, module in model.named_modules():
            stands.put(module, path, registered=registered)
        for module in others:
            for key, value in module.__dict__.items():
                module.__dict__[key] = stands.made.get(id(value), value)
        yield stands.leaves


class _StandIns:
    def __init__(self, model: nn.Module, written: Collection[str]) -> None:
        tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self.copied = {id(m.weight) for m in tables if m.max_norm is not None}
        self.written = frozenset(written)
        self.made: dict[int, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []
        held = {id(t): t for t in (*model.buffers(), *state.attribute_tensors(model)) if not t.is_meta}
        users = Counter(_storage(t) for t in held.values())
        self.storages: dict[int, Any] = {key: None for key, count in users.items() if count > 1}

    def of(self, tensor: Any, name: str) -> Any:
        """Return the stand-in of a tensor; any other value is returned as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in self.made:
            self.kept.append(tensor)
            self.made[id(tensor)] = made = self._make(tensor, name)
            if made is not tensor and made.requires_grad:
                self.leaves[name] = made
        return self.made[id(tensor)]

    def _make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_leaf or tensor.is_inference():
            return tensor
        own = tensor.detach()
        if name in self.written or id(tensor) in self.copied:
            own = own.clone()
        elif not (isinstance(tensor, nn.Parameter) or tensor.requires_grad):
            own = self._copy(own)
        made = nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own
        made.requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made

    def _copy(self, own: torch.Tensor) -> torch.Tensor:
        key = None if own.is_meta else _storage(own)
        if key is None or key not in self.storages:
            return own.clone()
        if self.storages[key] is None:
            self.storages[key] = own.untyped_storage().clone()
        empty = torch.empty(0, dtype=own.dtype, device=own.device)
        return empty.set_(self.storages[key], own.storage_offset(), own.shape, own.stride())

    def put(self, module: nn.Module, path: str, *, registered: bool) -> None:
        """Put stand-ins in the places of tensors among a module's plain attributes, in lists and dicts too."""

        def of(value: Any, name: str) -> Any:
            return self.made.get(id(value), value) if registered else self.of(value, name)

        for key, value in module.__dict__.items():
            name = f"{path}.{key}".strip(".")
            if isinstance(value, torch.Tensor):
                module.__dict__[key] = of(value, name)
            elif type(value) is dict and key not in _TABLES:
                value.update({k: of(v, f"{name}.{k}") for k, v in value.items() if isinstance(v, torch.Tensor)})
            elif type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
                parts = [of(v, f"{name}.{k}") for k, v in enumerate(value)]
                if isinstance(value, list):
                    value[:] = parts
                else:
                    module.__dict__[key] = tuple(parts)


def free_leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that require gradients and are no parameters: plain attributes, also in lists and dicts."""
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            name = f"{path}.{key}".strip(".")
            held: dict[str, Any] = {name: value}
            if type(value) is dict and key not in _TABLES:
                held = {f"{name}.{k}": v for k, v in value.items()}
            elif type(value) in (list, tuple):
                held = {f"{name}.{k}": v for k, v in enumerate(value)}
            for own, tensor in held.items():
                wanted = isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
                if wanted and id(tensor) not in known:
                    found[own] = tensor
                    known.add(id(tensor))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)
