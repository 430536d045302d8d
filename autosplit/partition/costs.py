"""What an assignment costs, counted straight from the problem: the solver's checker shares no code with the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.memory.stage import StageBytes, stage_bytes
from autosplit.partition.problem import Hold, Net, Problem
from autosplit.schedule.catalog import in_flight


@dataclass(frozen=True)
class Costs:
    """Loads and bytes of each stage of an assignment."""

    loads_s: tuple[float, ...]
    stages: tuple[StageBytes, ...]

    @property
    def bottleneck_s(self) -> float:
        """The largest load."""
        return max(self.loads_s)

    @property
    def stage_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each stage."""
        return tuple(stage.peak_bytes for stage in self.stages)


def check(problem: Problem, assignment: Sequence[int]) -> Costs:
    """Return the costs of ``assignment[work] = stage``; raise ValueError when it is not legal.

    The load of a stage is the time of its works plus, once for each net that it cuts, that net's transfer. Stages may
    be empty; capacities are not looked at.
    """
    if len(assignment) != len(problem.works):
        raise ValueError(f"{len(assignment)} stages are assigned to {len(problem.works)} works")
    for before, after in problem.precedence:
        if assignment[before] > assignment[after]:
            raise ValueError(
                f"{problem.works[before].name!r} in stage {assignment[before]} must not come after "
                f"{problem.works[after].name!r} in stage {assignment[after]}"
            )
    colours: dict[object, int] = {}
    for work, stage in zip(problem.works, assignment, strict=True):
        if work.colour is not None and colours.setdefault(work.colour, stage) != stage:
            raise ValueError(f"colour {work.colour!r} is in stages {colours[work.colour]} and {stage}")
    stages = max(assignment) + 1
    members = [{index for index, own in enumerate(assignment) if own == stage} for stage in range(stages)]
    return Costs(
        loads_s=tuple(_load_s(problem, inside) for inside in members),
        stages=tuple(_bytes(problem, inside, stage=stage, stages=stages) for stage, inside in enumerate(members)),
    )


def _load_s(problem: Problem, inside: set[int]) -> float:
    works_s = sum(problem.works[index].forward_s + problem.works[index].backward_s for index in inside)
    return works_s + sum(net.forward_s + net.backward_s for net in problem.nets if _cuts(net, inside))


def _bytes(problem: Problem, inside: set[int], *, stage: int, stages: int) -> StageBytes:
    return stage_bytes(
        static_bytes=sum(problem.works[index].static_bytes for index in inside),
        resident_bytes=sum(hold.bytes for hold in problem.holds if _keeps(hold, inside)),
        in_flight=in_flight(problem.schedule, stage=stage, stages=stages, microbatches=problem.microbatches),
        transients=(problem.works[index].transient_bytes for index in inside),
    )


def _cuts(pins: Net | Hold, inside: set[int]) -> bool:
    if pins.producer in inside:
        return not inside.issuperset(pins.consumers)
    return not inside.isdisjoint(pins.consumers)


def _keeps(hold: Hold, inside: set[int]) -> bool:
    return not inside.isdisjoint(hold.savers) or _cuts(hold, inside)
