"""What the CPU allocator really did while something ran: every allocation and every release, in order, with its bytes.

The events are the allocator's own, as ``torch.profiler`` records them with ``profile_memory``: unlike a ledger of the
dispatched operations they also show the scratch that kernels allocate inside.

``experimental_event_tree`` of the profiler's results is undocumented, but torch has no public way to the events in
their order (``profile.events()`` adds them up by operation). torch's own ``torch.profiler._memory_profiler`` reads the
same tree. Used in this file only, on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.profiler import profile

_ALLOCATION = "[memory]"
_WINDOW = 64
"""How many events ahead the next one is looked for: threads note their events a moment after they allocate."""


@dataclass(frozen=True, slots=True)
class OperationMemory:
    """Bytes of one operation that was called: beside what was alive when it began.

    Attributes:
        name: as the profiler names it: ``aten::mm``, or a backward node.
        depth: 0 for what was called directly, 1 for what that called, and so on.
        first: index of the first of its changes in ``Allocations.changes``; ``last`` is one past its last.
        peak_bytes: the most that it held at once.
        left_bytes: what it left (its results, less what it freed).
    """

    name: str
    depth: int
    first: int
    last: int
    peak_bytes: int
    left_bytes: int


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
        place: dict[int, int] = {}
        changes: list[tuple[int, int]] = []
        live = [0]
        for event, change in _numbered(_in_order(events)):
            place[id(event)] = len(changes)
            changes.append(change)
            live.append(live[-1] + change[1])
        self.changes = tuple(changes)
        self.peak_bytes, self.left_bytes = max(live), live[-1]
        self.operations = tuple(
            _operation(name, depth, [place[id(event)] for event in inside if id(event) in place], live)
            for name, depth, inside in calls
        )


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


def _operation(name: str, depth: int, places: Sequence[int], live: Sequence[int]) -> OperationMemory:
    if not places:
        return OperationMemory(name, depth, 0, 0, 0, 0)
    first, last = min(places), max(places) + 1
    before = live[first]
    return OperationMemory(name, depth, first, last, max(live[first : last + 1]) - before, live[last] - before)
