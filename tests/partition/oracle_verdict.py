"""What must hold of every answer of the solver, given the optimum from an oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.problem import Problem, devices_of
from autosplit.partition.solve import Partition, solve
from tests.partition.oracle_costs import Rules

CLOSE = 1e-7
"""HiGHS is exact to about this much, relatively."""


def solved(
    problem: Problem,
    *,
    stages: int,
    optimum: float,
    empty: bool = False,
    slack: float = 0.0,
    time_limit_s: float | None = None,
    ideal_limit: int = 20_000,
) -> Partition | None:
    """Solve and compare with the optimum; infinite stands for a problem that no cut can meet, and gives None.

    The answer must be proven optimal, or with ``slack`` be no more than that, relatively, above the optimum.
    """
    limits = {"time_limit_s": time_limit_s, "ideal_limit": ideal_limit}
    if optimum == math.inf:
        with pytest.raises(InfeasibleError):
            solve(problem, stages=stages, empty=empty, **limits)
        return None
    partition = solve(problem, stages=stages, empty=empty, **limits)
    _assert_legal(problem, partition, stages=stages, empty=empty)
    assert optimum * (1 - CLOSE) <= partition.value_s <= optimum * (1 + slack + CLOSE)
    assert partition.lower_bound_s <= optimum * (1 + CLOSE)
    assert partition.lower_bound_s <= partition.value_s
    assert partition.status == "optimal" or slack
    if partition.status == "optimal":
        assert partition.value_s == pytest.approx(optimum, rel=CLOSE)
    return partition


def smallest_capacity(problem: Problem, *, stages: int) -> int:
    """Return the smallest limit that the solver names where no device has room for anything."""
    try:
        solve(replace(problem, devices=devices_of((0,) * stages)), stages=stages)
    except InfeasibleError as error:
        return error.smallest_bytes or 0
    return 0


def _assert_legal(problem: Problem, partition: Partition, *, stages: int, empty: bool) -> None:
    """Assert that the cut is legal, is worth what it says and fits, by the checker and by the oracle's own count."""
    rules = Rules(problem, stages)
    assert rules.legal(partition.assignment)
    assert empty or len(set(partition.assignment)) == stages
    assert rules.bottleneck_s(partition.assignment) == pytest.approx(partition.value_s)
    costs = check(problem, partition.assignment, stages=stages)
    assert (costs.loads_s, costs.stage_bytes) == (partition.costs.loads_s, partition.costs.stage_bytes)
    assert costs.bottleneck_s == partition.value_s
    for needed, capacity in zip(costs.device_bytes, problem.capacity_bytes or (), strict=False):
        assert capacity is None or needed <= capacity
