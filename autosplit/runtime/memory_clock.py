"""What each CPU lane allocates in a step, by the allocator's own events.

One thread issues the actions, so that the events are in order, and what comes from another lane is copied, so that
every lane has memory of its own, as a device has. A block is of the lane whose action, or whose copy, allocated it:

    lane 0   ──[0F0]──────[0F1]────────────[0B0]──      its own blocks, from the first action on
    lane 1   ────────[1F0]─────[1F1][1B0]─────────
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.autograd.profiler import record_function

from autosplit.planning.timeline import HeldBytes, StepTimeline
from autosplit.profile.allocations import Allocations
from autosplit.runtime.clock import StepClock
from autosplit.runtime.lanes import Lane
from autosplit.schedule.action import Action

_MARK = "autosplit stage "


class MemoryClock(StepClock):
    """A clock of a step that also counts what CPU lanes allocate; the times are not those of a step without it.

    To be closed after the step, also after a failed one.
    """

    in_turn = True

    def __init__(self) -> None:
        super().__init__()
        self._allocations = Allocations()
        self._profiling = ExitStack()
        self._mark: ExitStack | None = None
        self._counts = False

    def start(self, lanes: Sequence[Lane], *, rows: Sequence[int] = ()) -> None:
        """Begin; the profiler follows where a stage is on the CPU. The last of ``lanes`` is the caller's."""
        super().start(lanes, rows=rows)
        stages = lanes[:-1]
        self._counts = self._whole is None and any(lane.device.type == "cpu" for lane in stages)
        if self._counts:
            self._profiling.enter_context(self._allocations)

    def close(self) -> None:
        """End the marks and the profiler, whatever became of the step."""
        if self._mark is not None:
            self._mark.close()
        self._mark = None
        self._profiling.close()

    def begins(self, action: Action) -> None:
        """Take the time, and count what is allocated from now on for the action's lane."""
        super().begins(action)
        if self._runs and self._mark is None:
            self._mark = ExitStack()
            self._mark.enter_context(record_function(f"{_MARK}{action.stage}"))

    def ends(self, action: Action) -> None:
        """Take the time; what is allocated from now on is nobody's until the next action."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        super().ends(action)

    def copied(
        self, move: Callable[[], Any], source: int, target: int, microbatch: int, *, backward: bool, ready: Any
    ) -> Any:
        """Return a copy, counted for the lane that it comes to, of what went by reference from CPU lane to CPU lane."""
        moved = super().copied(move, source, target, microbatch, backward=backward, ready=ready)
        if not self._runs or self._lanes[source] is self._lanes[target]:
            return moved
        if any(self._lanes[stage].device.type != "cpu" for stage in (source, target)):
            return moved
        with record_function(f"{_MARK}{target}"):
            return tuple(tensor.clone() for tensor in moved)

    def timeline(self, stage_lane: Sequence[int]) -> StepTimeline:
        """Return the step as it ran: its times are of lanes that worked in turn, under a profiler."""
        return replace(super().timeline(stage_lane), timed=False)

    def memory(self, stage_lane: Sequence[int]) -> tuple[HeldBytes | None, ...]:
        """Return what each lane's device held: counted here on the CPU, by the device's own allocator elsewhere."""
        found = list(super().memory(stage_lane)) or [None] * (max(stage_lane) + 1)
        if not self._counts:
            return tuple(found)
        grown = _grown_bytes(self._allocations, stage_lane)
        for number, lane in zip(stage_lane, self._lanes, strict=False):
            if lane.device.type == "cpu":
                found[number] = HeldBytes(None, grown.get(number, 0))
        return tuple(found)


def _grown_bytes(run: Allocations, stage_lane: Sequence[int]) -> dict[int, int]:
    """Return by lane the most bytes of its own that it had at once; the innermost mark says whose a block is."""
    owner: list[int | None] = [None] * len(run.changes)
    marks = [operation for operation in run.operations if operation.name.startswith(_MARK)]
    for mark in sorted(marks, key=lambda operation: operation.depth):
        lane = stage_lane[int(mark.name.removeprefix(_MARK))]
        owner[mark.first : mark.last] = [lane] * (mark.last - mark.first)
    lane_of: dict[int, int | None] = {}
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    for place, (block, size) in enumerate(run.changes):
        held_by = lane_of.setdefault(block, owner[place])
        if held_by is not None:
            live[held_by] = live.get(held_by, 0) + size
            most[held_by] = max(most.get(held_by, 0), live[held_by])
    return most
