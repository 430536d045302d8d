"""The CUDA caching allocator simulated: what a stream of changes makes PyTorch reserve on a device.

```
    request --round 512--> pool (small <= 1 MiB < large) --best fit--> free block --split--> block + rest
                                                            | none
                                                            v
                                     new segment: 2 MiB | 20 MiB | the size rounded to 2 MiB
```

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``, ``alloc_block``,
``should_split``, ``free_block``, ``release_cached_blocks``, ``try_allocate_expandable_block``) and the constants those
of ``c10/core/AllocatorConfig.h`` in torch 2.13. One stream, no CUDA graphs, no garbage collection threshold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autosplit.errors import InputError
from autosplit.memory.blocks import MIB, Block, Pool
from autosplit.memory.events import Change
from autosplit.memory.quick_allocator import play
from autosplit.units import format_bytes

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class AllocatorOptions:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change how much is reserved.

    Attributes:
        max_split_bytes: larger blocks are not split; None: every block may be.
        max_non_split_rounding_bytes: how much larger than a request beyond ``max_split_bytes`` its block may be.
        large_segment_bytes: segment of requests between 1 and 10 MiB, and page of expandable large segments.
        expandable_segments: one growing address range per pool instead of separate segments.
        roundup_power2_divisions: round requests up to a power of two divided into so many steps; 0: to 512 bytes.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    expandable_segments: bool = False
    roundup_power2_divisions: int = 0

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise InputError(f"roundup_power2_divisions is {divisions}; use 0 or a power of two, such as 4")
        if self.max_split_bytes is not None and self.max_split_bytes <= self.large_segment_bytes:
            raise InputError(
                f"max_split_bytes is {format_bytes(self.max_split_bytes)}; it must exceed the large segment of "
                f"{format_bytes(self.large_segment_bytes)}"
            )

    def round(self, requested_bytes: int) -> int:
        """Return the size of the block that a request is given."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self.roundup_power2_divisions
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (requested_bytes.bit_length() - 1)) // divisions
            return -(-requested_bytes // step) * step
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment(self, block_bytes: int) -> int:
        """Return the size of the segment that is opened for a block."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclass(frozen=True)
class OutOfMemory:
    """The request that could not be met, and what was held when it came."""

    change: int
    """Index of the failing change in the stream."""
    requested_bytes: int
    segment_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        unused = self.reserved_bytes - self.allocated_bytes
        return (
            f"a request of {format_bytes(self.requested_bytes)} needs {format_bytes(self.segment_bytes)} more, "
            f"{format_bytes(self.reserved_bytes)} of {format_bytes(self.capacity_bytes)} are reserved, "
            f"{format_bytes(self.allocated_bytes)} of them allocated; {format_bytes(unused)} are reserved and unused: "
            "where that is much, expandable segments would help"
        )


@dataclass(frozen=True)
class Reserved:
    """What the allocator held at most, in the terms of ``torch.cuda.memory_stats``, and what stands at the end.

    Attributes:
        requested_peak_bytes: of the sum of the requests.
        allocated_peak_bytes: of the sum of the blocks: ``torch.cuda.max_memory_allocated``.
        reserved_peak_bytes: of the sum of the segments: ``torch.cuda.max_memory_reserved``.
        retries: how often cached segments were given back to make room (``num_alloc_retries``).
        segments: at the end; one per pool in use under expandable segments.
        out_of_memory: why the stream could not be finished; None if it was.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    segments: int
    retries: int
    out_of_memory: OutOfMemory | None


def simulate_allocator(
    changes: Iterable[Change], *, capacity_bytes: int | None = None, options: AllocatorOptions | None = None
) -> Reserved:
    """Return what the caching allocator does with ``changes`` on a device that can give it ``capacity_bytes``.

    ``capacity_bytes`` is what is left beside the CUDA context, NCCL and other libraries; None: without end. A change of
    zero bytes allocates nothing. Stops at the first request that cannot be met.
    """
    options = options or AllocatorOptions()
    if capacity_bytes is None and options == AllocatorOptions():
        return Reserved(*play(changes), retries=0, out_of_memory=None)
    allocator = Allocator(options, capacity_bytes=capacity_bytes)
    failed = None
    for index, (storage, count) in enumerate(changes):
        if count < 0:
            allocator.free(storage)
        elif count and not allocator.allocate(storage, count):
            failed = allocator.failure(count, change=index)
            break
    return allocator.result(failed)


class Allocator:
    """The state of one device's caching allocator."""

    def __init__(self, options: AllocatorOptions, *, capacity_bytes: int | None = None) -> None:
        self._options = options
        self._capacity_bytes = float("inf") if capacity_bytes is None else capacity_bytes
        growing = options.expandable_segments
        self._small = Pool(small=True, page_bytes=SMALL_SEGMENT_BYTES, expandable=growing)
        self._large = Pool(small=False, page_bytes=options.large_segment_bytes, expandable=growing)
        self._live: dict[int, tuple[Block, int]] = {}
        self._max_split = float("inf") if options.max_split_bytes is None else options.max_split_bytes
        self._requested = self._allocated = 0
        self._requested_peak = self._allocated_peak = self._reserved_peak = 0
        self._retries = 0

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """The pool of blocks up to 1 MiB, and that of larger ones."""
        return self._small, self._large

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def block(self, storage: int) -> Block:
        """Return the block of a live storage."""
        return self._live[storage][0]

    def allocate(self, storage: int, requested_bytes: int) -> bool:
        """Give ``storage`` a block; False when the device has no room for it."""
        size = self._options.round(requested_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, size) or self._fresh(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if pool.small or self._options.expandable_segments:
            split = rest >= MIN_BLOCK_BYTES
        else:
            split = size < self._max_split and rest > SMALL_BYTES
        if split:
            pool.split(block, size)
        block.free = False
        self._live[storage] = block, requested_bytes
        self._allocated += block.size
        self._requested += requested_bytes
        self._requested_peak = max(self._requested_peak, self._requested)
        self._allocated_peak = max(self._allocated_peak, self._allocated)
        return True

    def adopt(self, storage: int, block: Block, requested_bytes: int) -> None:
        """Note that a block which is in use already is a storage's."""
        self._live[storage] = block, requested_bytes
        self._allocated += block.size
        self._requested += requested_bytes

    def free(self, storage: int) -> None:
        """Take back a storage's block and join it with free neighbours."""
        block, requested_bytes = self._live.pop(storage)
        self._allocated -= block.size
        self._requested -= requested_bytes
        block.pool.give_back(block)

    def failure(self, requested_bytes: int, *, change: int) -> OutOfMemory:
        """Return the record of a request that could not be met."""
        return OutOfMemory(
            change=change,
            requested_bytes=requested_bytes,
            segment_bytes=self._options.segment(self._options.round(requested_bytes)),
            allocated_bytes=self._allocated,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=int(self._capacity_bytes),
        )

    def result(self, failed: OutOfMemory | None = None) -> Reserved:
        """Return the peaks so far."""
        return Reserved(
            requested_peak_bytes=self._requested_peak,
            allocated_peak_bytes=self._allocated_peak,
            reserved_peak_bytes=self._reserved_peak,
            requested_bytes=self._requested,
            allocated_bytes=self._allocated,
            reserved_bytes=self.reserved_bytes,
            segments=self._small.segments + self._large.segments,
            retries=self._retries,
            out_of_memory=failed,
        )

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that fits, the lowest address among equals; None where the rules forbid it."""
        found = pool.best_fit(size)
        if found is None:
            return None
        if size < self._max_split <= found.size:
            return None
        if size >= self._max_split and found.size >= size + self._options.max_non_split_rounding_bytes:
            return None
        pool.take(found)
        return found

    def _fresh(self, pool: Pool, size: int) -> Block | None:
        """Reserve room for a block: at once, after oversize blocks were given back, or after all cached ones were."""
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self._retries += 1
            self._large.release()
            self._small.release()
            block = self._reserve(pool, size)
        self._reserved_peak = max(self._reserved_peak, self.reserved_bytes)
        return block

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        room = self._capacity_bytes - self.reserved_bytes
        if self._options.expandable_segments:
            return pool.expand(size, room_bytes=room)
        segment = self._options.segment(size)
        return pool.open(segment) if segment <= room else None

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back cached blocks beyond ``max_split_bytes``, from the largest, until ``size`` bytes are gained."""
        if self._options.max_split_bytes is None or self._options.expandable_segments:
            return False
        wanted = max(size, self._options.max_split_bytes)
        single = pool.best_fit(wanted)
        if single is not None:
            pool.close(single)
            return True
        gained = 0
        while gained < wanted and (largest := pool.largest()) is not None and largest.size >= self._max_split:
            gained += largest.size
            pool.close(largest)
        return gained >= wanted
