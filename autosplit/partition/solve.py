"""The best cut of a problem into stages, with its proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autosplit.errors import InfeasibleError
from autosplit.partition.costs import Costs, check
from autosplit.partition.problem import Problem
from autosplit.partition.search import TOLERANCE, Outcome, search
from autosplit.units import format_bytes

IDEAL_LIMIT = 20_000


@dataclass(frozen=True)
class Partition:
    """An assignment of works to stages and what it costs.

    ``status`` is "optimal" when ``bottleneck_s`` is proven to be the least possible, else "bounded":
    then no partition is better than ``lower_bound_s``.
    """

    assignment: tuple[int, ...]
    stages: int
    loads_s: tuple[float, ...]
    stage_bytes: tuple[int, ...]
    bottleneck_s: float
    lower_bound_s: float
    status: Literal["optimal", "bounded"]


def solve(problem: Problem, *, stages: int, ideal_limit: int = IDEAL_LIMIT) -> Partition:
    """Return the partition into ``stages`` non-empty stages with the least bottleneck that fits the capacities.

    Fewer stages come back only when colours and cycles leave fewer groups. Among equal bottlenecks the one whose
    fullest stage needs the fewest bytes is preferred. Raises InfeasibleError when no partition fits. The answer is
    exact where the ideals of the condensed graph number at most ``ideal_limit``.
    """
    _check_arguments(problem, stages)
    outcome = search(problem, stages=stages, least="load", ideal_limit=ideal_limit)
    if outcome.found is None:
        raise _infeasible(problem, stages=stages, outcome=outcome, ideal_limit=ideal_limit)
    costs = check(problem, outcome.found.assignment)
    optimal = costs.bottleneck_s <= outcome.lower_bound * (1 + 3 * TOLERANCE)
    return _partition(costs, outcome, lower_bound_s=outcome.lower_bound, optimal=optimal)


def solve_evenly(problem: Problem, *, stages: int, ideal_limit: int = IDEAL_LIMIT) -> Partition:
    """Return the partition whose fullest stage needs the fewest bytes, whatever its time; capacities play no part."""
    _check_arguments(problem, stages)
    outcome = search(problem, stages=stages, least="bytes", ideal_limit=ideal_limit)
    assert outcome.found is not None, "without limits every graph can be cut"
    return _partition(check(problem, outcome.found.assignment), outcome, lower_bound_s=0.0, optimal=False)


def _partition(costs: Costs, outcome: Outcome, *, lower_bound_s: float, optimal: bool) -> Partition:
    assert outcome.found is not None
    return Partition(
        assignment=outcome.found.assignment,
        stages=len(costs.loads_s),
        loads_s=costs.loads_s,
        stage_bytes=costs.stage_bytes,
        bottleneck_s=costs.bottleneck_s,
        lower_bound_s=min(lower_bound_s, costs.bottleneck_s),
        status="optimal" if optimal else "bounded",
    )


def smallest_capacity(problem: Problem, *, stages: int, ideal_limit: int = IDEAL_LIMIT) -> int:
    """Return the least bytes per device for which a partition into ``stages`` stages exists, all devices being equal.

    The problem's own capacities play no part. Where the ideals are more than ``ideal_limit`` it is the least found.
    """
    return max(solve_evenly(problem, stages=stages, ideal_limit=ideal_limit).stage_bytes)


def _check_arguments(problem: Problem, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"stages is {stages}; it is at least 1")
    if problem.capacity_bytes is not None and len(problem.capacity_bytes) != stages:
        raise ValueError(f"{len(problem.capacity_bytes)} capacities are given for {stages} stages")


def _infeasible(problem: Problem, *, stages: int, outcome: Outcome, ideal_limit: int) -> InfeasibleError:
    assert problem.capacity_bytes is not None, "without limits every graph can be cut"
    even = solve_evenly(problem, stages=stages, ideal_limit=ideal_limit)
    return infeasible(even.stage_bytes, problem.capacity_bytes, exhaustive=outcome.exhaustive)


def infeasible(stage_bytes: Sequence[int], capacity_bytes: Sequence[int], *, exhaustive: bool) -> InfeasibleError:
    """Return the error for stages that do not fit where they need the fewest bytes that any cut needs.

    ``exhaustive``: no other cut was left out.
    """
    pairs = list(zip(stage_bytes, capacity_bytes, strict=False))
    over = max(range(len(pairs)), key=lambda stage: pairs[stage][0] - pairs[stage][1])
    needed, capacity = pairs[over]
    fact = "no partition fits" if exhaustive else "no partition was found that fits"
    return InfeasibleError(
        f"{fact} {len(pairs)} stages: with the most even use of memory stage {over} needs {_exact(needed)}, its device "
        f"has {_exact(capacity)}; devices of {_exact(max(stage_bytes))} each would hold it, or use more "
        "devices or smaller microbatches"
    )


def _exact(count: int) -> str:
    return f"{format_bytes(count)} ({count:,} bytes)"
