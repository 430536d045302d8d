"""Stages of one recording traced once per kind.

    stage ──key──► known? ─── yes ──────────────────────► its traces
                     │ no
                   short stage ──► run on fake tensors ──► expanded

A search replays many cuts of one recording, whose stages are much the same.

A stage's key says what its traces depend on and nothing of names: nodes and what they take are numbered in the order in
which they come, parameters and buffers likewise, so that the key says which of them are one and the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter

import torch
from torch import fx, nn

from autosplit.memory.pieces import Parts, Recompute, StageTraces
from autosplit.profile.blocks import block_trace, called
from autosplit.profile.stage_trace.stage_graph import StageNodes, Stages, block_paths, unit_path
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.inputs.objects import storage_key


class TraceMemo:
    """What was traced of one recording; valid for any cut of it, while the caller's autocast stays as it is."""

    def __init__(self, traced: TracedGraph) -> None:
        self.stages = Stages(traced)
        self._kinds = _Kinds(traced.root)
        self._known: dict[Hashable, StageTraces] = {}
        self._blocks: dict[str, tuple[str, ...]] = {}

    def blocks(self, stage: StageNodes) -> tuple[str, ...]:
        """Return the paths of the blocks that a stage's nodes lie in."""
        modules = dict.fromkeys(info.module for _, info in stage.computing())
        for module in modules.keys() - self._blocks.keys():
            self._blocks[module] = block_paths(stage.root, (module,))
        return tuple(dict.fromkeys(path for module in modules for path in self._blocks[module]))

    def key(self, stage: StageNodes, how: How) -> Hashable:
        """Return what is equal for stages that are traced alike, up to names."""
        return _Key(self._kinds, stage, how).made()

    def traces(
        self,
        stage: StageNodes,
        recompute: Recompute,
        *,
        never: How | None,
        recomputed: How | None,
        parts: Parts | None = None,
    ) -> StageTraces:
        """Return the traces of a stage whose microbatches of both kinds run in the given ways; None: there are none.

        Those of a new kind are made here; nodes are called as in the stage that they were made on. ``parts``: what a
        rank has of them.
        """
        if parts is not None:
            whole = self.traces(stage, recompute, never=never, recomputed=recomputed)
            known = (None if trace is None else parts.of(trace) for trace in (whole.never, whole.recomputed))
            return StageTraces(recompute, *known)
        key = recompute, *(None if how is None else self.key(stage, how) for how in (never, recomputed))
        if key not in self._known:
            one, other = (None if how is None else block_trace(stage, how) for how in (never, recomputed))
            self._known[key] = StageTraces(recompute, never=one, recomputed=other)
        return self._known[key]


class _Kinds:
    """What the nodes of one recording do, apart from what they take: each kind as a number."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._numbers: dict[Hashable, int] = {}
        self._nodes: dict[fx.Node, tuple[int, tuple[torch.Tensor, ...]]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._places = {key: place for place, key in enumerate(names)}
        self._tied = frozenset(name for own in names.values() if len(own) > 1 for name in own)

    def place(self, tensor: torch.Tensor) -> int:
        """Return where a parameter stands among all; -1 for any other tensor."""
        return self._places.get(id(tensor), -1)

    def node(self, node: fx.Node) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Return the number of what a node does, and the parameters and buffers that its target stands for."""
        if node not in self._nodes:
            number = self._numbers.setdefault(self._kind(node), len(self._numbers))
            self._nodes[node] = number, self._state(node)
        return self._nodes[node]

    def _kind(self, node: fx.Node) -> Hashable:
        info: TracedNode | None = node.meta.get(INFO)
        takes = {operand: number for number, operand in enumerate(node.all_input_nodes)}
        calls = called(node, self._root, takes)
        if info is None:
            return calls
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
        return calls, known, picked, len(info.reads), tied

    def _state(self, node: fx.Node) -> tuple[torch.Tensor, ...]:
        if node.op not in ("call_module", "get_attr"):
            return ()
        value = attrgetter(str(node.target))(self._root)
        if isinstance(value, nn.Module):
            return (*value.parameters(), *value.buffers())
        return (value,) if isinstance(value, torch.Tensor) else ()


class _Key:
    """The key of one stage, in the making."""

    def __init__(self, kinds: _Kinds, stage: StageNodes, how: How) -> None:
        self.kinds, self.stage, self.how = kinds, stage, how
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.places: list[int] = []
        self.units: dict[str, int] = {"": 0}
        self.unit_of: dict[str, int] = {}
        self.colocated: dict[int | None, int] = {None: 0}

    def made(self) -> Hashable:
        given = (*self.stage.numbers, *self.stage.inputs)
        numbers = {node: number for number, node in enumerate((*given, *self.stage.own))}
        outputs = frozenset(self.stage.outputs)
        told = [self._given(node.meta.get(INFO)) for node in given]
        told += [self._told(node, numbers, leaves=node in outputs) for node in self.stage.own]
        order = tuple(sorted(range(len(self.places)), key=self.places.__getitem__))
        how = self.how
        observed = None if how.observed is None else frozenset(how.observed.items())
        settings = how.rows, how.whole, how.apart, how.kernels, observed, how.roots is None
        return settings, tuple(told), order

    def _told(self, node: fx.Node, numbers: dict[fx.Node, int], *, leaves: bool) -> Hashable:
        info: TracedNode | None = node.meta.get(INFO)
        takes = tuple([numbers[operand] for operand in node.all_input_nodes])
        kind, tensors = self.kinds.node(node)
        state = tuple([self._state(tensor) for tensor in tensors])
        if info is None:
            return kind, takes, state
        roots = self.how.roots
        ends = (leaves, roots is None or info.name in roots, info.name == self.how.averaged) if leaves else ()
        together = self.colocated.setdefault(info.colocation_group, len(self.colocated))
        return kind, takes, state, ends, self._unit(info.module), together

    def _given(self, info: TracedNode | None) -> Hashable:
        if info is None:
            return None
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
