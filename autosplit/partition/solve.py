"""The best cut of a problem into stages, with its proof.

The search for it, two dozen modules, is imported where a graph is cut: a plan along a line of works needs none of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import Costs, check
from autosplit.partition.goal import FOREVER, Timer
from autosplit.partition.infeasible import no_fit
from autosplit.partition.problem import Problem, Work
from autosplit.progress import phase

if TYPE_CHECKING:
    from autosplit.partition.ideals.search import Solution

IDEAL_LIMIT = 20_000
_PROVEN = 1 + 3e-9
"""A value that is no further above its bound is the least: the search stops at a billionth."""

Objective = Literal["bottleneck", "step_time"]
Status = Literal["optimal", "bounded"]
"""What is made least: the largest load of a stage, or the simulated length of a step."""


@dataclass(frozen=True)
class Partition:
    """An assignment of works to stages and what it costs.

    ``status`` is "optimal" when ``value_s`` is proven to be the least possible, else "bounded": then no partition has a
    value below ``lower_bound_s``. The value is that of the ``objective``: ``costs.bottleneck_s`` or ``costs.step_s``.
    """

    assignment: tuple[int, ...]
    objective: Objective
    value_s: float
    lower_bound_s: float
    status: Status
    costs: Costs

    @property
    def stages(self) -> int:
        """Number of stages up to the last that is not empty."""
        return len(self.costs.loads_s)

    @property
    def gap(self) -> float:
        """By how much, relatively, the value is above the bound at most."""
        return self.value_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0 if not self.value_s else math.inf


def _find(problem: Problem, **how: Any) -> Solution:
    from autosplit.partition.ideals.search import IdealSearch

    return IdealSearch(problem, **how).run()


@phase("solving")
def solve(
    problem: Problem,
    *,
    stages: int,
    objective: Objective = "bottleneck",
    empty: bool = False,
    time_limit_s: float | None = None,
    ideal_limit: int = IDEAL_LIMIT,
) -> Partition:
    """Return the partition into ``stages`` non-empty stages with the least objective that fits the capacities.

    Stages hold static bytes alone, and their devices are alike, as many as stages; who has more than that cuts along a
    line of works. Fewer stages come back only when colocation and cycles leave fewer groups, or where ``empty`` allows
    stages without a work. Among equal values the one whose fullest stage needs the fewest bytes is preferred. Raises
    InfeasibleError when no partition fits. The least bottleneck is exact where the
    ideals of the condensed graph number at most ``ideal_limit``; from its cut the search for the shortest step starts,
    whose answer is the best of many that are simulated. After ``time_limit_s`` the best so far comes back.
    """
    several = problem.virtual_stages > 1 or problem.custom_schedule is not None
    unlike = len(set(problem.devices or ())) > 1 or problem.links is not None
    if several or unlike or problem.ties or problem.holds or any(work.transient_bytes for work in problem.works):
        raise ValueError(
            "ties, kept storages, transient bytes, unlike devices or links, and several stages on a device are for "
            "cuts along a line of works"
        )
    clock = Timer.start(time_limit_s)
    answer = _find(problem, stages=stages, least="load", empty=empty, ideal_limit=ideal_limit, clock=clock)
    if answer.assignment is None:
        raise _infeasible(problem, stages=stages, empty=empty, answer=answer, ideal_limit=ideal_limit)
    if objective == "step_time":
        return _shortest(problem, answer.assignment, stages=stages, empty=empty, clock=clock)
    costs = check(problem, answer.assignment, stages=stages if empty else None)
    optimal = costs.bottleneck_s <= answer.lower_bound * _PROVEN
    return Partition(
        assignment=answer.assignment,
        objective=objective,
        value_s=costs.bottleneck_s,
        lower_bound_s=min(answer.lower_bound, costs.bottleneck_s),
        status="optimal" if optimal else "bounded",
        costs=costs,
    )


def _shortest(problem: Problem, assignment: tuple[int, ...], *, stages: int, empty: bool, clock: Timer) -> Partition:
    """Return the partition with the shortest step that is found from the one with the least bottleneck."""
    from autosplit.partition.line.step_time import least_step

    assignment = least_step(problem, stages=stages, empty=empty, assignment=assignment, clock=clock)
    costs = check(problem, assignment, stages=stages if empty else None)
    lower_s = step_lower_bound(problem, stages=stages if empty else costs.cut.count, clock=clock)
    return Partition(
        assignment=assignment,
        objective="step_time",
        value_s=costs.step_s,
        lower_bound_s=min(lower_s, costs.step_s),
        status="optimal" if costs.step_s <= lower_s * _PROVEN else "bounded",
        costs=costs,
    )


def step_lower_bound(problem: Problem, *, stages: int, clock: Timer = FOREVER) -> float:
    """Return what no step of a cut into so many stages can be below, whatever its devices hold.

    It is the best of three bounds: by paths with works spread at will, by a mixture of critical paths, and by the least
    that the longest stage takes without transfers, which the search for the least bottleneck finds.
    """
    from autosplit.partition.step_bound import step_bound

    works: tuple[Work, ...] = problem.works
    if not problem.schedule_of(stages).has_backward:
        works = tuple(replace(work, backward_s=0.0, weight_s=0.0) for work in works)
    devices = None if problem.devices is None else tuple(replace(each, capacity_bytes=None) for each in problem.devices)
    order = tuple(sorted(problem.precedence))
    alone = replace(problem, works=works, nets=(), holds=(), order=order, devices=devices)
    answer = _find(alone, stages=stages, least="load", empty=True, ideal_limit=IDEAL_LIMIT, clock=clock)
    return step_bound(problem, stages=stages, longest_s=answer.lower_bound)


def _infeasible(problem: Problem, *, stages: int, empty: bool, answer: Solution, ideal_limit: int) -> InfeasibleError:
    """Return the error that says what binds, and which limit could be met."""
    assert problem.devices is not None, "without limits every graph can be cut"
    even = _find(problem, stages=stages, least="bytes", empty=empty, ideal_limit=ideal_limit)
    assert even.assignment is not None, "without limits every graph can be cut"
    return no_fit(
        problem,
        stages=stages,
        assignment=even.assignment,
        costs=check(problem, even.assignment, stages=stages if empty else None),
        exhaustive=answer.exhaustive,
        smallest=even.exhaustive,
    )
