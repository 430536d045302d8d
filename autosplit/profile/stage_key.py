"""What the trace of a stage depends on, as a key: stages of equal keys do the same on other names.

Nodes and what they take are numbered in the order in which they come, parameters and buffers likewise, so that the key
says which of them are one and the same, and nothing of how they are called.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autosplit.profile.stage_graph import StageGraph, StageNodes
from autosplit.profile.stage_pieces import unit_path
from autosplit.profile.stage_trace import How
from autosplit.trace.graph import INFO, TracedNode
from autosplit.trace.structure import storage_key


@dataclass(frozen=True)
class StageKey:
    """A stage under one way to run it: ``kind`` is equal where the traces are, up to ``names``.

    ``names`` are stable names of inputs and nodes, and names of what the nodes read, in order.
    """

    kind: Hashable
    names: tuple[str, ...]


class Kinds:
    """What the nodes of one recording do, apart from what they take: each told once, as a number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._nodes: dict[int, tuple[TracedNode, int]] = {}
        self._targets: dict[tuple[str, str], tuple[Hashable, tuple[torch.Tensor, ...]]] = {}
        self._places: dict[int, int] = {}
        self._tied: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """How many kinds of nodes were told."""
        return len(self._numbers)

    def key(self, stage: StageGraph | StageNodes, how: How) -> StageKey:
        """Return the key of a stage of the recording; it is that of a copy too."""
        if not self._places:
            self._enter(stage.root)
        return _Key(self, stage, how).made()

    def _enter(self, root: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._places = {key: place for place, key in enumerate(names)} or {0: 0}
        self._tied = frozenset(name for own in names.values() if len(own) > 1 for name in own)

    def place(self, tensor: torch.Tensor) -> int:
        """Return where a parameter stands among all; -1 for any other tensor."""
        return self._places.get(id(tensor), -1)

    def node(self, node: fx.Node, root: nn.Module) -> int:
        """Return the number of what a node does."""
        info: TracedNode | None = node.meta.get(INFO)
        known = None if info is None else self._nodes.get(id(info))
        if known is not None and known[0] is info:
            return known[1]
        kind = self._kind(node, info, root)
        number = self._numbers.setdefault(kind, len(self._numbers))
        if info is not None:
            self._nodes[id(info)] = info, number
        return number

    def _kind(self, node: fx.Node, info: TracedNode | None, root: nn.Module) -> Hashable:
        takes = {operand: number for number, operand in enumerate(node.all_input_nodes)}
        target, _ = self.target(node, root)
        called = node.op, target, described(node.args, takes), described(dict(node.kwargs), takes)
        if info is None:
            return called
        names = (operand.meta[INFO].name if INFO in operand.meta else None for operand in takes)
        picked = tuple(name is not None and info.name.startswith(f"{name}.") for name in names)
        tied = info.reads if not self._tied.isdisjoint(info.reads) else ()
        known = (
            info.node_class,
            info.tensors,
            info.random,
            info.mutated,
            bool(info.writes),
            info.whole,
            len(info.rewritten),
        )
        return called, known, picked, len(info.reads), tied

    def target(self, node: fx.Node, root: nn.Module) -> tuple[Hashable, tuple[torch.Tensor, ...]]:
        """Return what a node's target is like, and the parameters and buffers that it stands for."""
        if node.op not in ("call_module", "get_attr"):
            return node.target, ()
        place = node.op, str(node.target)
        if place not in self._targets:
            self._targets[place] = self._target(*place, root)
        return self._targets[place]

    @staticmethod
    def _target(op: str, path: str, root: nn.Module) -> tuple[Hashable, tuple[torch.Tensor, ...]]:
        if op == "call_module":
            module = root.get_submodule(path)
            return module_kind(module), (*module.parameters(), *module.buffers())
        value: Any = root
        for part in path.split("."):
            value = getattr(value, part)
        return (tensor_kind(value), (value,)) if isinstance(value, torch.Tensor) else (id(value), ())


class _Key:
    """The key of one stage, in the making."""

    def __init__(self, kinds: Kinds, stage: StageGraph | StageNodes, how: How) -> None:
        self.kinds, self.stage, self.how = kinds, stage, how
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.places: list[int] = []
        self.units: dict[str, int] = {"": 0}
        self.unit_of: dict[str, int] = {}
        self.colours: dict[int | None, int] = {None: 0}
        self.names: list[str] = []

    def made(self) -> StageKey:
        given, own = self.stage.given, self.stage.own
        numbers = {node: number for number, node in enumerate((*given, *own))}
        outputs = frozenset(self.stage.outputs)
        told = [self._given(node.meta.get(INFO)) for node in given]
        told += [self._told(node, numbers, leaves=node in outputs) for node in own]
        order = tuple(sorted(range(len(self.places)), key=self.places.__getitem__))
        how = self.how
        settings = how.rows, how.whole, how.apart, how.autocast_ends, how.kernels, how.observed, how.roots is None
        return StageKey((settings, tuple(told), order), tuple(self.names))

    def _told(self, node: fx.Node, numbers: dict[fx.Node, int], *, leaves: bool) -> Hashable:
        info: TracedNode | None = node.meta.get(INFO)
        takes = tuple([numbers[operand] for operand in node.all_input_nodes])
        kind = self.kinds.node(node, self.stage.root)
        state = tuple([self._state(tensor) for tensor in self.kinds.target(node, self.stage.root)[1]])
        if info is None:
            return kind, takes, state
        self.names.append(info.name)
        self.names.extend(info.reads)
        roots = self.how.roots
        ends = (leaves, roots is None or info.name in roots, info.name == self.how.averaged) if leaves else ()
        colour = self.colours.setdefault(info.colour, len(self.colours))
        return kind, takes, state, ends, self._unit(info.module), colour

    def _given(self, info: TracedNode | None) -> Hashable:
        if info is None:
            return None
        self.names.append(info.name)
        return info.tensors, info.node_class, info.mutated, bool(self.how.input_grads.get(info.name, False))

    def _state(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) not in self.tensors:
            self.places.append(self.kinds.place(tensor))
        number = self.tensors.setdefault(id(tensor), len(self.tensors))
        return number, self.storages.setdefault(storage_key(tensor), len(self.storages))

    def _unit(self, module: str) -> int:
        if module not in self.unit_of:
            path = unit_path(module, self.how.units)
            self.unit_of[module] = self.units.setdefault(path, len(self.units))
        return self.unit_of[module]


def described(value: Any, places: dict[fx.Node, Any]) -> Hashable:
    """Return an argument of a node as a key: nodes by their places, other values by type and text."""
    if isinstance(value, fx.Node):
        return places.get(value, ("outside", value.name))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(described(item, places) for item in value))
    if isinstance(value, dict):
        return tuple((key, described(item, places)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(described(part, places) for part in (value.start, value.stop, value.step)))
    return (type(value).__name__, repr(value))


def module_kind(module: nn.Module) -> Hashable:
    """Return what a leaf module does, as a key; one that is not torch's own, or has hooks, is like none."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or not type(module).__module__.startswith("torch.nn"):
        return id(module)
    state = ((name, tensor_kind(t)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (type(module), repr(module), module.training, *state)


def tensor_kind(tensor: torch.Tensor) -> Hashable:
    """Return what a parameter, buffer or constant is like, but for its values."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
