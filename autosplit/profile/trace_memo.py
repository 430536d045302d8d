"""Stages of one recording traced once per kind: equal ones, and equal ones without their repeated blocks.

    stage ──key──► known? ─── yes ──────────────────────────────► its trace, on other names
                     │ no
                   short stage ──key──► known? ── yes ──► renamed ──► expanded
                                          │ no
                                        run on fake tensors

A search replays many cuts of one recording, whose stages are much the same: ten blocks here, eleven there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from autosplit.memory.events import StageTrace, Step
from autosplit.memory.pieces import Recompute, StageTraces
from autosplit.profile.blocks import block_trace
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

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the stage's own words."""
        return next(key.names for key in self.keys if key is not None)


class TraceMemo:
    """What was traced of one recording; valid for any cut of it, while the caller's autocast stays as it is."""

    def __init__(self) -> None:
        self._kinds = Kinds()
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

    def wanted(
        self, stage: StageNodes, recompute: Recompute, *, never: How | None = None, recomputed: How | None = None
    ) -> Wanted:
        """Return what is to be traced of a stage whose microbatches of both kinds run in the given ways."""
        keys = (None if how is None else self._kinds.key(stage, how) for how in (never, recomputed))
        return Wanted(stage, recompute, (never, recomputed), tuple(keys))

    def traces(self, wanted: Iterable[Wanted]) -> list[Known]:
        """Return the traces of stages, those of new kinds made here.

        Each is in the names that its two traces share: both may have been made on other stages.
        """
        return [self._traced(own) for own in wanted]

    def _traced(self, own: Wanted) -> Known:
        if own.kind not in self._known:
            pairs = zip(own.hows, own.keys, strict=True)
            never, recomputed = (
                None if how is None or key is None else _in_words(self._made(own.stage, how, key), own.names)
                for how, key in pairs
            )
            self._known[own.kind] = Known(StageTraces(own.recompute, never=never, recomputed=recomputed), own.names)
        return self._known[own.kind]

    def _made(self, stage: StageNodes, how: How, key: StageKey) -> _Traced:
        """Return what is traced of a stage, which is done once for each kind."""
        if key.kind not in self._whole:
            self._whole[key.kind] = _Traced(block_trace(stage.copied(), how, run=self._run), key.names)
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
