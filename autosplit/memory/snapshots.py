"""The caching allocator's own account of itself, read: ``torch.cuda.memory._snapshot()`` as plain data.

Written for the format that torch documents at ``torch.cuda.memory._snapshot`` (read in 2.13) and that
``torch/csrc/cuda/Module.cpp`` writes: ``segments``, ``device_traces``, ``allocator_settings``. A snapshot comes from
outside, so it is checked here; nothing here imports torch, and `autosplit.profile.allocator_history` records one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from autosplit.errors import InputError
from autosplit.memory.allocator import AllocatorOptions
from autosplit.memory.blocks import MIB

Action = Literal["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]
State = Literal["allocated", "awaiting_free", "free"]

_IGNORED = ("snapshot", "oom", "user_defined")
"""Entries that change nothing: a failed request leaves no block, what was freed for it has entries of its own."""
_GROWING = ("segment_map", "segment_unmap")
_STATES: Mapping[str, State] = {
    "active_allocated": "allocated",
    "active_awaiting_free": "awaiting_free",
    "active_pending_free": "awaiting_free",
    "inactive": "free",
}
"""The second and the third are one state: documented under one name, written under the other."""
_LARGE_SEGMENT = re.compile(r"large_segment_size_mb:(\d+)")


@dataclass(frozen=True, order=True)
class Pool:
    """Where a segment belongs: blocks never move between streams, nor between CUDA graphs' private pools."""

    stream: int
    private: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the allocator did; ``bytes`` is as requested for a block, whole for a segment."""

    action: Action
    address: int
    bytes: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block of a segment; a freed block that another stream may still use is "awaiting_free"."""

    bytes: int
    requested_bytes: int
    state: State


@dataclass(frozen=True)
class Segment:
    """One segment with its blocks, which fill it in order."""

    address: int
    bytes: int
    pool: Pool
    small: bool
    blocks: tuple[HeldBlock, ...]


@dataclass(frozen=True)
class Peaks:
    """The allocator's own statistics: the most of each since recording began, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int | None = None


@dataclass(frozen=True)
class History:
    """What one device's allocator did between two moments, and what it held at both.

    ``measured`` are the statistics of the same time, where they were read.
    """

    opening: tuple[Segment, ...]
    entries: tuple[Entry, ...]
    closing: tuple[Segment, ...]
    options: AllocatorOptions = field(default_factory=AllocatorOptions)
    measured: Peaks | None = None


def history_of(
    snapshot: Mapping[str, Any],
    *,
    device: int = 0,
    opening: Mapping[str, Any] | None = None,
    max_entries: int | None = None,
    measured: Peaks | None = None,
) -> History:
    """Return the history of one device from a snapshot that was taken at its end.

    ``opening`` is the snapshot from before recording began; without it the device held nothing then. ``max_entries`` is
    what ``_record_memory_history`` was told to keep.

    Raises:
        InputError: what was given is no snapshot, its beginning was overwritten, or expandable segments were on.
    """
    traces = _field(snapshot, "device_traces", list)
    trace = traces[device] if device < len(traces) else []
    if max_entries is not None and len(trace) >= max_entries:
        raise InputError(
            f"the history has {len(trace)} entries and {max_entries} were kept: its beginning was overwritten; record "
            "fewer steps, or more entries (max_entries)"
        )
    closing = _segments(snapshot, device)
    before = () if opening is None else _segments(opening, device)
    pools = {segment.address: segment for segment in (*before, *closing)}
    entries = tuple(_entry(raw, pools) for raw in trace if raw.get("action") not in _IGNORED)
    return History(before, entries, closing, _options(snapshot.get("allocator_settings", {})), measured)


def _field(source: Mapping[str, Any], name: str, kind: type) -> Any:
    value = source.get(name) if isinstance(source, Mapping) else None
    if not isinstance(value, kind):
        raise InputError(
            f"this is no snapshot of the allocator: {name!r} is {type(value).__name__}, a {kind.__name__} is expected; "
            "give what torch.cuda.memory._snapshot() returns"
        )
    return value


def _entry(raw: Mapping[str, Any], segments: Mapping[int, Segment]) -> Entry:
    action: Action | None = raw.get("action")
    if action in _GROWING:
        raise InputError(
            "the history has expandable segments, which are not replayed entry by entry; record with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    if action is None or action not in get_args(Action):
        raise InputError(
            f"the history has an entry {action!r}, which is not known; known are {', '.join(get_args(Action))}"
        )
    address = int(raw["addr"])
    private = raw.get("pool_id")
    if private is None:
        private = _segment_at(segments, address).private
    return Entry(action, address, int(raw["size"]), Pool(int(raw["stream"]), (int(private[0]), int(private[1]))))


def _segment_at(segments: Mapping[int, Segment], address: int) -> Pool:
    """Return the pool of the segment that holds an address; not every version names it in an entry."""
    found = (s.pool for s in segments.values() if s.address <= address < s.address + s.bytes)
    return next(found, Pool(0))


def _segments(snapshot: Mapping[str, Any], device: int) -> tuple[Segment, ...]:
    found = (_segment(raw) for raw in _field(snapshot, "segments", list) if raw.get("device", 0) == device)
    return tuple(sorted(found, key=lambda segment: segment.address))


def _segment(raw: Mapping[str, Any]) -> Segment:
    private: Sequence[int] = raw.get("segment_pool_id", (0, 0))
    blocks = tuple(
        HeldBlock(int(block["size"]), int(block.get("requested_size", block["size"])), _STATES[block["state"]])
        for block in raw["blocks"]
    )
    if sum(block.bytes for block in blocks) != raw["total_size"]:
        raise InputError(f"the segment at {raw['address']:#x} has {raw['total_size']} bytes, its blocks another number")
    pool = Pool(int(raw["stream"]), (int(private[0]), int(private[1])))
    return Segment(int(raw["address"]), int(raw["total_size"]), pool, raw["segment_type"] == "small", blocks)


def _options(settings: Mapping[str, Any]) -> AllocatorOptions:
    """Return the settings that change where a block goes, as a snapshot names them."""
    if settings.get("expandable_segments"):
        raise InputError(
            "the snapshot was taken under expandable segments, which are not replayed entry by entry; record with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    split = int(settings.get("max_split_size", -1))
    divisions = {int(value) for value in settings.get("roundup_power2_divisions", {}).values()} or {0}
    if len(divisions) > 1:
        raise InputError("roundup_power2_divisions differs by size, which is not simulated; record with one number")
    large = _LARGE_SEGMENT.search(str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")))
    return AllocatorOptions(
        max_split_bytes=split if 0 < split < 1 << 62 else None,
        roundup_power2_divisions=divisions.pop(),
        large_segment_bytes=int(large[1]) * MIB if large else AllocatorOptions.large_segment_bytes,
    )
