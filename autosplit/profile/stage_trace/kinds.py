"""Stages of one kind are traced once: two that differ in nothing but their names share a trace.

stage 1   layers.10 … layers.19      the same operations on values of the same shapes, the same parameters in the
stage 2   layers.20 … layers.29      same places: one trace, with the names of either
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch
from torch import fx, nn

from autosplit.profile.stage_trace.described import called
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How, pieces_of, trace_stage
from autosplit.schedule.memory.pieces import NodeStep, StageTrace
from autosplit.trace.graph import INFO, TracedNode


class StageKinds:
    """Traces by the kind of stage, each made once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[_Kind, StageTrace]] = {}

    def trace(self, stage: StageNodes, how: How) -> StageTrace:
        """Return what :func:`trace_stage` returns."""
        kind = _Kind(stage, how)
        if kind.key not in self._known:
            self._known[kind.key] = kind, trace_stage(stage, how)
        like, trace = self._known[kind.key]
        return trace if like is kind else _renamed(trace, dict(zip(like.names, kind.names, strict=True)))


@dataclass(frozen=True, eq=False)
class _Kind:
    """All that the trace of a stage depends on, and the names in it, in the order of the key."""

    stage: StageNodes
    how: How

    @cached_property
    def key(self) -> Hashable:
        """What stages of one kind have in common."""
        stage, how = self.stage, self.how
        places: dict[fx.Node, Hashable] = {
            node: number for number, node in enumerate((*stage.numbers, *stage.inputs, *stage.nodes))
        }
        roots = None if how.roots is None else tuple(self._at(node) in how.roots for node in stage.outputs)
        averaged = tuple(self._at(node) == how.averaged for node in stage.outputs)
        observed = None if how.observed is None else id(how.observed)
        pieces = tuple((len(piece.nodes), piece.again) for piece in pieces_of(stage.nodes, how.units, whole=how.whole))
        return (
            (how.rows, roots, averaged, id(how.loss), pieces, how.apart, how.kernels, observed, len(stage.numbers)),
            tuple((self._input(node), how.input_grads.get(self._at(node), False)) for node in stage.inputs),
            tuple((called(node, stage.root, places), self._tensors(node), self._info(node)) for node in stage.nodes),
            how.by_use and tuple(str(node.target) in stage.tied for node in stage.nodes if node.op == "get_attr"),
            tuple(places[node] for node in stage.outputs),
            self._order,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The stable names of inputs and nodes, and those of parameters and buffers."""
        known = (self._at(node) for node in (*self.stage.inputs, *self.stage.nodes) if INFO in node.meta)
        return (*known, *self._state)

    @staticmethod
    def _at(node: fx.Node) -> str:
        name: str = node.meta[INFO].name
        return name

    def _input(self, node: fx.Node) -> Hashable:
        """Return what an input is; what is no single tensor, or known by more than that, is only like itself."""
        info: TracedNode = node.meta[INFO]
        nested = len(info.tensors) != 1 or any(INFO not in user.meta and user.op != "output" for user in node.users)
        return info.node_class, info.tensors, info.mutated, id(node) if nested else None

    def _info(self, node: fx.Node) -> Hashable:
        info: TracedNode | None = node.meta.get(INFO)
        if info is None:
            return None
        reads = tuple(self._numbers.get(name, name) for name in (*info.reads, *info.rewritten))
        return info.node_class, info.tensors, reads, info.random, info.mutated, bool(info.writes), info.whole

    def _tensors(self, node: fx.Node) -> tuple[int, ...]:
        """Return which tensors a node reads from the root, numbered as they come first."""
        return tuple(self._tensor_numbers[id(tensor)] for tensor in _held(node, self.stage.root))

    @cached_property
    def _tensor_numbers(self) -> Mapping[int, int]:
        held = (tensor for node in self.stage.nodes for tensor in _held(node, self.stage.root))
        numbers: dict[int, int] = {}
        for tensor in held:
            numbers.setdefault(id(tensor), len(numbers))
        return numbers

    @cached_property
    def _state(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of their numbers."""
        root, numbers = self.stage.root, self._tensor_numbers
        names = {id(t): name for name, t in (*root.named_parameters(), *root.named_buffers()) if id(t) in numbers}
        return tuple(names.get(tensor, "") for tensor in numbers)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._state) if name}

    @property
    def _order(self) -> tuple[int, ...]:
        """In which order the root has the parameters: that of their gradients."""
        numbers = self._tensor_numbers
        return tuple(numbers[id(p)] for p in self.stage.root.parameters() if id(p) in numbers)


def _held(node: fx.Node, root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node itself has: a parameter, or the state of a layer."""
    if node.op in ("get_attr", "call_module"):
        value = attrgetter(str(node.target))(root)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()


def _renamed(trace: StageTrace, names: Mapping[str, str]) -> StageTrace:
    """Return a trace with other names."""

    def steps(before: tuple[NodeStep, ...]) -> tuple[NodeStep, ...]:
        return tuple(NodeStep(names.get(step.node, step.node), step.changes) for step in before)

    return replace(
        trace,
        forward=steps(trace.forward),
        backward=steps(trace.backward),
        backward_later=steps(trace.backward_later),
        gradients={storage: names.get(name, name) for storage, name in trace.gradients.items()},
        split={names.get(node, node): needs for node, needs in trace.split.items()},
    )
