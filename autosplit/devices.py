"""What a device tells: how long something takes on it, how many bytes it then holds, and what its allocator did.

The clocks are the one place below the lanes that asks what a device is. What the CPU allocator really did while
something ran is every allocation and every release, in order, with its bytes. The events are the allocator's own, as
``torch.profiler`` records them with ``profile_memory``: unlike a ledger of the dispatched operations they also show the
scratch that kernels allocate inside.

Private torch API: ``torch.cuda._sleep``, the one kernel that takes a time and nothing else; torch's own tests of
streams use it. It is there in torch 2.11 to 2.15; run on 2.11. ``experimental_event_tree`` of the profiler's
results is undocumented, but torch has no public way to the events in their order (``profile.events()`` adds them up by
operation); torch's own ``torch.profiler._memory_profiler`` reads the same tree. Tried on torch 2.11 to 2.15.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What torch says in a plain RuntimeError: c10/core/impl/alloc_cpu.cpp on Linux and Windows, and CUDA's libraries."""

_FINE_S = 1e-6
"""The coarsest count of CPU seconds that tells the time of one operation."""


_LEAST_LEAD_S, _MOST_LEAD_S = 5e-5, 0.05
"""How long a device is kept busy before what is timed on it: as long as the host needs to issue that, and some more."""
_LEAD, _FADING = 1.5, 0.8
"""How much longer it waits than the longest issue of late, which fades: forwards and backwards take turns."""
_FASTEST_HZ = 2.6e9
"""No GPU's multiprocessors run faster, so a count of cycles is never too short."""


@dataclass(frozen=True)
class Timed:
    """What something returned, the seconds that the device spent on it, and the most bytes that it held meanwhile.

    ``peak_bytes`` counts from nothing, as `Clock.held_bytes` does; None where the device does not count. ``issue_s``
    are the seconds that the host took to issue it; 0 where host and device are one.
    """

    result: Any
    seconds: float
    peak_bytes: int | None = None
    issue_s: float = 0.0


class Clock:
    """The clock of one device, and its count of bytes; as it is here, the CPU's.

    Time passes in the calling thread: its own CPU seconds where it computes alone, else the seconds of the wall. CPU
    seconds leave out what other programs take of the core; a system that counts them in coarse steps has the wall's
    only. torch keeps no count of a CPU's bytes.
    """

    warms = False
    """Whether a kernel's first run takes longer than others: it is loaded, and libraries choose among theirs."""

    def __init__(self, *, threads: int) -> None:
        fine = time.get_clock_info("thread_time").resolution <= _FINE_S
        self._now_s = time.thread_time if threads == 1 and fine else time.perf_counter

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something and time it."""
        start_s = self._now_s()
        result = run()
        return Timed(result, self._now_s() - start_s)

    def stamp(self, stream: Any = None) -> Any:
        """Return the time when what a stream was given so far is done, or an event that takes it then.

        On the CPU it is the wall's: lanes are compared by it.
        """
        return time.perf_counter()

    def seconds(self, first: Any, then: Any) -> float:
        """Return how long after the first of two stamps the other was; the host waits for both."""
        return then - first

    def occupy(self, seconds: float) -> None:
        """Keep the current stream at work for at least so long, where there is one."""

    def held_bytes(self) -> int | None:
        """Return the bytes that tensors hold on the device now; None where the device does not count."""
        return None

    def watch_peak(self) -> None:
        """Forget the most bytes that tensors held on the device so far."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that they held since then; None where the device does not count."""
        return None

    def release(self) -> None:
        """Give back memory that is cached for tensors to come."""


class CudaClock(Clock):
    """Events in the device's streams; bytes as torch's caching allocator counts them, for the whole process.

    ```
        host     issue the wait ─ event ─ a b c d ─ event                    synchronise
        device   [ waits: as long as the host issued before ][a][b][c][d]
                                                              └─ seconds ┘
    ```

    The time between two events is the device's only where the host is ahead of it: else it is that of the host, which
    issues a small kernel in more time than the kernel takes. So the device waits first. What makes the host wait for
    the device in its middle is timed with that.

    The allocator's peaks (``max_memory_allocated``) start anew with everything that is timed.
    """

    warms = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)
        self._issue_s = 0.0

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something, time it, and wait for it."""
        with self._torch.device(self._device):
            self.watch_peak()
            self.occupy(min(max(_LEAST_LEAD_S, _LEAD * self._issue_s), _MOST_LEAD_S))
            start = self.stamp()
            began_s = time.perf_counter()
            result = run()
            issue_s = time.perf_counter() - began_s
            seconds = self.seconds(start, self.stamp())
        self._issue_s = max(issue_s, _FADING * self._issue_s)
        return Timed(result, seconds, self.peak_bytes(), issue_s)

    def stamp(self, stream: Any = None) -> Any:
        """Return an event that takes the time in a stream; None: the current one."""
        event = self._torch.Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, first: Any, then: Any) -> float:
        """Wait for two events, which may count in half microseconds, and return the time between them."""
        then.synchronize()
        return first.elapsed_time(then) / 1e3

    def occupy(self, seconds: float) -> None:
        """Keep one multiprocessor busy for at least so long: as many cycles as the fastest clock has in that time."""
        torch.cuda._sleep(int(seconds * _FASTEST_HZ))

    def held_bytes(self) -> int:
        """Return the bytes that the allocator has given out, by the host's clock."""
        return self._torch.memory_allocated(self._device)

    def watch_peak(self) -> None:
        """Reset the allocator's peak."""
        self._torch.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the most that the allocator has given out at once since then."""
        return self._torch.max_memory_allocated(self._device)

    def release(self) -> None:
        """Give cached blocks back to the device."""
        self._torch.empty_cache()


def clock_of(device: torch.device, *, threads: int) -> Clock:
    """Return the clock of a device; ``threads`` is the number of intra-op threads of a CPU."""
    return CudaClock(device) if device.type == "cuda" else Clock(threads=threads)


def device_text(device: torch.device) -> str:
    """Return which piece of hardware a device is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


@cache
def _processor() -> str:
    """Return the CPU's name: Linux alone has it in a file, elsewhere Python's standard library knows."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


_ALLOCATION = "[memory]"
_WINDOW = 64
"""How many events ahead the next one is looked for: threads note their events a moment after they allocate."""


@dataclass(frozen=True, slots=True)
class OperationMemory:
    """The changes of memory that one call of an operation made.

    Attributes:
        name: as the profiler names it: ``aten::mm``, or a backward node.
        depth: 0 for what was called directly, 1 for what that called, and so on.
        first: index of the first of its changes in ``Allocations.changes``; ``last`` is one past its last.
    """

    name: str
    depth: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Event:
    time_ns: int
    pointer: int
    bytes: int
    total_bytes: int
    """What the allocator had given out after it, by the profiler's count."""


@dataclass
class Allocations:
    """Record what the CPU allocator does while the context is open; read the fields when it has closed.

    The profiler follows this thread and, for the backward, autograd's. A block that was allocated before is not seen
    when it is freed inside, and intra-op threads are not followed: use one (``torch.set_num_threads(1)``) where kernels
    allocate per thread. Contexts do not nest, nor in another profiler.

    Attributes:
        changes: ``(block, bytes)`` in order: above zero allocated, below zero freed; each block has its own number.
        operations: what ran, in order of the calls; the called after their callers.
        peak_bytes: the most that was alive at once above what was alive at the start.
        left_bytes: what was alive at the end above what was alive at the start.
    """

    changes: tuple[tuple[int, int], ...] = ()
    operations: tuple[OperationMemory, ...] = ()
    peak_bytes: int = 0
    left_bytes: int = 0
    _profile: Any = field(default=None, repr=False)

    def __enter__(self) -> Allocations:
        """Start to record."""
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop, and read what was recorded."""
        self._profile.__exit__(*error)
        results, self._profile = self._profile.kineto_results, None
        if error[0] is not None:
            return
        events, calls = _read(results.experimental_event_tree())
        index_of: dict[int, int] = {}
        changes: list[tuple[int, int]] = []
        live = [0]
        for event, change in _numbered(_in_order(events)):
            index_of[id(event)] = len(changes)
            changes.append(change)
            live.append(live[-1] + change[1])
        self.changes = tuple(changes)
        self.peak_bytes, self.left_bytes = max(live), live[-1]
        self.operations = tuple(_operation(name, depth, inside, index_of) for name, depth, inside in calls)


def _read(roots: Iterable[Any]) -> tuple[list[_Event], list[tuple[str, int, list[_Event]]]]:
    """Return the allocator's events, and the operations with those that fell into them."""
    events: list[_Event] = []
    calls: list[tuple[str, int, list[_Event]]] = []
    stack: list[tuple[Any, tuple[list[_Event], ...]]] = [(node, ()) for node in reversed(list(roots))]
    while stack:
        node, callers = stack.pop()
        if node.name == _ALLOCATION:
            fields = node.typed[1]
            if fields.device.type == "cpu":
                event = _Event(node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated)
                events.append(event)
                for inside in callers:
                    inside.append(event)
            continue
        inside = []
        calls.append((node.name, len(callers), inside))
        stack += [(child, (*callers, inside)) for child in reversed(node.children)]
    return events, calls


def _in_order(events: Sequence[_Event]) -> list[_Event]:
    """Return the events as they happened: by time, and by the allocator's running total where times tie or lie."""
    waiting = sorted(events, key=lambda event: event.time_ns)
    ordered: list[_Event] = []
    while waiting:
        total = ordered[-1].total_bytes if ordered else None
        ahead = range(min(_WINDOW, len(waiting)))
        fitting = (i for i in ahead if total is None or waiting[i].total_bytes - waiting[i].bytes == total)
        ordered.append(waiting.pop(next(fitting, 0)))
    return ordered


def _numbered(events: Iterable[_Event]) -> Iterable[tuple[_Event, tuple[int, int]]]:
    """Give each block a number; leave out the release of what was not allocated here."""
    blocks: dict[int, tuple[int, int]] = {}
    count = 0
    for event in events:
        if event.bytes > 0:
            blocks[event.pointer] = count, event.bytes
            yield event, (count, event.bytes)
            count += 1
        elif event.pointer in blocks:
            number, size = blocks.pop(event.pointer)
            yield event, (number, -size)


def _operation(name: str, depth: int, inside: Iterable[_Event], index_of: Mapping[int, int]) -> OperationMemory:
    places = [index_of[id(event)] for event in inside if id(event) in index_of]
    return OperationMemory(name, depth, min(places, default=0), max(places, default=-1) + 1)
