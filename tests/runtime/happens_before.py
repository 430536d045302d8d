"""What streams were told, as a log, and a checker that knows which of it is ordered.

A stream does its entries in the order in which the host gave them. Two streams are ordered only where one waits for
an event of the other; the host is ahead of all of them, and waits only when it synchronizes. The log is checked with
vector clocks (C. Fidge, 1988; F. Mattern, 1989): an entry is done before another when the other's clock counts it.

Freed memory goes back to the stream that allocated it: any later allocation there may get it at once, unless the
allocator was told of another stream that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HOST = "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Op:
    """Work on a stream that reads and writes memory, by number; memory that was not there before is allocated."""

    stream: str
    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """An event is put on a stream."""

    stream: str
    event: int


@dataclass(frozen=True)
class Wait:
    """A stream, or the host, waits for an event."""

    stream: str
    event: int


@dataclass(frozen=True)
class Keep:
    """The allocator learns that a stream uses a memory."""

    stream: str
    memory: int


@dataclass(frozen=True)
class Free:
    """The last reference to a memory is gone."""

    memory: int


Entry = Op | Record | Wait | Keep | Free


@dataclass
class _Memory:
    pool: str
    written: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """By stream, the number of its last entry that wrote to, or used, the memory."""
    kept: set[str] = field(default_factory=set)


def problems(log: list[Entry]) -> list[str]:
    """Return what is wrong in a log: uses that race with a write, and memory that is given away too early."""
    check = _Check()
    for entry in log:
        check.entry(entry)
    return check.found


def is_before(log: list[Entry], first: Op, second: Op) -> bool:
    """Tell whether an entry of a stream is done before another begins, whatever the streams' speed."""
    check, counts = _Check(), dict[int, int]()
    for entry in log:
        check.entry(entry)
        if isinstance(entry, Free | Keep):
            continue
        clock = check.clocks[entry.stream]
        counts[id(entry)] = clock[entry.stream]
        if entry is second:
            return clock.get(first.stream, 0) >= counts[id(first)]
    raise AssertionError(f"{second} is not in the log")


class _Check:
    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.events: dict[int, Clock] = {}
        self.memories: dict[int, _Memory] = {}
        self.free: dict[int, _Memory] = {}
        self.found: list[str] = []

    def entry(self, entry: Entry) -> None:
        if isinstance(entry, Free):
            self.free[entry.memory] = self.memories.pop(entry.memory)
        elif isinstance(entry, Keep):
            self.memories[entry.memory].kept.add(entry.stream)
        elif isinstance(entry, Record):
            self.events[entry.event] = dict(self._tick(entry.stream))
        elif isinstance(entry, Wait):
            _join(self._tick(entry.stream), self.events[entry.event])
        else:
            self._op(entry)

    def _tick(self, stream: str) -> Clock:
        """Count one more entry of a stream; the host gave it, so all that the host has seen is done."""
        clock = self.clocks.setdefault(stream, {})
        _join(clock, self.clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _op(self, op: Op) -> None:
        clock = self._tick(op.stream)
        for number in op.allocates:
            self._allocate(op, number)
        for number in op.reads:
            self._ordered(op, number, self.memories[number].written, "reads", "written")
        for number in op.writes:
            self._ordered(op, number, self.memories[number].used, "writes", "used")
            self.memories[number].written[op.stream] = clock[op.stream]
        for number in (*op.reads, *op.writes):
            self.memories[number].used[op.stream] = clock[op.stream]

    def _ordered(self, op: Op, number: int, before: dict[str, int], does: str, done: str) -> None:
        clock = self.clocks[op.stream]
        for stream, count in before.items():
            if clock.get(stream, 0) < count:
                self.found.append(f"{op.stream}: {op.name} {does} memory {number} that {stream} has {done}, unordered")

    def _allocate(self, op: Op, number: int) -> None:
        """Give an operation memory; whatever its stream has free may be the one."""
        self.memories[number] = _Memory(op.stream)
        clock = self.clocks[op.stream]
        for old, memory in [(n, m) for n, m in self.free.items() if m.pool == op.stream]:
            del self.free[old]
            for stream, count in memory.used.items():
                if stream not in memory.kept and clock.get(stream, 0) < count:
                    self.found.append(
                        f"{op.stream}: {op.name} may get memory {old} that {stream} still uses, too early"
                    )


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))
