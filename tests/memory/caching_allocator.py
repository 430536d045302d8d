"""A device's caching allocator written out naively, which keeps the account that torch keeps: snapshots to replay.

It shares nothing with the simulator: blocks are a flat list per segment, looked through from the start each time.
Where a segment lies is drawn, as cudaMalloc promises no order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class NaiveBlock:
    address: int
    size: int
    requested: int = 0
    state: str = "inactive"


@dataclass
class NaiveSegment:
    address: int
    size: int
    stream: int
    small: bool
    pool: tuple[int, int]
    blocks: list[NaiveBlock] = field(default_factory=list)


class NaiveDevice:
    """Malloc, free, record_stream and empty_cache as torch has them, entry by entry."""

    def __init__(self, seed: int = 0) -> None:
        self.segments: list[NaiveSegment] = []
        self.trace: list[dict[str, Any]] = []
        self.allocated = self.reserved = self.requested = 0
        self.peaks = [0, 0, 0]
        self._draw = random.Random(seed)
        self._used: dict[int, set[int]] = {}

    def malloc(self, count: int, *, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> int:
        size = max(512, -(-count // 512) * 512)
        small = size <= MIB
        free = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            for block in segment.blocks
            if (segment.stream, segment.small, segment.pool) == (stream, small, pool)
            and block.state == "inactive"
            and block.size >= size
        ]
        if free:
            *_, segment, block = min(free, key=lambda entry: entry[:2])
        else:
            segment = self._open(size, stream, small, pool)
            block = segment.blocks[0]
        rest = block.size - size
        if rest >= (512 if small else MIB + 1):
            at = segment.blocks.index(block)
            segment.blocks.insert(at + 1, NaiveBlock(block.address + size, rest))
            block.size = size
        block.state, block.requested = "active_allocated", count
        self._note("alloc", block.address, count, segment)
        self._count(block.size, 0, count)
        return block.address

    def record_stream(self, address: int, stream: int) -> None:
        self._used.setdefault(address, set()).add(stream)

    def free(self, address: int) -> None:
        segment, block = self._find(address)
        self._note("free_requested", address, block.requested, segment)
        self._count(-block.size, 0, 0)
        block.state = "active_awaiting_free"
        if address not in self._used:
            self._complete(address)

    def streams_are_done(self) -> None:
        for address in [address for address in self._used if self._find(address)[1].state == "active_awaiting_free"]:
            del self._used[address]
            self._complete(address)

    def empty_cache(self) -> None:
        for segment in [s for s in self.segments if len(s.blocks) == 1 and s.blocks[0].state == "inactive"]:
            self.segments.remove(segment)
            self._note("segment_free", segment.address, segment.size, segment)
            self._count(0, -segment.size, 0)

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns."""
        return {
            "segments": [self._segment(segment) for segment in sorted(self.segments, key=lambda s: s.address)],
            "device_traces": [[dict(entry) for entry in self.trace]],
            "allocator_settings": {"max_split_size": -1, "expandable_segments": False, "roundup_power2_divisions": {}},
        }

    def start(self) -> dict[str, Any]:
        """Begin a history: what ``_record_memory_history`` and ``reset_peak_memory_stats`` do; return the opening."""
        self.trace = []
        self.peaks = [self.allocated, self.reserved, self.requested]
        return self.snapshot()

    def _open(self, size: int, stream: int, small: bool, pool: tuple[int, int]) -> NaiveSegment:
        room = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        address = 0
        while not address or any(s.address < address + room and address < s.address + s.size for s in self.segments):
            address = 0x7F00_0000_0000 + 2 * MIB * self._draw.randrange(1 << 16)
        segment = NaiveSegment(address, room, stream, small, pool, [NaiveBlock(address, room)])
        self.segments.append(segment)
        self._note("segment_alloc", address, room, segment)
        self._count(0, room, 0)
        return segment

    def _complete(self, address: int) -> None:
        segment, block = self._find(address)
        self._note("free_completed", address, block.requested, segment)
        self._count(0, 0, -block.requested)
        block.state, block.requested = "inactive", 0
        joined: list[NaiveBlock] = []
        for entry in segment.blocks:
            if joined and joined[-1].state == entry.state == "inactive":
                joined[-1].size += entry.size
            else:
                joined.append(entry)
        segment.blocks = joined

    def _find(self, address: int) -> tuple[NaiveSegment, NaiveBlock]:
        return next((s, b) for s in self.segments for b in s.blocks if b.address == address)

    def _note(self, action: str, address: int, size: int, segment: NaiveSegment) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": segment.stream, "time_us": len(self.trace)}
        self.trace.append(entry | {"pool_id": segment.pool})

    def _count(self, allocated: int, reserved: int, requested: int) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.requested += requested
        now = (self.allocated, self.reserved, self.requested)
        self.peaks = [max(most, value) for most, value in zip(self.peaks, now, strict=True)]

    def _segment(self, segment: NaiveSegment) -> dict[str, Any]:
        blocks = [
            {"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state, "frames": []}
            for b in segment.blocks
        ]
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "stream": segment.stream,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": segment.pool,
            "allocated_size": sum(b.size for b in segment.blocks if b.state == "active_allocated"),
            "active_size": sum(b.size for b in segment.blocks if b.state != "inactive"),
            "blocks": blocks,
        }
