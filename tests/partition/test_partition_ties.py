"""Tied parameters: a home, copies, and what bringing them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.partition.checker import check
from autosplit.partition.problem import Device, Problem, TensorEdge, Tie, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_problems import Mix, random_problem, with_extras
from tests.partition.oracle_verdict import smallest_capacity

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


def test_the_link_next_to_a_stage_slows_its_ties() -> None:
    problem = replace(CHAIN, devices=(Device(),) * 3, links=(1.0, 5.0))
    assert check(problem, (0, 1, 1, 2)).loads_s == (3 + 8 / 4, 6.0, 3 + 5 * 8 / 4)


def test_a_dear_tie_keeps_its_users_together() -> None:
    works = tuple(Work(f"w{index}", 1.0, 0.0) for index in range(4))
    problem = Problem(works, (), ties=(Tie((0, 3), 0, 0, 100.0),), order=((0, 1),), microbatches=2)
    partition = solve(problem, stages=2)
    assert partition.assignment[0] == partition.assignment[3]
    assert (partition.bottleneck_s, partition.status) == (2.0, "optimal")


def test_capacities_count_homes_and_copies() -> None:
    assert smallest_capacity(CHAIN, stages=2) == 100
    fits = solve(replace(CHAIN, devices=devices_of((100, 30))))
    assert fits.stage_bytes == (100, 30)
    # Without room for a copy all users must be in one stage, and then the home is there.
    alone = solve(replace(CHAIN, order=(), nets=(), devices=devices_of((29, 100))))
    assert alone.stage_bytes == (0, 100)


def test_where_no_copy_fits_the_smallest_capacity_is_the_homes() -> None:
    greedy = replace(CHAIN, ties=(Tie((0, 3), 100, 130),), nets=())
    assert smallest_capacity(greedy, stages=2) == 100
    assert smallest_capacity(replace(greedy, order=((0, 1), (1, 2), (2, 3))), stages=2) == 130


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_on_ideals_gives_bounds_around_the_optimum(seed: int, ties: bool) -> None:
    """With too many ideals the bound is that of the problem without its ties."""
    problem = with_extras(random_problem(seed, Mix(30)), seed, ties=ties, recompute=False, replicas=False)
    exact, rough = solve(problem, stages=4), solve(problem, stages=4, ideal_limit=60)
    assert exact.status == "optimal"
    assert rough.lower_bound_s <= exact.bottleneck_s * (1 + 1e-9)
    assert exact.bottleneck_s <= rough.bottleneck_s * (1 + 1e-9)
