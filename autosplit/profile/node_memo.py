"""Nodes that cost what an equal node of the same run cost: they are not run again.

    node, operands ─► key: what runs, and how every operand looks and whose storage it has
                       ├► seen ─► results of the same looks on the same storages, costs with the storages renamed
                       └► new  ─► the node runs; known from now on where its results are plain

Layers of torch's own without children and hooks, torch's own functions and methods of tensors are told from one another
by kind; all else runs every time. What comes back has the storage ids that it would have if the node had run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from autosplit.profile.ledger import Ledger
from autosplit.trace.graph import INFO

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SEQUENCES = (list, tuple, torch.Size, fx.immutable_collections.immutable_list)
_STATE = -1
"""The place of a storage of the model's own; those made by a node count on downwards from the next number."""


@dataclass(frozen=True)
class Operands:
    """The tensors that a node takes, each once and in order, and what tells the node from others."""

    key: Hashable
    offsets: tuple[int, ...]
    """Where in their storages the tensors begin, as they are taken: only views of them depend on it."""
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Given:
    """One result: where its storage is from, how it looks, and whether gradients flow through it."""

    place: int
    look: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
    requires_grad: bool


@dataclass(frozen=True)
class _Known:
    """What a node did; storages by place: that of an operand by its number, others by `_STATE` less their order."""

    costs: Any
    saved: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    kind: type | None
    results: tuple[_Given, ...]
    now_requires_grad: tuple[bool, ...]
    storages: int


class _Unknown(Exception):
    """Nothing tells a node from others that do something else."""


class _Teller:
    """Tells what a node takes; no function that refers to itself, which would hold the tensors for longer."""

    def __init__(self, ledger: Ledger, env: Mapping[fx.Node, Any], state: Collection[int]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.offsets: list[int] = []
        self._ledger, self._env, self._state = ledger, env, state
        self._places: dict[int, int] = {}

    def told(self, value: Any) -> Hashable:
        """Return what a value is and, of tensors, how they look and which share a storage; raises _Unknown."""
        if isinstance(value, fx.Node):
            info = value.meta.get(INFO)
            return info is not None and info.mutated, self.told(self._env[value])
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in _PLAIN:
            return type(value), value
        if isinstance(value, slice):
            return slice, self.told(value.start), self.told(value.stop), self.told(value.step)
        if type(value) in _SEQUENCES:
            return (type(value), *map(self.told, value))
        raise _Unknown

    def _tensor(self, value: torch.Tensor) -> Hashable:
        storage = self._ledger.storage(value)
        if storage is None or value.layout is not torch.strided or isinstance(value, nn.Parameter):
            raise _Unknown
        self.tensors.setdefault(id(value), value)
        number = list(self.tensors).index(id(value))
        place = _STATE if storage.id in self._state else self._places.setdefault(storage.id, len(self._places))
        self.offsets.append(int(value.storage_offset()))
        return number, place, storage.bytes, value.requires_grad, tuple(value.shape), value.stride(), value.dtype


class NodeMemo:
    """What nodes of one run did, under one ledger."""

    def __init__(self, root: nn.Module, ledger: Ledger, make: Callable[..., torch.Tensor]) -> None:
        """``make``: returns a tensor of some looks on a tensor's storage, or on a new one."""
        self._root, self._ledger, self._make = root, ledger, make
        self._kinds: dict[str, Hashable] = {}
        self._known: dict[Hashable, _Known] = {}
        """By what tells nodes apart, with their operands' offsets; without these where nothing is a view of one."""

    def operands(self, node: fx.Node, env: Mapping[fx.Node, Any], state: Collection[int]) -> Operands | None:
        """Return what a node takes; None where it has to run. ``state``: ids of the model's storages."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None
        teller = _Teller(self._ledger, env, state)
        try:
            named = tuple((name, teller.told(value)) for name, value in node.kwargs.items())
            key = self._kind(node), teller.told(tuple(node.args)), named, torch.is_grad_enabled()
        except _Unknown:
            return None
        return Operands(key, tuple(teller.offsets), tuple(teller.tensors.values())) if teller.tensors else None

    def _kind(self, node: fx.Node) -> Hashable:
        target = node.target
        if node.op == "call_module":
            if str(target) not in self._kinds:
                self._kinds[str(target)] = layer_kind(self._root.get_submodule(str(target)))
            return self._kinds[str(target)]
        if node.op == "call_method":
            return node.op, target
        own = isinstance(target, types.FunctionType) and vars(F).get(target.__name__) is target
        if node.op != "call_function" or not (own or isinstance(target, types.BuiltinFunctionType)):
            raise _Unknown
        return node.op, target

    def again(self, operands: Operands, name: str) -> tuple[Any, Any] | None:
        """Return the costs of a node and its result as the next nodes take it; None where it is the first."""
        known = self._known.get(operands.key) or self._known.get((operands.key, operands.offsets))
        if known is None:
            return None
        ledger, first = self._ledger, self._ledger.entered
        ids = [storage.id for tensor in operands.tensors if (storage := ledger.storage(tensor)) is not None]
        for tensor, requires_grad in zip(operands.tensors, known.now_requires_grad, strict=True):
            if requires_grad and not tensor.requires_grad:
                tensor.requires_grad_()
        given = []
        for result in known.results:
            on = operands.tensors[result.place] if result.place >= 0 else None
            tensor = self._make(*result.look, on=on)
            if on is None:
                ledger.enter(tensor, first + _STATE - 1 - result.place)
            given.append(tensor.requires_grad_() if result.requires_grad else tensor)
        ledger.entered = first + known.storages

        def renamed(storages: Iterable[tuple[int, int]]) -> dict[int, int]:
            return {ids[place] if place >= 0 else first + _STATE - 1 - place: size for place, size in storages}

        costs = known.costs.again(name, saved=renamed(known.saved), outputs=renamed(known.outputs))
        return costs, given[0] if known.kind is None else known.kind(given)

    def learn(self, operands: Operands, settled: Any, costs: Any, *, first: int) -> None:
        """Remember what a node did; ``first``: how many storages were entered before."""
        kind = None if isinstance(settled, torch.Tensor) else type(settled)
        parts = (settled,) if kind is None else settled
        if kind not in (None, list, tuple) or not all(isinstance(part, torch.Tensor) for part in parts):
            return
        if costs.estimated is not None or any(part is tensor for part in parts for tensor in operands.tensors):
            return
        storages = [self._ledger.storage(tensor) for tensor in operands.tensors]
        places = {storage.id: number for number, storage in reversed([*enumerate(storages)]) if storage is not None}
        count = self._ledger.entered - first

        def placed(number: int) -> int:
            if number not in places and not first <= number < first + count:
                raise _Unknown
            return places.get(number, _STATE - 1 - (number - first))

        try:
            results = tuple(self._given(part, placed) for part in parts)
            saved = tuple((placed(number), size) for number, size in costs.saved.items())
            outputs = tuple((placed(number), size) for number, size in costs.outputs.items())
        except _Unknown:
            return
        changed = tuple(tensor.requires_grad for tensor in operands.tensors)
        views = any(result.place >= 0 for result in results)
        key = (operands.key, operands.offsets) if views else operands.key
        self._known[key] = _Known(costs, saved, outputs, kind, results, changed, count)

    def _given(self, tensor: torch.Tensor, placed: Callable[[int], int]) -> _Given:
        storage = self._ledger.storage(tensor)
        if storage is None or tensor.layout is not torch.strided or tensor.dtype.is_complex:
            raise _Unknown
        look = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        place = placed(storage.id)
        if place < 0:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            plain = (last + 1) * tensor.element_size() if tensor.numel() else 0
            if tensor.storage_offset() or storage.bytes != plain:
                raise _Unknown
        return _Given(place, look, tensor.requires_grad)


def layer_kind(module: nn.Module) -> Hashable:
    """Return all that a layer of torch's own depends on."""
    own = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if not own or hooks or module._modules:
        raise _Unknown
    return module_kind(module)


def module_kind(module: nn.Module) -> Hashable:
    """Return what tells a module of torch's own from others: its settings and the looks of its state."""
    state = ((name, tensor_kind(t)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (type(module), repr(module), module.training, *state)


def tensor_kind(tensor: torch.Tensor) -> Hashable:
    """Return what tells a tensor of a module's state from others."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
