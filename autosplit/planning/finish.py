"""From a cut in units to a plan: the nodes between its boundaries moved singly, and the devices replayed."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.partition.costs import check
from autosplit.partition.line_search import LineCut
from autosplit.partition.solve import Partition
from autosplit.partition.step_bound import simple_bound
from autosplit.planning.sweep import Entry, Sweep
from autosplit.planning.writer import Writer


@dataclass(frozen=True)
class Finished:
    """A cut that was replayed: what its plan is written from, and each device's peak and limit."""

    entry: Entry
    writer: Writer
    limits: tuple[float, ...]

    @property
    def peaks(self) -> list[int]:
        """The replayed peak of each device."""
        return self.writer.peaks()

    @property
    def worst(self) -> float:
        """The fullest device's peak, relative to its limit."""
        return max((peak / max(limit, 1.0) for peak, limit in zip(self.peaks, self.limits, strict=False)), default=0.0)

    @property
    def over(self) -> bool:
        """Whether a device needs more than it has."""
        return any(peak > limit for peak, limit in zip(self.peaks, self.limits, strict=False))


def finish(sweep: Sweep, entry: Entry, cut: LineCut) -> Finished:
    """Return a cut of the units as one of the nodes, replayed."""
    case = entry.case(sweep.model, sweep.found, sweep.memo)
    assignment = entry.sized.coarse.assignment(cut.bounds)
    costs = check(case.problem, assignment, recompute=cut.recompute)
    lower_s = simple_bound(case.problem, stages=entry.settled.stages)
    partition = Partition(
        assignment=assignment,
        objective="step_time",
        value_s=costs.step_s,
        lower_bound_s=min(lower_s, costs.step_s),
        status="optimal" if costs.step_s <= lower_s * (1 + 1e-9) else "bounded",
        costs=costs,
    )
    limits = sweep.room(case.problem) or [float("inf")] * len(sweep.options.devices)
    return Finished(entry, Writer(case, partition), tuple(limits))
