"""An allocation history played through the simulated allocator: the same blocks at the same addresses, or why not.

```
    recorded   segment_alloc 0x7f..  alloc 0x7f..  alloc ..  free_requested  free_completed  segment_free
                    │ its address      │ compared              │ not allocated any more │ may be lent again
    simulated       v                  v                       v                        v
               opens a segment?   which block?            allocated bytes          joined with its neighbours
```

What the device decides is taken from the history: at which address it has room, when another stream is done with a
block, and when cached segments were given back. What the allocator decides is simulated and compared: whether a segment
is opened, how large, which block a request gets, and what stands at the end. There is one list of free blocks for each
stream and private pool.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from autosplit.errors import InputError
from autosplit.memory.allocator import Allocator, AllocatorOptions
from autosplit.memory.blocks import Block
from autosplit.memory.blocks import Pool as FreeBlocks
from autosplit.memory.events import Change
from autosplit.memory.snapshots import Entry, HeldBlock, History, Peaks, Pool, Segment, State
from autosplit.units import format_bytes


@dataclass(frozen=True)
class ReplayedHistory:
    """What the simulated allocator did with a history.

    Attributes:
        peaks: the most that was allocated, reserved and requested, as the statistics of torch count them.
        allocations: how many blocks were given out.
        segments: how many segments were opened.
        difference: the first thing in which simulation and device differ, in words; None where they agree in all.
    """

    peaks: Peaks
    allocations: int
    segments: int
    difference: str | None

    @property
    def exact(self) -> bool:
        """Whether every block, every segment and every peak was that of the device."""
        return self.difference is None


def replay_history(history: History) -> ReplayedHistory:
    """Play a history through the simulated allocator and compare every block, every segment and the peaks.

    Stops at the first difference. Raises InputError where the history frees what it never allocated: its beginning is
    missing.
    """
    _check_beginning(history)
    device = _Device(history)
    difference = None
    try:
        for number, entry in enumerate(history.entries):
            device.at = number
            device.play(entry)
        device.compare(history)
    except _DiffersError as error:
        difference = str(error)
    return ReplayedHistory(device.peaks(), device.allocations, device.opened, difference)


def _check_beginning(history: History) -> None:
    """Raise InputError where blocks or segments are released or used that the history does not know."""
    live = {a for segment in history.opening for a, block in _placed(segment) if block.state != "free"}
    starts = [segment.address for segment in history.opening]
    ends = {segment.address: segment.address + segment.bytes for segment in history.opening}
    for entry in history.entries:
        if entry.action == "segment_alloc":
            insort(starts, entry.address)
            ends[entry.address] = entry.address + entry.bytes
        elif entry.action == "segment_free":
            if ends.pop(entry.address, None) is None:
                raise _missing(entry)
            starts.remove(entry.address)
        elif entry.action == "alloc":
            at = bisect_right(starts, entry.address)
            if not at or ends[starts[at - 1]] <= entry.address:
                raise _missing(entry)
            live.add(entry.address)
        elif entry.address not in live:
            raise _missing(entry)
        elif entry.action == "free_completed":
            live.remove(entry.address)


def changes_of(history: History, *, pool: Pool | None = None) -> Iterator[Change]:
    """Yield a history as changes for `simulate_allocator`: what is held first, then blocks as they come and go.

    A block goes when it may be used again (``free_completed``). ``pool`` leaves all other streams out; the simulator
    knows one. Raises InputError where the beginning is missing.
    """
    _check_beginning(history)
    storages: dict[int, tuple[int, int]] = {}
    count = 0
    held = (
        Entry("alloc", address, block.requested_bytes, segment.pool)
        for segment in history.opening
        for address, block in _placed(segment)
        if block.state != "free"
    )
    for entry in (*held, *history.entries):
        if pool is not None and entry.pool != pool:
            continue
        if entry.action == "alloc":
            storages[entry.address] = count, entry.bytes
            yield count, entry.bytes
            count += 1
        elif entry.action == "free_completed":
            storage, size = storages.pop(entry.address)
            yield storage, -size


class _DiffersError(Exception):
    """The simulation does something else than the device did."""


class _Placed(Allocator):
    """The allocator of one stream and private pool, whose segments lie where the device found room."""

    def __init__(self, options: AllocatorOptions) -> None:
        super().__init__(options)
        self.offered: Entry | None = None
        """The segment that the device opened for the request that comes next."""

    def restore(self, segment: Segment) -> None:
        """Take over a segment that was there before the history began."""
        pool = self.pools[0] if segment.small else self.pools[1]
        blocks = pool.restore(segment.address, [(block.bytes, block.state == "free") for block in segment.blocks])
        for block, held in zip(blocks, segment.blocks, strict=True):
            if held.state != "free":
                self.adopt(block.address, block, held.requested_bytes)

    def _reserve(self, pool: FreeBlocks, size: int) -> Block:
        wanted, offered = self._options.segment(size), self.offered
        if offered is None:
            raise _DiffersError(f"the simulation opens a segment of {format_bytes(wanted)}, the device opened none")
        if offered.bytes != wanted:
            raise _DiffersError(
                f"the simulation opens a segment of {wanted} bytes, the device opened one of {offered.bytes}"
            )
        self.offered = None
        return pool.open(wanted, address=offered.address)


class _Device:
    """All allocators of one device, and what torch's statistics would count."""

    def __init__(self, history: History) -> None:
        self.at = 0
        """Which entry is played."""
        self.allocations = self.opened = 0
        self._options = history.options
        self._pools: dict[Pool, _Placed] = {}
        self._awaiting: set[int] = set()
        self._requested: dict[int, int] = {}
        self._now, self._most = [0, 0, 0], [0, 0, 0]
        for segment in history.opening:
            self._of(segment.pool).restore(segment)
            self._count(reserved=segment.bytes)
            for address, block in _placed(segment):
                if block.state == "free":
                    continue
                self._requested[address] = block.requested_bytes
                self._count(requested=block.requested_bytes)
                if block.state == "allocated":
                    self._count(allocated=block.bytes)
                else:
                    self._awaiting.add(address)

    def play(self, entry: Entry) -> None:
        """Do what the entry says."""
        pool = self._of(entry.pool)
        if entry.action == "segment_alloc":
            if pool.offered is not None:
                raise self._differs(
                    f"the device opened two segments for one request, the first at {_hex(pool.offered)}"
                )
            pool.offered = entry
            self.opened += 1
            self._count(reserved=entry.bytes)
        elif entry.action == "segment_free":
            self._close(pool, entry)
        elif entry.action == "alloc":
            self._allocate(pool, entry)
        elif entry.action == "free_requested":
            self._count(allocated=-pool.block(entry.address).size)
            self._awaiting.add(entry.address)
        else:
            if entry.address not in self._awaiting:
                raise self._differs(f"the release of {_hex(entry)} was completed before it was requested")
            self._awaiting.remove(entry.address)
            self._count(requested=-self._requested.pop(entry.address))
            pool.free(entry.address)

    def compare(self, history: History) -> None:
        """Compare what stands at the end with the closing snapshot, and the peaks with the statistics."""
        own = {s.address: s for s in self._standing()}
        for segment in history.closing:
            found = own.pop(segment.address, None)
            if found is None or _shape(found) != _shape(segment):
                stands = "no segment" if found is None else _text(found)
                raise _DiffersError(
                    f"at the end the device has {_text(segment)} at {segment.address:#x}, the simulation has {stands}"
                )
        if own:
            left = next(iter(own.values()))
            raise _DiffersError(
                f"at the end the simulation has {_text(left)} at {left.address:#x}, the device has none"
            )
        for name, value in () if history.measured is None else vars(history.measured).items():
            simulated = getattr(self.peaks(), name)
            if value is not None and value != simulated:
                raise _DiffersError(f"the peak of {name} is {value} on the device and {simulated} in the simulation")

    def peaks(self) -> Peaks:
        """Return the peaks so far."""
        return Peaks(*self._most)

    def _of(self, pool: Pool) -> _Placed:
        return self._pools.setdefault(pool, _Placed(self._options))

    def _allocate(self, pool: _Placed, entry: Entry) -> None:
        if entry.address in self._requested:
            raise self._differs(f"the device gave out {_hex(entry)} twice; between them its release is missing")
        try:
            pool.allocate(entry.address, entry.bytes)
        except _DiffersError as error:
            raise self._differs(f"for a request of {entry.bytes} bytes {error}") from None
        block = pool.block(entry.address)
        if pool.offered is not None:
            raise self._differs(
                f"for a request of {entry.bytes} bytes the device opened a segment of {pool.offered.bytes} bytes, the "
                f"simulation takes a free block at {block.address:#x}"
            )
        if block.address != entry.address:
            raise self._differs(
                f"a request of {entry.bytes} bytes was given {_hex(entry)} by the device, {block.address:#x} by the "
                "simulation"
            )
        self._requested[entry.address] = entry.bytes
        self.allocations += 1
        self._count(allocated=block.size, requested=entry.bytes)

    def _close(self, allocator: _Placed, entry: Entry) -> None:
        """Give back a segment, which is one free block."""
        for pool in allocator.pools:
            block = pool.head(entry.address)
            if block is not None:
                if not block.free or block.size != entry.bytes:
                    raise self._differs(
                        f"the device gave back a segment of {entry.bytes} bytes at {_hex(entry)}, of which the "
                        f"simulation has {block.size} bytes free in its first block"
                    )
                pool.close(block)
                self._count(reserved=-entry.bytes)
                return
        raise self._differs(f"the device gave back a segment at {_hex(entry)}, where the simulation has none")

    def _standing(self) -> Iterator[Segment]:
        for key, allocator in self._pools.items():
            for pool in allocator.pools:
                for head in pool.heads:
                    blocks = tuple(self._held(block) for block in _chain(head))
                    yield Segment(head.address, sum(b.bytes for b in blocks), key, pool.small, blocks)

    def _held(self, block: Block) -> HeldBlock:
        state: State = "free" if block.free else "awaiting_free" if block.address in self._awaiting else "allocated"
        return HeldBlock(block.size, 0 if block.free else self._requested[block.address], state)

    def _count(self, *, allocated: int = 0, reserved: int = 0, requested: int = 0) -> None:
        self._now = [now + more for now, more in zip(self._now, (allocated, reserved, requested), strict=True)]
        self._most = [max(most, now) for most, now in zip(self._most, self._now, strict=True)]

    def _differs(self, text: str) -> _DiffersError:
        return _DiffersError(f"entry {self.at}: {text}")


def _placed(segment: Segment) -> Iterator[tuple[int, HeldBlock]]:
    """Yield the blocks of a segment with their addresses."""
    address = segment.address
    for block in segment.blocks:
        yield address, block
        address += block.bytes


def _chain(head: Block) -> Iterator[Block]:
    block: Block | None = head
    while block is not None:
        yield block
        block = block.next


def _shape(segment: Segment) -> object:
    blocks = tuple((b.bytes, b.state, 0 if b.state == "free" else b.requested_bytes) for b in segment.blocks)
    return segment.bytes, segment.pool, segment.small, blocks


def _text(segment: Segment) -> str:
    used = sum(block.state != "free" for block in segment.blocks)
    return f"a segment of {segment.bytes} bytes with {used} of {len(segment.blocks)} blocks in use"


def _hex(entry: Entry) -> str:
    return f"{entry.address:#x}"


def _missing(entry: Entry) -> InputError:
    size = f"{format_bytes(entry.bytes)} at {entry.address:#x}"
    what = {
        "alloc": f"gives out {size} in a segment that was never opened",
        "segment_free": f"gives back a segment of {size} that was never opened",
    }.get(entry.action, f"releases {size} that were never allocated")
    return InputError(
        f"the history {what} and not held when it began: its beginning is missing; record from before the first "
        "allocation, give the snapshot from before recording began as opening, or keep more entries (max_entries)"
    )
