"""From a merged recording to an fx graph whose nodes carry :class:`TracedNode`."""

from __future__ import annotations

import enum
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from autosplit.trace.graph import INFO, LENGTH, Formula, Length, NodeClass, Number, Symbol, TracedNode
from autosplit.trace.recording.merge import MergedCall, MergedRecording
from autosplit.trace.recording.recording import Attribute, Call, Ref, invoke, refs_in


@dataclass(frozen=True)
class RawGraph:
    """An emitted graph, the root that it runs on, its nodes by the index of the recorded call, and its lengths.

    ``effects`` is what in-place changes demand of its nodes.
    """

    graph: fx.Graph
    root: nn.Module
    nodes: dict[int, fx.Node]
    effects: Effects
    lengths: tuple[Length, ...] = ()


def share_root(model: nn.Module, constants: dict[str, Any]) -> nn.Module:
    """Return a bare module that shares the model's own tables and holds the constants as plain attributes."""
    root = nn.Module()
    for table in ("_modules", "_parameters", "_buffers"):
        root.__dict__[table] = model.__dict__[table]
    root.__dict__.update(constants)
    root.training = model.training
    return root


def build(model: nn.Module, merged: MergedRecording, *, keep: Collection[int] | None = None) -> RawGraph:
    """Emit the calls in recorded order; every node's class is MICRO until :mod:`autosplit.trace.rows.classes` decides.

    ``keep`` are the indices of the calls to emit; None: all of them.
    """
    builder = _GraphBuilder(merged, (*model._parameters, *model._buffers))
    for index, call in enumerate(merged.calls):
        if keep is None or index in keep:
            builder.emit(index, call)
    builder.finish(merged.output)
    used = {node.target for node in builder.graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in builder.constants.items() if name in used}
    node_effects = effects([m.call for m in merged.calls], builder.nodes)
    for node in node_effects.mutated:
        if INFO in node.meta:
            node.meta[INFO] = replace(node.meta[INFO], mutated=True)
    return RawGraph(builder.graph, share_root(model, constants), builder.nodes, node_effects, merged.lengths)


_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PRINTED = {*_TORCHS, int, float, bool, str, complex, type(None), range, slice, bytes, bytearray, set, frozenset}
"""Types whose values appear in generated code by their repr."""


class _GraphBuilder:
    def __init__(self, merged: MergedRecording, state: Iterable[str]) -> None:
        """``state`` are the names of the model's own tensors, which no value may have: layouts tell both by name."""
        self.graph = fx.Graph()
        for name in state:
            self.graph._graph_namespace.create_name(name, None)
        self.nodes: dict[int, fx.Node] = {}
        self.rows = self.graph.placeholder("rows")
        self.lengths = {length.name: self.graph.placeholder(length.name) for length in merged.lengths}
        for name, node in self.lengths.items():
            node.meta[LENGTH] = name
        self.used = _used_projections(merged)
        self.constants = dict(merged.recording.constants)

    def emit(self, index: int, merged: MergedCall) -> None:
        call = merged.call
        if call.kind == "project" and index not in self.used:
            return
        if call.kind == "input":
            node = named(self.graph, self.graph.placeholder(_identifier(call.target)), _identifier(call.target))
        elif call.kind == "module":
            node = self.graph.call_module(call.target, self.decode(merged.args), self.decode(merged.kwargs))
        elif call.kind == "project":
            node = self.graph.call_function(call.target, self.decode(merged.args))
        else:
            node = self._function(call.target, self.decode(merged.args), self.decode(merged.kwargs))
        named(self.graph, node, _identifier(call.name))
        self.nodes[index] = node
        structured = call.kind == "project" and not merged.tensors
        if not structured:
            node.meta[INFO] = TracedNode(
                name=call.name,
                module=call.target if call.kind == "module" else call.module,
                node_class=NodeClass.MICRO,
                tensors=merged.tensors,
                reads=tuple(dict.fromkeys(call.reads)),
                writes=tuple(call.writes),
                random=call.random,
                draws=merged.draws,
                source=call.source,
                whole=call.whole,
            )

    def finish(self, output: list[Any]) -> None:
        self.graph.output(tuple(self._returned(self.decode(value)) for value in output))

    def _returned(self, value: Any) -> Any:
        """Return an output as generated code has it: what Python cannot print so that it can be read is held."""
        if isinstance(value, (fx.Node, enum.Enum)) or type(value) in _PRINTED:
            return value
        held = f"_output{len(self.constants)}"
        self.constants[held] = value
        return self.graph.get_attr(held)

    def decode(self, value: Any) -> Any:
        return map_aggregate(value, self._decoded)

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.nodes[value.index]
        if isinstance(value, Attribute):
            return self.graph.get_attr(value.name)
        if isinstance(value, (Formula, Symbol)):
            return self._formula(value)
        return value

    def _formula(self, number: Number) -> Any:
        if isinstance(number, Symbol):
            return self.lengths.get(number.name, self.rows)
        if isinstance(number, Formula):
            return self.graph.call_function(number.function, tuple(self._formula(n) for n in number.operands))
        return number

    def _function(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(function, "__name__", "")
        if (swapped := _operator(function, name)) is not None:
            op, swap = swapped
            return self.graph.call_function(op, tuple(reversed(args)) if swap else args, kwargs)
        if getattr(torch.Tensor, name, None) is function:
            return self.graph.call_method(name, args, kwargs)
        if _importable(function):
            return self.graph.call_function(function, args, kwargs)
        held = f"_function{len(self.constants)}"
        self.constants[held] = function
        return self.graph.call_function(invoke, (self.graph.get_attr(held), *args), kwargs)


def named(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    """Give a node a readable name."""
    if node.name != name:
        node.name = graph._graph_namespace.create_name(name, None)
    return node


def _operator(function: Any, name: str) -> tuple[Callable[..., Any], bool] | None:
    """Return the Python operator that a Tensor dunder is, and whether its operands are swapped."""
    for dunder in (name, f"__{name}__"):
        inner = dunder.removeprefix("__").removesuffix("__")
        if inner == dunder or getattr(torch.Tensor, dunder, None) is not function:
            continue
        for candidate, swap in ((inner, False), (f"{inner}_", False), (inner[1:], True), (f"{inner[1:]}_", True)):
            if candidate and hasattr(operator, candidate) and (not swap or inner[0] == "r"):
                return getattr(operator, candidate), swap
    return None


def _importable(function: Any) -> bool:
    """Tell whether generated code can name a function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", None)
    if isinstance(function, (type(len), type(torch.relu))):
        return True
    if module is None or name is None or "<" in name:
        return False
    if not module.startswith("torch"):
        return True
    scope: Any = torch
    for attribute in module.split(".")[1:]:
        scope = getattr(scope, attribute, None)
    return getattr(scope, name, None) is function


def _used_projections(merged: MergedRecording) -> set[int]:
    used = {ref.index for ref in refs_in(merged.output)}
    for index in range(len(merged.calls) - 1, -1, -1):
        call = merged.calls[index]
        if call.call.kind != "project" or index in used:
            used.update(ref.index for ref in refs_in((call.args, call.kwargs)))
    return used


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name.removeprefix("input/")).strip("_")
    return f"_{text}" if not text or text[0].isdigit() else text


Pair = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Effects:
    """Effects between fx nodes.

    Attributes:
        flow: (a node that changes a register, a later node that sees the change).
        order: (a node that touches a register, a later node that changes it).
        storages: per storage that is changed or read by strides its producers and changers until the last of these; of
            an input, whoever touches it.
        buffers: per changed buffer everyone who touches it.
        mutated: nodes whose result's storage is changed.
    """

    flow: tuple[Pair, ...]
    order: tuple[Pair, ...]
    storages: tuple[tuple[fx.Node, ...], ...]
    buffers: tuple[tuple[fx.Node, ...], ...]
    mutated: frozenset[fx.Node]

    def pairs(self) -> tuple[Pair, ...]:
        """Return all pairs that keep their order."""
        return self.flow + self.order


def effects(calls: Sequence[Call], nodes: Mapping[int, fx.Node]) -> Effects:
    """Collect the effects of all recorded calls."""
    touched: dict[object, list[int]] = defaultdict(list)
    changed: dict[object, set[int]] = defaultdict(set)
    strided: dict[object, int] = {}
    for index, call in enumerate(calls):
        if index not in nodes:
            continue
        for register in dict.fromkeys((*call.storages, *call.reads_storages, *call.reads, *call.views, *call.writes)):
            touched[register].append(index)
        for name in call.writes:
            changed[name].add(index)
        for storage in call.mutates:
            changed[storage].add(index)
        if call.kind == "function" and getattr(call.target, "__name__", "") == "as_strided":
            strided.update(dict.fromkeys(call.storages, index))
    flow: dict[Pair, None] = {}
    order: dict[Pair, None] = {}
    storages, buffers = [], []
    mutated: set[fx.Node] = set()
    for register in dict.fromkeys((*changed, *strided)):
        writers, users = changed.get(register, set()), touched[register]
        for writer in sorted(writers):
            flow.update({(nodes[writer], nodes[user]): None for user in users if user > writer})
            order.update({(nodes[user], nodes[writer]): None for user in users if user < writer})
        if isinstance(register, str):
            buffers.append(tuple(nodes[user] for user in users))
            continue
        holders = [i for i in users if register in calls[i].storages]
        if writers:
            mutated.update(nodes[i] for i in holders)
        inputs = {i for i in holders if calls[i].kind == "input"}
        last = max((*writers, strided.get(register, -1)))
        together = [i for i in (users if inputs else holders) if i <= last]
        storages.append(tuple(nodes[i] for i in sorted({*together, *writers} - inputs)))
    return Effects(tuple(flow), tuple(order), tuple(storages), tuple(buffers), frozenset(mutated))
