"""Stages of one recording traced once per kind: equal ones, and equal ones without their repeated blocks.

    stage ──key──► known? ─── yes ──────────────────────────────► its trace, on other names
                     │ no
                   short stage ──key──► known? ── yes ──► renamed ──► expanded
                                          │ no
                                        run on fake tensors

A search replays many cuts of one recording, whose stages are much the same: ten blocks here, eleven there.

A stage's key says what its trace depends on and nothing of names: nodes and what they take are numbered in the order in
which they come, parameters and buffers likewise, so that the key says which of them are one and the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from autosplit.memory.pieces import Recompute, StageTrace, StageTraces, Step
from autosplit.profile.blocks import LOOKED_UP, block_trace, described, target_kind
from autosplit.profile.stage_trace.stage_graph import StageGraph, StageGraphs, StageNodes, block_paths, unit_path
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.inputs.objects import storage_key


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
        if node.op not in LOOKED_UP:
            return node.target, ()
        place = node.op, str(node.target)
        if place not in self._targets:
            self._targets[place] = target_kind(*place, root)
        return self._targets[place]


class _Key:
    """The key of one stage, in the making."""

    def __init__(self, kinds: Kinds, stage: StageGraph | StageNodes, how: How) -> None:
        self.kinds, self.stage, self.how = kinds, stage, how
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.places: list[int] = []
        self.units: dict[str, int] = {"": 0}
        self.unit_of: dict[str, int] = {}
        self.colocated: dict[int | None, int] = {None: 0}
        self.names: list[str] = []

    def made(self) -> StageKey:
        given, own = self.stage.given, self.stage.own
        numbers = {node: number for number, node in enumerate((*given, *own))}
        outputs = frozenset(self.stage.outputs)
        told = [self._given(node.meta.get(INFO)) for node in given]
        told += [self._told(node, numbers, leaves=node in outputs) for node in own]
        order = tuple(sorted(range(len(self.places)), key=self.places.__getitem__))
        how = self.how
        observed = None if how.observed is None else frozenset(how.observed.items())
        settings = how.rows, how.whole, how.apart, how.autocast_ends, how.kernels, observed, how.roots is None
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
        together = self.colocated.setdefault(info.colocation_group, len(self.colocated))
        return kind, takes, state, ends, self._unit(info.module), together

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


@dataclass(frozen=True)
class _Traced:
    trace: StageTrace
    names: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """What is to be traced of a stage: its microbatches of both kinds, where there are such."""

    stage: StageNodes
    recompute: Recompute
    hows: tuple[How | None, ...]
    keys: tuple[StageKey | None, ...]

    @property
    def kind(self) -> Hashable:
        """Equal where the traces are, up to names."""
        return self.recompute, *(None if key is None else key.kind for key in self.keys)


class TraceMemo:
    """What was traced of one recording; valid for any cut of it, while the caller's autocast stays as it is."""

    def __init__(self) -> None:
        self._kinds = Kinds()
        self._whole: dict[Hashable, StageTrace] = {}
        self._short: dict[Hashable, _Traced] = {}
        self._known: dict[Hashable, StageTraces] = {}
        self._graphs: StageGraphs | None = None
        self._blocks: dict[str, tuple[str, ...]] = {}

    def graphs(self, traced: TracedGraph) -> StageGraphs:
        """Return the stages of the recording."""
        if self._graphs is None or self._graphs.traced is not traced:
            self._graphs = StageGraphs(traced)
        return self._graphs

    def blocks(self, stage: StageNodes) -> tuple[str, ...]:
        """Return the paths of the blocks that a stage's nodes lie in."""
        modules = dict.fromkeys(info.module for _, info in stage.computing())
        for module in modules.keys() - self._blocks.keys():
            self._blocks[module] = block_paths(stage.root, (module,))
        return tuple(dict.fromkeys(path for module in modules for path in self._blocks[module]))

    def wanted(
        self, stage: StageNodes, recompute: Recompute, *, never: How | None = None, recomputed: How | None = None
    ) -> Wanted:
        """Return what is to be traced of a stage whose microbatches of both kinds run in the given ways."""
        keys = (None if how is None else self._kinds.key(stage, how) for how in (never, recomputed))
        return Wanted(stage, recompute, (never, recomputed), tuple(keys))

    def traces(self, wanted: Iterable[Wanted]) -> list[StageTraces]:
        """Return the traces of stages, those of new kinds made here: in the names of the stages they were made on."""
        return [self._traced(own) for own in wanted]

    def _traced(self, own: Wanted) -> StageTraces:
        if own.kind not in self._known:
            never, recomputed = (
                None if how is None or key is None else self._made(own.stage, how, key)
                for how, key in zip(own.hows, own.keys, strict=True)
            )
            self._known[own.kind] = StageTraces(own.recompute, never=never, recomputed=recomputed)
        return self._known[own.kind]

    def _made(self, stage: StageNodes, how: How, key: StageKey) -> StageTrace:
        """Return what is traced of a stage, which is done once for each kind."""
        if key.kind not in self._whole:
            self._whole[key.kind] = block_trace(stage.copied(), how, run=self._run)
        return self._whole[key.kind]

    def _run(self, stage: StageGraph, how: How) -> StageTrace:
        """Return the trace of a stage as it is, made or renamed."""
        key = self._kinds.key(stage, how)
        known = self._short.get(key.kind)
        if known is None:
            known = self._short[key.kind] = _Traced(trace_stage(stage, how), key.names)
        return _in_words(known, key.names)


def _in_words(known: _Traced, names: tuple[str, ...]) -> StageTrace:
    if known.names == names:
        return known.trace
    words = dict(zip(known.names, names, strict=True)) | {"": ""}
    trace = known.trace
    return replace(
        trace,
        forward=_steps(trace.forward, words),
        backward=_steps(trace.backward, words),
        backward_later=_steps(trace.backward_later, words),
        gradients={storage: words[name] for storage, name in trace.gradients.items()},
        split={words[name]: held for name, held in trace.split.items()},
    )


def _steps(steps: tuple[Step, ...], words: Mapping[str, str]) -> tuple[Step, ...]:
    return tuple(Step(words[step.node], step.changes) for step in steps)
