"""Stages of one recording traced once per kind: equal ones, and equal ones without their repeated blocks.

    stage ──key──► known? ─── yes ──────────────────────────────► its trace, on other names
                     │ no
                   short stage ──key──► known? ── yes ──► renamed ──► expanded
                                          │ no
                                        run on fake tensors

A search replays many cuts of one recording, whose stages are much the same: ten blocks here, eleven there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from autosplit.memory.events import StageTrace, Step
from autosplit.memory.pieces import Recompute, StageTraces
from autosplit.profile.blocks import block_trace
from autosplit.profile.quick_fake import QuickFake
from autosplit.profile.stage_graph import StageGraph, StageGraphs, StageNodes
from autosplit.profile.stage_key import Kinds, StageKey
from autosplit.profile.stage_pieces import block_paths
from autosplit.profile.stage_trace import How, trace_stage
from autosplit.trace.graph import TracedGraph


@dataclass(frozen=True)
class Known:
    """Traces of a stage, and what its nodes are called in the stage on which they were made."""

    traces: StageTraces
    names: tuple[str, ...]

    def node(self, name: str, names: tuple[str, ...]) -> str:
        """Return what a node that the traces name is called in a stage of these ``names``."""
        return name if self.names == names or not name else names[self.names.index(name)]


@dataclass(frozen=True)
class _Traced:
    trace: StageTrace
    names: tuple[str, ...]


class TraceMemo:
    """What was traced of one recording; valid for any cut of it, while the caller's autocast stays as it is."""

    def __init__(self) -> None:
        self._kinds = Kinds()
        self.quick = QuickFake()
        self._whole: dict[Hashable, _Traced] = {}
        self._short: dict[Hashable, _Traced] = {}
        self._known: dict[Hashable, Known] = {}
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

    def traces(
        self, stage: StageNodes, recompute: Recompute, *, never: How | None = None, recomputed: How | None = None
    ) -> tuple[Known, tuple[str, ...]]:
        """Return the traces of a stage's microbatches of both kinds, and the names in the stage's own words."""
        keys = [None if how is None else self._kinds.key(stage, how) for how in (never, recomputed)]
        kind = recompute, *(None if key is None else key.kind for key in keys)
        names = next(key.names for key in keys if key is not None)
        if kind not in self._known:
            one, other = map(partial(self._trace, stage, names=names), (never, recomputed), keys)
            self._known[kind] = Known(StageTraces(recompute, never=one, recomputed=other), names)
        return self._known[kind], names

    def _trace(
        self, stage: StageNodes, how: How | None, key: StageKey | None, *, names: tuple[str, ...]
    ) -> StageTrace | None:
        """Return one trace of a stage in the names that its traces share: it may have been made on another stage."""
        if how is None or key is None:
            return None
        if key.kind not in self._whole:
            self._whole[key.kind] = _Traced(block_trace(stage.copied(), how, run=self._run), key.names)
        return _in_words(self._whole[key.kind], names)

    def _run(self, stage: StageGraph, how: How) -> StageTrace:
        """Return the trace of a stage as it is, made or renamed."""
        key = self._kinds.key(stage, how)
        known = self._short.get(key.kind)
        if known is None:
            known = self._short[key.kind] = _Traced(trace_stage(stage, how, quick=self.quick), key.names)
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
