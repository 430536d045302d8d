"""Recompute options: their bytes and seconds by hand, and the solver's choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch
from autosplit.partition.problem import RECOMPUTE, Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_verdict import smallest_capacity

# Four works in two blocks of two; each output is saved by its consumer, and each work saves 5 bytes of its own.
CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=1000, transient_bytes=3, block=index // 2) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(3)),
    (
        *(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
        *(Hold(5, index, (), (index,)) for index in range(4)),
        Hold(7, None, (0,), (0,)),
    ),
    microbatches=8,
    recompute=RECOMPUTE,
)


def parts(option: str) -> list[tuple[int, int]]:
    """Return resident and transient bytes of both stages of the even cut."""
    stages = check(CHAIN, (0, 0, 1, 1), recompute=(option, option)).stages
    return [(stage.resident_bytes, stage.transient_bytes) for stage in stages]


def test_bytes_by_hand() -> None:
    # Stage 0 keeps the input 7, the inner output 10, the boundary 10 and 2 x 5; stage 1 all that but the input.
    assert parts("never") == [(37, 3), (30, 3)]
    assert parts("always") == parts("except_last") == [(17, 20 + 3), (10, 20 + 3)]
    # Each stage is one block here: its input and its boundary stay, and a block saves 10 + 2 x 5.
    assert parts("block") == [(17, 20 + 3), (10, 20 + 3)]
    costs = check(CHAIN, (0, 0, 0, 1), recompute=("block", "block")).stages
    # Stage 0 holds the whole of block 0 and half of block 1: the output between the blocks stays, and so does what the
    # cut through block 1 touches; a block that is cut counts whole.
    assert [(stage.resident_bytes, stage.transient_bytes) for stage in costs] == [(7 + 10 + 10, 23), (10, 23)]


def test_seconds_by_hand() -> None:
    loads = [check(CHAIN, (0, 0, 1, 1), recompute=(option, "never")).loads_s[0] for option in RECOMPUTE]
    assert loads == [6.0, 6 + 2 * 7 / 8, 8.0, 8.0]


def test_the_checker_takes_the_fastest_that_fits_and_the_leanest_where_none_does() -> None:
    def chosen(*capacities: int) -> tuple[str, ...]:
        return check(replace(CHAIN, devices=devices_of(capacities)), (0, 0, 1, 1)).recompute

    # Two microbatches in flight at stage 0: 2000 + 2 x 37 + 3 against 2000 + 2 x 17 + 23.
    assert chosen(2077, 2033) == ("never", "never")
    assert chosen(2076, 2033) == ("except_last", "never")
    assert chosen(2056, 2032) == ("except_last", "never")


def test_a_block_of_its_own_for_works_without_one() -> None:
    bare = replace(CHAIN, works=tuple(replace(work, block=None) for work in CHAIN.works))
    stages = check(bare, (0, 0, 1, 1), recompute=("block", "block")).stages
    # Every output enters another block, so only the 5 bytes of each work are done again.
    assert [(stage.resident_bytes, stage.transient_bytes) for stage in stages] == [(27, 8), (20, 8)]


def test_what_enters_a_block_stays_although_no_backward_reads_it() -> None:
    unread = replace(CHAIN, holds=tuple(replace(own, savers=own.savers[:0]) for own in CHAIN.holds))
    stage = check(unread, (0, 0, 0, 0), recompute=("block",)).stages[0]
    # The input 7 and the output between the two blocks, 10; what is inside of a block is not.
    assert stage.resident_bytes == 17
    search = LineSearch(Line(unread), unread, stages=1)
    assert search.device_bytes((0, 4), ["block"]) == check(unread, (0, 0, 0, 0), recompute=("block",)).device_bytes


def test_the_solver_recomputes_only_where_it_must() -> None:
    free = solve(replace(CHAIN, devices=devices_of((2077, 2077))))
    assert (free.recompute, free.bottleneck_s) == (("never", "never"), 6.0)
    tight = solve(replace(CHAIN, devices=devices_of((2076, 2076))))
    assert (tight.recompute, tight.bottleneck_s, tight.status) == (("except_last", "never"), 7.75, "optimal")
    always = solve(replace(CHAIN, devices=devices_of((2076, 2076)), recompute=("never", "always")))
    assert (always.recompute, always.bottleneck_s) == (("always", "never"), 8.0)
    assert smallest_capacity(CHAIN, stages=2) == 2057
    with pytest.raises(InfeasibleError):
        solve(replace(CHAIN, devices=devices_of((2056, 2056))))


def test_what_must_be_recomputed_costs_time_without_any_limit() -> None:
    assert solve(replace(CHAIN, recompute=("always",)), stages=2).loads_s == (8.0, 8.0)
    assert solve(CHAIN, stages=2).loads_s == (6.0, 6.0)
