"""The CUDA caching allocator simulated: what a stream of changes makes PyTorch reserve on a device.

```
    request --round 512--> pool (small <= 1 MiB < large) --best fit--> free block --split--> block + rest
                                                            | none
                                                            v
                                     new segment: 2 MiB | 20 MiB | the size rounded to 2 MiB
```

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``, ``alloc_block``,
``should_split``, ``free_block``) in torch 2.13 with its default settings, on a device that has memory for all of it: no
segment is ever given back. One stream, no CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from autosplit.schedule.action import Schedule
from autosplit.schedule.memory.pieces import Change, MemoryKind, StageTraces
from autosplit.schedule.memory.replay import ReplayedLane, StaticBytes

_MIB = 1 << 20
_MIN_BLOCK_BYTES = 512
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_MIN_OWN_SEGMENT_BYTES = 10 * _MIB
"""Larger requests get a segment of their own size, rounded up to 2 MiB."""


@dataclass(frozen=True)
class Reserved:
    """The most that the allocator held, in the terms of ``torch.cuda.memory_stats``.

    Attributes:
        requested_peak_bytes: of the sum of the requests.
        allocated_peak_bytes: of the sum of the blocks: ``torch.cuda.max_memory_allocated``.
        reserved_peak_bytes: of the sum of the segments: ``torch.cuda.max_memory_reserved``.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int


def simulate_allocator(changes: Iterable[Change]) -> Reserved:
    """Return what the caching allocator does with ``changes``; a change of zero bytes allocates nothing."""
    small, large = _Pool(smallest_rest=_MIN_BLOCK_BYTES), _Pool(smallest_rest=_SMALL_BYTES + _MIN_BLOCK_BYTES)
    live: dict[int, tuple[_Pool, _Block, int]] = {}
    requested = allocated = requested_peak = allocated_peak = 0
    for storage, asked in changes:
        if asked > 0:
            size = -(-asked // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES
            pool = small if size <= _SMALL_BYTES else large
            block = pool.allocate(size)
            live[storage] = pool, block, asked
            requested += asked
            allocated += block.size
            requested_peak = max(requested_peak, requested)
            allocated_peak = max(allocated_peak, allocated)
        elif asked < 0:
            pool, block, freed = live.pop(storage)
            requested -= freed
            allocated -= block.size
            pool.free(block)
    return Reserved(requested_peak, allocated_peak, small.reserved_bytes + large.reserved_bytes)


class _Block(NamedTuple):
    """A range of a segment; blocks compare by size, then by address."""

    size: int
    address: int

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size


class _Pool:
    """The free blocks of one pool; a block is split where at least ``smallest_rest`` bytes are left."""

    def __init__(self, *, smallest_rest: int) -> None:
        self.reserved_bytes = 0
        self._smallest_rest = smallest_rest
        self._segments = 0
        self._free: list[_Block] = []
        """Ascending."""
        self._at: dict[int, _Block] = {}
        self._ending: dict[int, _Block] = {}
        """The same by where they begin and end."""

    def allocate(self, size: int) -> _Block:
        """Return the smallest free block that fits, the lowest address among equals, or that of a new segment."""
        index = bisect_left(self._free, (size, 0))
        block = self._take(self._free[index]) if index < len(self._free) else self._open(size)
        if block.size - size < self._smallest_rest:
            return block
        self._put(_Block(block.size - size, block.address + size))
        return _Block(size, block.address)

    def free(self, block: _Block) -> None:
        """Join a block with its free neighbours and put it among the free ones."""
        if (following := self._at.get(block.end)) is not None:
            block = _Block(block.size + self._take(following).size, block.address)
        if (before := self._ending.get(block.address)) is not None:
            block = _Block(self._take(before).size + block.size, before.address)
        self._put(block)

    def _open(self, size: int) -> _Block:
        """Return a new segment as one block; a byte lies between segments, so that none is another's neighbour."""
        segment = _Block(_segment_bytes(size), self.reserved_bytes + self._segments)
        self.reserved_bytes += segment.size
        self._segments += 1
        return segment

    def _put(self, block: _Block) -> None:
        insort(self._free, block)
        self._at[block.address] = self._ending[block.end] = block

    def _take(self, block: _Block) -> _Block:
        del self._free[bisect_left(self._free, block)], self._at[block.address], self._ending[block.end]
        return block


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _MIN_OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES


def device_changes(
    schedule: Schedule,
    traces: Mapping[int, StageTraces],
    static: Sequence[StaticBytes],
    *,
    device: int,
    finishes: Sequence[Sequence[Change]] = ((),),
) -> Iterator[Change]:
    """Yield every change of one device, in order, each allocation under a number of its own.

    ``finishes`` has what happens at the end of each step, one entry per step; what it frees and did not allocate is a
    gradient. Begins with what is held before the steps. A step's gradients are freed after it (``zero_grad``).
    """
    lane, numbers = ReplayedLane(schedule, traces, static, device), count()
    for state in lane.static.values():
        yield from ((next(numbers), size) for size in (*state.parameters, *state.optimizer))
    for finish in finishes:
        yield from _step(lane, finish, numbers)


def _step(lane: ReplayedLane, finish: Sequence[Change], numbers: Iterator[int]) -> Iterator[Change]:
    """Yield the changes of one step, allocations under the next numbers."""
    live: dict[tuple[int, ...], Change] = {}
    """By stage, microbatch and storage; of the optimizer's step by storage."""
    whole_batch: dict[int, list[Change]] = {}
    lasting: dict[MemoryKind, list[Change]] = {"casts": [], "gradients": []}
    for index, (stage, _, microbatch) in enumerate(lane.actions):
        if stage not in whole_batch:
            whole_batch[stage] = [(next(numbers), size) for size in lane.static[stage].whole_batch]
            yield from whole_batch[stage]
        for storage, size, kind in lane.piece(lane.actions[index]).played:
            if size > 0:
                change = next(numbers), size
                if kind in lasting:
                    lasting[kind].append(change)
                else:
                    live[stage, microbatch, storage] = change
                yield change
            elif kind == "gradients":
                yield _freed(_oldest(lasting["gradients"], -size))
            else:
                yield _freed(live.pop((stage, microbatch, storage)))
        if lane.last_action[stage] == index:
            yield from map(_freed, whole_batch[stage])
    yield from map(_freed, lasting["casts"])
    for storage, size in finish:
        if size > 0:
            live[(storage,)] = next(numbers), size
        own = live[(storage,)] if (storage,) in live else _oldest(lasting["gradients"], -size)
        yield own if size > 0 else _freed(own)
    yield from map(_freed, lasting["gradients"])


def _oldest(gradients: list[Change], size: int) -> Change:
    """Take the oldest gradient of a size, which a new sum replaces."""
    return gradients.pop(next(index for index, change in enumerate(gradients) if change[1] == size))


def _freed(change: Change) -> Change:
    return change[0], -change[1]
