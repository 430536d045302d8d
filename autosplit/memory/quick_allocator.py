"""The simulated allocator with torch's own settings on a device without end: the rules of `allocator`, in one loop.

A search plays some hundred thousand changes per cut. Without limits nothing is ever given back, no block is too large
to be split, and segments do not grow: what is left are best fit, split and join.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

from autosplit.memory.blocks import MIB
from autosplit.memory.events import Change

_ADDRESS, _SIZE, _BEFORE, _BEHIND, _FREE = range(5)
"""Places in a block: a list, since objects are slower to make."""
_BITS = 64
"""A free block's key is ``size << 64 | address``, as in `blocks`."""


class _Pool:
    """The free blocks of one pool, by their keys, which are kept in order."""

    __slots__ = ("blocks", "keys", "least_rest", "top")

    def __init__(self, *, least_rest: int) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, list[Any]] = {}
        self.least_rest = least_rest
        self.top = 0

    def free(self, block: list[Any]) -> None:
        """Join a block with its free neighbours and put it among the free ones."""
        keys, blocks = self.keys, self.blocks
        behind, before = block[_BEHIND], block[_BEFORE]
        if behind is not None and behind[_FREE]:
            key = behind[_SIZE] << _BITS | behind[_ADDRESS]
            del keys[bisect_left(keys, key)], blocks[key]
            block[_SIZE] += behind[_SIZE]
            behind = block[_BEHIND] = behind[_BEHIND]
            if behind is not None:
                behind[_BEFORE] = block
        if before is not None and before[_FREE]:
            key = before[_SIZE] << _BITS | before[_ADDRESS]
            del keys[bisect_left(keys, key)], blocks[key]
            before[_SIZE] += block[_SIZE]
            before[_BEHIND] = behind
            if behind is not None:
                behind[_BEFORE] = before
            block = before
        block[_FREE] = True
        key = block[_SIZE] << _BITS | block[_ADDRESS]
        insort(keys, key)
        blocks[key] = block


def play(changes: Iterable[Change]) -> tuple[int, int, int, int, int, int, int]:
    """Return what `allocator.Reserved` counts: three peaks (requested, allocated, reserved), what stands of each at
    the end, and the segments."""
    small, large = _Pool(least_rest=512), _Pool(least_rest=MIB + 512)
    live: dict[int, tuple[list[Any], int, _Pool]] = {}
    requested = allocated = reserved = requested_peak = allocated_peak = segments = 0
    for storage, count in changes:
        if count <= 0:
            if count:
                block, asked, pool = live.pop(storage)
                allocated -= block[_SIZE]
                requested -= asked
                pool.free(block)
            continue
        size = (count + 511) & -512
        pool = small if size <= MIB else large
        keys = pool.keys
        at = bisect_left(keys, size << _BITS)
        if at < len(keys):
            block = pool.blocks.pop(keys.pop(at))
        else:
            segment = _segment(size)
            block = [pool.top, segment, None, None, True]
            pool.top += segment
            reserved += segment
            segments += 1
        rest = block[_SIZE] - size
        if rest >= pool.least_rest:
            behind = block[_BEHIND]
            piece = [block[_ADDRESS] + size, rest, block, behind, True]
            if behind is not None:
                behind[_BEFORE] = piece
            block[_BEHIND] = piece
            block[_SIZE] = size
            key = rest << _BITS | piece[_ADDRESS]
            insort(keys, key)
            pool.blocks[key] = piece
        block[_FREE] = False
        live[storage] = block, count, pool
        allocated += block[_SIZE]
        requested += count
        if requested > requested_peak:
            requested_peak = requested
        if allocated > allocated_peak:
            allocated_peak = allocated
    return requested_peak, allocated_peak, reserved, requested, allocated, reserved, segments


def _segment(size: int) -> int:
    """Return the size of the segment that is opened for a block."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
