"""Costs by hand, ties, errors, and what a caller's mistake says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_verdict import smallest_capacity

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=100, transient_bytes=7 + index) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.25, 0.5) for index in range(3)),
    tuple(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
    microbatches=8,
)


def test_a_chain_by_hand() -> None:
    partition = solve(CHAIN, stages=2)
    assert partition.assignment == (0, 0, 1, 1)
    assert partition.costs.loads_s == (6.75, 6.75)
    # Stage 0: two works, holds 0 and 1 for two microbatches. Stage 1: holds 1 (a boundary) and 2 for one.
    assert partition.costs.stage_bytes == (200 + 2 * 20 + 8, 200 + 1 * 20 + 10)
    assert (partition.costs.bottleneck_s, partition.lower_bound_s, partition.status) == (6.75, 6.75, "optimal")


def test_colours_and_the_cycles_they_make_leave_fewer_stages() -> None:
    works = (
        Work("a", 1.0, 0.0, colocation_group=1),
        Work("b", 1.0, 0.0),
        Work("c", 1.0, 0.0, colocation_group=1),
        Work("d", 1.0, 0.0),
    )
    problem = Problem(works, tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(3)), microbatches=2)
    partition = solve(problem, stages=4)
    assert (partition.assignment, partition.stages) == ((0, 0, 0, 1), 2)


def test_a_leaf_that_may_be_merged_can_still_be_the_stage_that_saves_the_cut() -> None:
    works = (*(Work(name, 10.0, 0.0) for name in "abc"), Work("leaf", 0.0, 0.0))
    problem = Problem(works, (TensorEdge(0, (1, 2), 100.0, 0.0), TensorEdge(0, (3,), 0.0, 0.0)), microbatches=2)
    partition = solve(problem, stages=2)
    assert (partition.assignment, partition.costs.bottleneck_s, partition.status) == ((0, 0, 0, 1), 30.0, "optimal")


def test_among_equal_bottlenecks_the_fullest_stage_is_emptiest() -> None:
    works = tuple(Work(f"w{index}", time, 0.0, static_bytes=10) for index, time in enumerate((9.0, 0.0, 0.0, 0.0, 9.0)))
    problem = Problem(works, tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(4)), microbatches=2)
    partition = solve(problem, stages=2)
    assert (partition.costs.bottleneck_s, max(partition.costs.stage_bytes)) == (9.0, 30)


def test_capacities_move_the_cut() -> None:
    smallest = smallest_capacity(CHAIN, stages=2)
    assert smallest == 248
    tight = replace(CHAIN, devices=devices_of((140, 1000)))
    assert solve(tight, stages=2).assignment == (0, 1, 1, 1)


def test_what_does_not_fit_is_said_with_its_numbers() -> None:
    with pytest.raises(InfeasibleError) as error:
        solve(replace(CHAIN, devices=devices_of((247, 247))), stages=2)
    assert str(error.value) == (
        "no partition fits 2 stages: with the most even use of memory stage 0 needs 248 B (248 bytes), its device has "
        "247 B (247 bytes), and node 1 'w1' alone needs at least 118 B (118 bytes) of it; the smallest limit that can "
        "be met is 248 B (248 bytes) per device, or use more devices or smaller microbatches"
    )


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ((0, 1, 0, 1), "'w1' in stage 1 must not come after 'w2' in stage 0"),
        ((0, 0, 0), "3 stages are assigned to 4 works"),
    ],
)
def test_the_checker_refuses_what_is_not_legal(assignment: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(CHAIN, assignment)


def test_the_checker_refuses_a_torn_colour() -> None:
    problem = Problem(
        (Work("a", 1.0, 0.0, colocation_group="red"), Work("b", 1.0, 0.0, colocation_group="red")), (), microbatches=1
    )
    with pytest.raises(ValueError, match="colocation group 'red' is in stages 0 and 1"):
        check(problem, (0, 1))
