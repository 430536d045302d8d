"""Stages of one recording traced once per way to run them: a search replays many cuts, which have stages in common."""

from __future__ import annotations

from collections.abc import Hashable

from autosplit.profile.blocks import block_trace
from autosplit.profile.stage_trace.kinds import StageKinds
from autosplit.profile.stage_trace.stage_graph import StageNodes, Stages
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.schedule.memory.pieces import RankParts, Recompute, StageTraces
from autosplit.trace.graph import INFO, TracedGraph


class TraceMemo:
    """What was traced of one recording; valid for any cut of it, while autocast and the loss stay as they are."""

    def __init__(self, traced: TracedGraph) -> None:
        self.stages = Stages(traced)
        self._known: dict[Hashable, StageTraces] = {}
        self._kinds = StageKinds()

    def key(self, stage: StageNodes, how: How) -> Hashable:
        """Return what a stage's traces depend on."""
        flows = tuple(how.input_grads.get(node.meta[INFO].name, False) for node in stage.inputs)
        roots = None if how.roots is None else frozenset(how.roots)
        observed = None if how.observed is None else frozenset(how.observed.items())
        settings = how.rows, how.averaged, tuple(how.units), how.whole, how.by_use, how.apart, how.kernels
        return stage, flows, roots, observed, settings

    def traces(
        self,
        stage: StageNodes,
        recompute: Recompute,
        *,
        never: How | None,
        recomputed: How | None,
        parts: RankParts | None = None,
    ) -> StageTraces:
        """Return the traces of a stage whose microbatches of both kinds run in the given ways; None: there are none.

        ``parts``: what a rank has of them.
        """
        if parts is not None:
            whole = self.traces(stage, recompute, never=never, recomputed=recomputed)
            known = (None if trace is None else parts.of(trace) for trace in (whole.never, whole.recomputed))
            return StageTraces(recompute, *known)
        key = recompute, *(None if how is None else self.key(stage, how) for how in (never, recomputed))
        if key not in self._known:
            traces = (None if how is None else block_trace(stage, how, self._kinds) for how in (never, recomputed))
            self._known[key] = StageTraces(recompute, *traces)
        return self._known[key]
