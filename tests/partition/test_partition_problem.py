"""Costs by hand, ties, errors, and what a caller's mistake says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autosplit.partition.checker import check
from autosplit.partition.graph import base_graph
from autosplit.partition.ideals import enumerate as ideals
from autosplit.partition.ideals import search
from autosplit.partition.ideals.enumerate import in_runs
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Tie, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_problems import Mix, random_problem
from tests.partition.oracle_verdict import smallest_capacity

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=100, transient_bytes=7 + index) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.25, 0.5) for index in range(3)),
    tuple(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
    microbatches=8,
)


STATIC = replace(CHAIN, works=tuple(replace(work, transient_bytes=0) for work in CHAIN.works), holds=())
RED = Problem(tuple(Work(name, 1.0, 0.0, colocation_group="red") for name in "ab"), (), microbatches=1)


def test_a_chain_by_hand() -> None:
    partition = solve(STATIC, stages=2)
    assert partition.assignment == (0, 0, 1, 1)
    assert (partition.costs.loads_s, partition.costs.stage_bytes) == ((6.75, 6.75), (200, 200))
    assert (partition.costs.bottleneck_s, partition.lower_bound_s, partition.status) == (6.75, 6.75, "optimal")
    # Stage 0: two works, holds 0 and 1 for two microbatches. Stage 1: holds 1 (a boundary) and 2 for one.
    assert check(CHAIN, partition.assignment).stage_bytes == (200 + 2 * 20 + 8, 200 + 1 * 20 + 10)


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


def test_a_capacity_moves_the_cut() -> None:
    works = tuple(
        replace(work, static_bytes=size) for work, size in zip(STATIC.works, (300, 100, 100, 100), strict=True)
    )
    problem = replace(STATIC, works=works)
    assert smallest_capacity(problem, stages=2) == 300
    assert solve(problem, stages=2).assignment == (0, 0, 1, 1)
    assert solve(replace(problem, devices=devices_of((399, 399))), stages=2).assignment == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("problem", "assignment", "message"),
    [
        (CHAIN, (0, 1, 0, 1), "'w1' in stage 1 must not come after 'w2' in stage 0"),
        (CHAIN, (0, 0, 0), "3 stages are assigned to 4 works"),
        (RED, (0, 1), "colocation group 'red' is in stages 0 and 1"),
    ],
)
def test_the_checker_refuses_what_is_not_legal(problem: Problem, assignment: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(problem, assignment)


TIED_CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(3)),
    ties=(Tie((0, 3), home_bytes=100, copy_bytes=30, transfer_s=8.0),),
    microbatches=4,
)


def test_home_copy_and_transfer_by_hand() -> None:
    costs = check(TIED_CHAIN, (0, 1, 1, 2))
    assert costs.stage_bytes == (100, 0, 30)
    assert costs.loads_s == (3 + 8 / 4, 6.0, 3 + 8 / 4)
    together = check(TIED_CHAIN, (0, 0, 0, 0))
    assert (together.stage_bytes, together.loads_s) == ((100,), (12.0,))


@pytest.mark.parametrize(
    "problem",
    [TIED_CHAIN, CHAIN, replace(STATIC, devices=(Device(2.0), Device())), replace(STATIC, virtual_stages=2)],
    ids=["ties", "holds", "devices", "several stages on one"],
)
def test_the_solver_refuses_what_only_cuts_along_a_line_know(problem: Problem) -> None:
    with pytest.raises(ValueError, match="and several stages on a device are for cuts along a line"):
        solve(problem, stages=2)


def test_a_slow_device_and_its_link_by_hand() -> None:
    problem = replace(CHAIN, devices=(Device(2.0), Device()), links=(4.0,))
    costs = check(problem, (0, 1, 1, 1))
    assert costs.loads_s == (2 * 3 + 4 * 0.75, 9 + 4 * 0.75)
    assert costs.device_loads_s == costs.loads_s


@pytest.mark.parametrize("seed", range(6))
def test_large_graphs_start_from_runs_of_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed, Mix(16, static=True))
    exact, graph = solve(problem, stages=3), base_graph(problem)
    assert in_runs(graph).size == graph.size
    monkeypatch.setattr(ideals, "_MOST_GROUPS", 8)
    monkeypatch.setattr(search, "_ENTRIES", 200)
    assert in_runs(graph).size <= 8 < graph.size
    rough = solve(problem, stages=3)
    assert rough.lower_bound_s <= exact.costs.bottleneck_s * (1 + 1e-9)
    assert exact.costs.bottleneck_s * (1 - 1e-9) <= rough.costs.bottleneck_s < 1.5 * exact.costs.bottleneck_s
    assert (exact.status, len(set(rough.assignment))) == ("optimal", 3)


# Four works in two blocks of two; each output is saved by its consumer, and each work saves 5 bytes of its own.
SAVING_CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=1000, transient_bytes=3, block=index // 2) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(3)),
    (
        *(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
        *(Hold(5, index, (), (index,)) for index in range(4)),
        Hold(7, None, (0,), (0,)),
    ),
    microbatches=8,
)


def parts(option: str) -> list[tuple[int, int]]:
    """Return resident and transient bytes of both stages of the even cut."""
    stages = check(SAVING_CHAIN, (0, 0, 1, 1), recompute=(option, option)).stages
    return [(stage.resident_bytes, stage.transient_bytes) for stage in stages]


def test_bytes_by_hand() -> None:
    # Stage 0 keeps the input 7, the inner output 10, the boundary 10 and 2 x 5; stage 1 all that but the input.
    assert parts("never") == [(37, 3), (30, 3)]
    assert parts("always") == parts("except_last") == [(17, 20 + 3), (10, 20 + 3)]
    # Each stage is one block here: its input and its boundary stay, and a block saves 10 + 2 x 5.
    assert parts("block") == [(17, 20 + 3), (10, 20 + 3)]
    costs = check(SAVING_CHAIN, (0, 0, 0, 1), recompute=("block", "block")).stages
    # Stage 0 holds the whole of block 0 and half of block 1: the output between the blocks stays, and so does what the
    # cut through block 1 touches; a block that is cut counts whole.
    assert [(stage.resident_bytes, stage.transient_bytes) for stage in costs] == [(7 + 10 + 10, 23), (10, 23)]


def test_what_enters_a_block_stays_although_no_backward_reads_it() -> None:
    unread = replace(SAVING_CHAIN, holds=tuple(replace(own, savers=own.savers[:0]) for own in SAVING_CHAIN.holds))
    stage = check(unread, (0, 0, 0, 0), recompute=("block",)).stages[0]
    # The input 7 and the output between the two blocks, 10; what is inside of a block is not.
    assert stage.resident_bytes == 17
    search = LineSearch(Line(unread), unread, stages=1)
    assert search.device_bytes((0, 4), ["block"]) == check(unread, (0, 0, 0, 0), recompute=("block",)).device_bytes
