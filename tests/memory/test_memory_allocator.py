"""The simulated CUDA caching allocator, rule by rule; literal numbers worked out from the allocator's source."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.schedule.memory.allocator import Reserved, simulate_allocator

MIB = 1 << 20


def run(*changes: tuple[int, int]) -> Reserved:
    return simulate_allocator(changes)


def reserved(*changes: tuple[int, int]) -> int:
    return simulate_allocator(changes).reserved_peak_bytes


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (0, 0, 0),
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
    assert run((1, requested)) == Reserved(requested, allocated, reserved)


def test_small_requests_share_segments_and_large_ones_never_take_theirs() -> None:
    assert reserved((1, MIB), (2, MIB)) == 2 * MIB
    assert reserved((1, MIB), (2, MIB), (3, 512)) == 4 * MIB
    assert reserved((1, 1), (2, MIB + 512)) == 22 * MIB


def test_a_large_request_is_carved_from_what_another_left() -> None:
    assert reserved((1, 9 * MIB), (2, 11 * MIB)) == 20 * MIB
    assert reserved((1, 9 * MIB), (2, 12 * MIB)) == 32 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """The block of 30 MiB and not one of 40 or 50, which then has room for what would fit in no other."""
    held = ((0, 40 * MIB), (1, 30 * MIB), (2, 50 * MIB))
    freed = tuple((storage, -size) for storage, size in held)
    assert reserved(*held, *freed, (3, 29 * MIB + 1), (4, 40 * MIB), (5, 50 * MIB)) == 120 * MIB


def test_freed_neighbours_join() -> None:
    sizes = ((1, 4 * MIB), (2, 4 * MIB), (3, 4 * MIB), (4, 8 * MIB))
    assert reserved(*sizes, (1, -4 * MIB), (3, -4 * MIB), (5, 8 * MIB)) == 40 * MIB
    assert reserved(*sizes, (1, -4 * MIB), (3, -4 * MIB), (2, -4 * MIB), (5, 12 * MIB)) == 20 * MIB


def test_a_freed_segment_stays_reserved_and_is_used_again() -> None:
    assert run((1, 64 * MIB), (1, -64 * MIB), (2, 60 * MIB)) == Reserved(64 * MIB, 64 * MIB, 64 * MIB)


def naive(changes: list[tuple[int, int]]) -> Reserved:
    """The same rules on a flat list of segments, each a list of [size, storage], looked through from the start."""
    segments: list[tuple[bool, list[list[int | None]]]] = []
    requests: dict[int, int] = {}
    peaks = [0, 0]
    for storage, count in changes:
        if count < 0:
            del requests[storage]
            for _, blocks in segments:
                for block in blocks:
                    if block[1] == storage:
                        block[1] = None
                for at in reversed(range(len(blocks) - 1)):
                    if blocks[at][1] is None and blocks[at + 1][1] is None:
                        blocks[at][0] += blocks.pop(at + 1)[0]
            continue
        size = max(512, -(-count // 512) * 512)
        small = size <= MIB
        fits = [
            (block[0], number, at)
            for number, (kind, blocks) in enumerate(segments)
            for at, block in enumerate(blocks)
            if kind == small and block[1] is None and block[0] >= size
        ]
        if not fits:
            room = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segments.append((small, [[room, None]]))
            fits = [(room, len(segments) - 1, 0)]
        found, number, at = min(fits)
        blocks = segments[number][1]
        if found - size >= (512 if small else MIB + 1):
            blocks[at : at + 1] = [[size, storage], [found - size, None]]
        else:
            blocks[at][1] = storage
        requests[storage] = count
        held = sum(block[0] for _, blocks in segments for block in blocks if block[1] is not None)
        peaks = [max(peaks[0], sum(requests.values())), max(peaks[1], held)]
    return Reserved(*peaks, sum(block[0] for _, blocks in segments for block in blocks))


SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB))


@settings(deadline=None)
@given(moves=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=80))
def test_any_changes_reserve_what_a_naive_allocator_does(moves: list[tuple[bool, int, int]]) -> None:
    changes: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for number, (frees, size, which) in enumerate(moves):
        if frees and live:
            storage = sorted(live)[which % len(live)]
            changes.append((storage, -live.pop(storage)))
        else:
            live[number] = size
            changes.append((number, size))
    assert run(*changes) == naive(changes)
