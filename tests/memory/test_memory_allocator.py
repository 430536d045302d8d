"""The simulated CUDA caching allocator, rule by rule; literal numbers worked out from the allocator's source."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import InputError
from autosplit.memory.allocator import Allocator, AllocatorOptions, Reserved, simulate_allocator
from autosplit.memory.blocks import Block

MIB = 1 << 20
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def run(*changes: tuple[int, int], capacity: int | None = None, options: AllocatorOptions | None = None) -> Reserved:
    return simulate_allocator(changes, capacity_bytes=capacity, options=options)


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_one_request(requested: int, allocated: int, reserved: int) -> None:
    """Rounded to 512; segments of 2 MiB, 20 MiB, or rounded to 2 MiB; a rest of up to 1 MiB stays in a large block."""
    result = run((1, requested))
    assert (result.requested_peak_bytes, result.allocated_peak_bytes, result.reserved_peak_bytes) == (
        requested,
        allocated,
        reserved,
    )


def test_nothing_is_allocated_for_nothing() -> None:
    assert run((1, 0)) == Reserved(0, 0, 0, 0, 0, 0, segments=0, retries=0, out_of_memory=None)


def test_small_requests_share_segments_and_large_ones_never_take_theirs() -> None:
    assert run((1, MIB), (2, MIB)).segments == 1
    assert run((1, MIB), (2, MIB), (3, 512)).reserved_bytes == 4 * MIB
    assert run((1, 1), (2, MIB + 512)).reserved_bytes == 22 * MIB


def test_a_large_request_is_carved_from_what_another_left() -> None:
    assert run((1, 9 * MIB), (2, 11 * MIB)).reserved_bytes == 20 * MIB
    assert run((1, 9 * MIB), (2, 12 * MIB)).reserved_bytes == 32 * MIB


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_among_equals() -> None:
    allocator = Allocator(AllocatorOptions())
    for storage, size in enumerate((40, 30, 30, 50)):
        assert allocator.allocate(storage, size * MIB)
    blocks = [allocator.block(storage) for storage in range(4)]
    for storage in (3, 2, 1, 0):
        allocator.free(storage)
    assert allocator.allocate(9, 29 * MIB + 1)
    assert allocator.block(9).address == blocks[1].address
    assert allocator.allocate(10, 35 * MIB)
    assert allocator.block(10).address == blocks[0].address


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    allocator = Allocator(AllocatorOptions())
    assert allocator.allocate(1, 1024)
    assert allocator.allocate(2, 512)
    allocator.free(1)
    assert allocator.allocate(3, 512)
    assert allocator.allocate(4, 512)
    assert [allocator.block(storage).address for storage in (3, 4, 2)] == [0, 512, 1024]


def test_freed_neighbours_join() -> None:
    sizes = ((1, 4 * MIB), (2, 4 * MIB), (3, 4 * MIB), (4, 8 * MIB))
    assert run(*sizes, (1, -4 * MIB), (3, -4 * MIB), (5, 8 * MIB)).reserved_bytes == 40 * MIB
    assert run(*sizes, (1, -4 * MIB), (3, -4 * MIB), (2, -4 * MIB), (5, 12 * MIB)).reserved_bytes == 20 * MIB


def test_a_freed_segment_stays_reserved_and_is_used_again() -> None:
    result = run((1, 64 * MIB), (1, -64 * MIB), (2, 60 * MIB))
    assert (result.reserved_bytes, result.segments, result.allocated_bytes) == (64 * MIB, 1, 60 * MIB)


def test_powers_of_two_in_divisions() -> None:
    """PyTorch's own example: 1200 in four divisions of 1024 to 2048 is 1280; nothing below 512 per division changes."""
    divided = AllocatorOptions(roundup_power2_divisions=4)
    assert [divided.round(1200 * 1024), divided.round(1 << 20), divided.round(1200), divided.round(2049)] == [
        1280 * 1024,
        1 << 20,
        1536,
        2560,
    ]
    assert AllocatorOptions(roundup_power2_divisions=1).round(1200) == 1536


@pytest.mark.parametrize(("divisions", "requested", "block"), [(4, 84, 96), (8, 84, 88), (2, 400, 512)])
def test_sizes_of_torchs_own_test(divisions: int, requested: int, block: int) -> None:
    """`test_allocator_settings` of PyTorch's test_cuda.py asks these of a real device: 21 Mi and 100 Mi floats."""
    assert AllocatorOptions(roundup_power2_divisions=divisions).round(requested * MIB) == block * MIB


def test_oversize_blocks_are_neither_split_nor_lent_to_small_requests() -> None:
    limited = AllocatorOptions(max_split_bytes=64 * MIB)
    free = ((1, 100 * MIB), (1, -100 * MIB))
    assert run(*free, (2, 30 * MIB), options=limited).reserved_bytes == 130 * MIB
    assert run(*free, (2, 30 * MIB)).reserved_bytes == 100 * MIB
    exact = ((1, 64 * MIB), (1, -64 * MIB))
    assert run(*exact, (2, 30 * MIB), options=limited).reserved_bytes == 94 * MIB
    near = run(*free, (2, 81 * MIB), options=limited)
    assert (near.reserved_bytes, near.allocated_bytes) == (100 * MIB, 100 * MIB)
    assert run(*free, (2, 80 * MIB), options=limited).reserved_bytes == 180 * MIB


def test_oversize_blocks_go_first_when_room_runs_out() -> None:
    limited = AllocatorOptions(max_split_bytes=64 * MIB)
    kept = ((1, 100 * MIB), (2, 30 * MIB), (1, -100 * MIB), (2, -30 * MIB))
    result = run(*kept, (3, 70 * MIB), capacity=140 * MIB, options=limited)
    assert (result.reserved_bytes, result.retries, result.out_of_memory) == (100 * MIB, 0, None)
    several = ((1, 70 * MIB), (2, 70 * MIB), (1, -70 * MIB), (2, -70 * MIB))
    result = run(*several, (3, 130 * MIB), capacity=140 * MIB, options=limited)
    assert (result.reserved_bytes, result.retries, result.out_of_memory) == (130 * MIB, 0, None)


def test_cached_segments_are_given_back_before_memory_is_out() -> None:
    result = run((1, 60 * MIB), (1, -60 * MIB), (2, 80 * MIB), capacity=100 * MIB)
    assert (result.reserved_peak_bytes, result.reserved_bytes, result.retries) == (80 * MIB, 80 * MIB, 1)
    assert result.out_of_memory is None


def test_segments_in_part_in_use_are_not_given_back_and_memory_is_out() -> None:
    result = run((1, 40 * MIB), (2, 2 * MIB), (1, -40 * MIB), (3, 25 * MIB), (4, 64 * MIB), (5, 1), capacity=100 * MIB)
    failed = result.out_of_memory
    assert failed is not None
    assert (failed.change, failed.requested_bytes, failed.segment_bytes) == (4, 64 * MIB, 64 * MIB)
    assert (failed.reserved_bytes, failed.allocated_bytes, failed.capacity_bytes) == (60 * MIB, 27 * MIB, 100 * MIB)
    assert (result.retries, result.reserved_bytes, result.requested_bytes) == (1, 60 * MIB, 27 * MIB)
    assert str(failed) == (
        "a request of 64.0 MiB needs 64.0 MiB more, 60.0 MiB of 100 MiB are reserved, 27.0 MiB of them allocated; "
        "33.0 MiB are reserved and unused: where that is much, expandable segments would help"
    )


def test_expandable_segments_grow_by_pages_and_split_to_512_bytes() -> None:
    result = run((1, 11 * MIB), (2, 11 * MIB), (3, 1), options=EXPANDABLE)
    assert (result.reserved_bytes, result.allocated_bytes, result.segments) == (42 * MIB, 22 * MIB + 512, 2)


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    result = run((1, 30 * MIB), (2, 8 * MIB), (2, -8 * MIB), (3, 45 * MIB), options=EXPANDABLE)
    assert (result.reserved_bytes, result.allocated_bytes) == (80 * MIB, 75 * MIB)


def test_the_growing_end_is_taken_last() -> None:
    changes = ((1, 4 * MIB), (2, 8 * MIB), (3, 4 * MIB), (1, -4 * MIB), (2, -8 * MIB), (4, 3 * MIB))
    allocator = Allocator(EXPANDABLE)
    for storage, size in changes:
        if size > 0:
            assert allocator.allocate(storage, size)
        else:
            allocator.free(storage)
    assert allocator.block(4).address == 0
    assert allocator.reserved_bytes == 20 * MIB


def test_expandable_segments_give_back_whole_pages_and_fill_the_hole_first() -> None:
    first = ((1, 50 * MIB), (2, 20 * MIB), (1, -50 * MIB))
    result = run(*first, (3, 60 * MIB), capacity=100 * MIB, options=EXPANDABLE)
    assert (result.reserved_peak_bytes, result.retries, result.out_of_memory) == (100 * MIB, 1, None)
    assert run(*first, (3, 60 * MIB), capacity=100 * MIB).out_of_memory is None
    middle = ((1, 30 * MIB), (2, 6 * MIB), (3, 20 * MIB), (1, -30 * MIB), (3, -20 * MIB))
    assert run(*middle, (4, 70 * MIB), capacity=110 * MIB, options=EXPANDABLE).out_of_memory is None
    failed = run(*middle, (4, 100 * MIB), capacity=110 * MIB, options=EXPANDABLE).out_of_memory
    assert failed is not None
    assert failed.allocated_bytes == 6 * MIB


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"roundup_power2_divisions": 3}, "roundup_power2_divisions is 3; use 0 or a power of two, such as 4"),
        ({"max_split_bytes": 20 * MIB}, "max_split_bytes is 20.0 MiB; it must exceed the large segment of 20.0 MiB"),
    ],
)
def test_settings_that_the_allocator_refuses(given: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AllocatorOptions(**given)


def segments(allocator: Allocator) -> list[list[Block]]:
    found = []
    for pool in allocator.pools:
        for head in pool.heads:
            block: Block | None = head
            found.append([])
            while block is not None:
                found[-1].append(block)
                block = block.next
    return found


def check(allocator: Allocator, live: dict[int, int]) -> None:
    """Blocks tile their segments, live ones are big enough, and no two free neighbours are left apart."""
    used = {id(allocator.block(storage)) for storage in live}
    mapped = 0
    for blocks in segments(allocator):
        for block, following in pairwise(blocks):
            assert block.address + block.size == following.address
            assert following.previous is block
            assert not (block.free and following.free and block.mapped == following.mapped)
        mapped += sum(block.size for block in blocks if block.mapped)
        assert {id(block) for block in blocks if not block.free} <= used
    assert mapped == allocator.reserved_bytes
    assert all(allocator.block(storage).size >= size for storage, size in live.items())
    now = allocator.result()
    assert now.reserved_bytes >= now.allocated_bytes >= now.requested_bytes == sum(live.values())


SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB))
OPTIONS = st.sampled_from(
    [
        AllocatorOptions(),
        EXPANDABLE,
        AllocatorOptions(max_split_bytes=24 * MIB),
        AllocatorOptions(roundup_power2_divisions=8),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=60),
    options=OPTIONS,
    capacity=st.sampled_from([None, 100 * MIB, 160 * MIB]),
)
def test_blocks_never_overlap_and_everything_comes_back(
    moves: list[tuple[bool, int, int]], options: AllocatorOptions, capacity: int | None
) -> None:
    allocator = Allocator(options, capacity_bytes=capacity)
    live: dict[int, int] = {}
    for number, (frees, size, which) in enumerate(moves):
        if frees and live:
            storage = sorted(live)[which % len(live)]
            allocator.free(storage)
            del live[storage]
        elif allocator.allocate(number, size):
            live[number] = size
        check(allocator, live)
        assert capacity is None or allocator.reserved_bytes <= capacity
    for storage in live:
        allocator.free(storage)
    check(allocator, {})
    assert allocator.result().allocated_bytes == 0
    for blocks in segments(allocator):
        assert all(block.free for block in blocks)


@settings(max_examples=150, deadline=None)
@given(moves=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=80))
def test_without_limits_the_quick_way_gives_the_same(moves: list[tuple[bool, int, int]]) -> None:
    """With more room than is ever asked for nothing is given back: the allocator itself plays that."""
    changes: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for number, (frees, size, which) in enumerate(moves):
        if frees and live:
            storage = sorted(live)[which % len(live)]
            changes.append((storage, -live.pop(storage)))
        else:
            live[number] = size
            changes.append((number, size))
    assert run(*changes) == run(*changes, capacity=1 << 60)
