"""Recompute options: their bytes and seconds by hand."""

from __future__ import annotations

from dataclasses import replace

from autosplit.partition.checker import check
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work

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


def test_what_enters_a_block_stays_although_no_backward_reads_it() -> None:
    unread = replace(CHAIN, holds=tuple(replace(own, savers=own.savers[:0]) for own in CHAIN.holds))
    stage = check(unread, (0, 0, 0, 0), recompute=("block",)).stages[0]
    # The input 7 and the output between the two blocks, 10; what is inside of a block is not.
    assert stage.resident_bytes == 17
    search = LineSearch(Line(unread), unread, stages=1)
    assert search.device_bytes((0, 4), ["block"]) == check(unread, (0, 0, 0, 0), recompute=("block",)).device_bytes
