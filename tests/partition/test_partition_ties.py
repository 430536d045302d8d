"""Tied parameters: a home, copies, and what bringing them costs."""

from __future__ import annotations

import pytest

from autosplit.partition.checker import check
from autosplit.partition.problem import Problem, TensorEdge, Tie, Work
from autosplit.partition.solve import solve

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(3)),
    ties=(Tie((0, 3), home_bytes=100, copy_bytes=30, transfer_s=8.0),),
    microbatches=4,
)


def test_home_copy_and_transfer_by_hand() -> None:
    costs = check(CHAIN, (0, 1, 1, 2))
    assert costs.stage_bytes == (100, 0, 30)
    assert costs.loads_s == (3 + 8 / 4, 6.0, 3 + 8 / 4)
    together = check(CHAIN, (0, 0, 0, 0))
    assert (together.stage_bytes, together.loads_s) == ((100,), (12.0,))


def test_the_solver_refuses_ties() -> None:
    with pytest.raises(ValueError, match="ties, and schedules with several stages on a device, are for cuts along a"):
        solve(CHAIN, stages=2)
