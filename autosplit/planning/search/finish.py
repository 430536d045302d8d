"""From a cut in units to a plan: the nodes between its boundaries moved singly, and the devices replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autosplit.partition.checker import check
from autosplit.partition.line.coarse import Coarse, coarsened, taken_apart
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineCut, LineSearch, listed
from autosplit.partition.problem import Problem
from autosplit.partition.solve import Partition, Status
from autosplit.partition.step_bound import step_bound
from autosplit.planning.peaks import PeakRange
from autosplit.planning.plan.fields import Verdict
from autosplit.planning.plan.stage_memory import judged
from autosplit.planning.plan.write import Writer
from autosplit.planning.profiled.between import INSIDE, WIDE
from autosplit.planning.profiled.problem import ProfiledProblem
from autosplit.planning.search.sweep import Setup, Sweep

_MOST = 1_000
"""Boundaries are moved node by node where no more pieces come of it."""
_GAIN = 1e-4
"""What a cut must gain to be replayed again."""


@dataclass(frozen=True)
class Finished:
    """A cut that was replayed: what its plan is written from, and each device's peak and limit."""

    entry: Setup
    cut: LineCut
    """The cut of the units that it comes from, and what its stages recompute."""
    writer: Writer
    limits: tuple[float, ...]
    """What each device surely has room for."""
    longer: float | None = None
    """How much longer the step would be with cuts between modules, where it has others for that; else None."""

    @property
    def step_s(self) -> float:
        """The step, with what runs once in it beside the stages."""
        return self.writer.partition.value_s + self.entry.sized.once_s

    @property
    def peaks(self) -> list[int]:
        """The replayed peak of each device."""
        return self.writer.peaks

    @cached_property
    def ranges(self) -> list[PeakRange]:
        """Between what each device's peak may come out: itself where it has no range."""
        known = self.writer.ranges
        return [known.get(lane, PeakRange(peak, peak)) for lane, peak in enumerate(self.peaks)]

    @property
    def highs(self) -> list[int]:
        """The most that each device's peak may come out as."""
        return [peak.high_bytes for peak in self.ranges]

    @property
    def worst(self) -> float:
        """The fullest device's peak, relative to its limit."""
        return self._most(self.peaks)

    @property
    def fullest(self) -> float:
        """The most that the fullest device may need, relative to its limit."""
        return self._most(self.highs)

    def _most(self, held: Sequence[int]) -> float:
        return max((size / max(limit, 1.0) for size, limit in zip(held, self.limits, strict=False)), default=0.0)

    @property
    def sure(self) -> bool:
        """Whether every device has room for the most that it may need; surely without limits."""
        return min(self.limits) == math.inf or all(
            high <= limit for high, limit in zip(self.highs, self.limits, strict=False)
        )

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, as its plan will say."""
        if self.sure:
            return "fits"
        return "no" if "no" in map(self._verdict, range(len(self.peaks))) else "borderline"

    def _verdict(self, lane: int) -> Verdict | None:
        options, known = self.entry.options, self.writer.ranges.get(lane)
        return judged(
            self.peaks[lane],
            options.capacity_bytes(lane),
            low=None if known is None else known.low_bytes,
            high=None if known is None else known.high_bytes,
            reserve=options.reserved_bytes(lane),
        )

    @property
    def rank(self) -> tuple[float, ...]:
        """The less the better: what fits for sure, what is predicted to, what may, and of the rest the closest.

        Of what may fit it is that with the smaller part of its range above the limit: it is the likeliest to run.
        """
        step_s = self.writer.partition.value_s
        if self.sure:
            return (0.0, step_s)
        if self.worst <= 1.0:
            return (1.0, step_s)
        if self.verdict == "borderline":
            pairs = zip(self.ranges, self.limits, strict=False)
            risk = max((peak.high_bytes - limit) / max(peak.high_bytes - peak.low_bytes, 1) for peak, limit in pairs)
            return (2.0, round(risk, 1), step_s)
        return (3.0, round(self.worst, 2), step_s)


def finish(sweep: Sweep, entry: Setup, cut: LineCut) -> Finished:
    """Return a cut of the units as one of the nodes, replayed."""
    case = entry.case
    return _replayed(sweep, entry, cut, case, entry.sized.coarse.assignment(cut.bounds))


def refined(sweep: Sweep, finished: Finished) -> Finished:
    """Return the cut with its boundaries moved node by node, where that is faster and fits when it is replayed.

    The units next to a boundary are taken apart; all others stay whole. Where cuts fall between modules, those come
    first, then narrow places inside for `INSIDE` of the step, then any others for `WIDE`, or for room.
    """
    if sweep.pieces is None:
        return _bounded(_inside(sweep, finished, gain=_GAIN))
    best = _inside(sweep, finished, gain=WIDE)
    longer = None
    for pieces, enough in ((sweep.pieces.modules, INSIDE), (sweep.pieces.narrow, WIDE)):
        other = _between(sweep, best, pieces)
        if other is None:
            continue
        gain = 1 - best.writer.partition.value_s / other.writer.partition.value_s
        if gain < enough:
            return _bounded(replace(other, longer=longer))
        longer = max(0.0, 1 / (1 - gain) - 1) if longer is None else longer
    return _bounded(replace(best, longer=longer))


def _between(sweep: Sweep, best: Finished, pieces: tuple[int, ...]) -> Finished | None:
    """Return the configuration's fastest cut between ``pieces``; None if none fits as well as the best."""
    stages, case = best.entry.settled.stages, best.writer.case
    if max(pieces) + 1 < stages:
        return None
    coarse = coarsened(case.problem, pieces)
    search = LineSearch(Line(coarse.problem), coarse.problem, stages=stages)
    cut = search.fastest(listed(best.cut.recompute), best.limits)
    if cut is None:
        return None
    moved = replace(cut, bounds=best.cut.bounds)
    finished = _replayed(sweep, best.entry, moved, case, coarse.assignment(cut.bounds))
    return finished if finished.rank[0] <= best.rank[0] else None


def _inside(sweep: Sweep, finished: Finished, *, gain: float) -> Finished:
    """Return the cut with its boundaries moved node by node where that gains so much of the step, else as it is."""
    entry, cut, case = finished.entry, finished.cut, finished.writer.case
    apart = taken_apart(sweep.group_of, entry.sized.coarse, cut.bounds)
    if max(apart) >= _MOST:
        return finished
    fine = coarsened(case.problem, apart)
    search = LineSearch(Line(fine.problem), fine.problem, stages=entry.settled.stages)
    better = search.fastest(listed(cut.recompute), _room(finished, search, fine))
    if better is None or better.step_s >= cut.step_s * (1 - gain):
        return finished
    moved = _replayed(sweep, entry, replace(better, bounds=cut.bounds), case, fine.assignment(better.bounds))
    return min(finished, moved, key=lambda each: each.rank)


def _room(finished: Finished, search: LineSearch, fine: Coarse) -> list[float]:
    """Return the limits less what the replay held above the formula."""
    limits = finished.limits
    if min(limits) == math.inf:
        return list(limits)
    held = search.device_bytes(_bounds(fine, finished.writer.partition), finished.cut.recompute)
    above = finished.highs if finished.sure else finished.peaks
    room = [limit - max(0, peak - expected) for limit, peak, expected in zip(limits, above, held, strict=False)]
    return [*room, *limits[len(room) :]]


def _bounds(fine: Coarse, partition: Partition) -> tuple[int, ...]:
    """Return the boundaries of a partition among the units of another coarse problem."""
    ends = [0] * (partition.stages + 1)
    for unit, stage in zip(fine.unit_of, partition.assignment, strict=True):
        ends[stage + 1] = max(ends[stage + 1], unit + 1)
    return tuple(ends)


def _replayed(sweep: Sweep, entry: Setup, cut: LineCut, case: ProfiledProblem, assignment: tuple[int, ...]) -> Finished:
    partition = as_cut(case.problem, assignment, cut.recompute)
    limits = sweep.memory_limits(case.problem) or [float("inf")] * len(sweep.options.devices)
    return Finished(entry, cut, Writer(case, partition), tuple(limits))


def as_cut(problem: Problem, assignment: tuple[int, ...], recompute: Sequence[str]) -> Partition:
    """Return an assignment with what it costs, and no bound."""
    costs = check(problem, assignment, recompute=recompute)
    return Partition(assignment, "step_time", costs.step_s, 0.0, "bounded", costs)


def bounded(problem: Problem, partition: Partition) -> Partition:
    """Return a partition with what no cut of as many stages that recomputes as much can be below."""
    costs, stages = partition.costs, partition.stages
    least = min(map(problem.again, costs.recompute))
    lower_s = step_bound(problem, stages=stages, again=least)
    status: Status = "optimal" if costs.step_s <= lower_s * (1 + 1e-9) else "bounded"
    return replace(partition, lower_bound_s=min(lower_s, costs.step_s), status=status)


def _bounded(finished: Finished) -> Finished:
    writer = finished.writer
    writer.partition = bounded(writer.problem, writer.partition)
    return finished
