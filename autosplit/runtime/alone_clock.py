"""Each action of a step alone on its device: what it takes there, what issuing it takes, and what its lane then holds.

One thread issues the actions and waits after each, and after each copy, so that nothing else is under way:

    host    issue 0F0 │ wait ........ │ issue 1F0 │ wait ...
    device  [ busy ][ 0F0 ]           [ busy ][ 1F0 ]            [ busy ]: until the action is issued as a whole

A device that is kept busy while an action is issued then runs it in one go: its time is the device's, and the host's
time to issue it stands beside it. How long that takes is known from the steps before: the least of them, since a host
waits too where more is issued than the driver takes at once.

On the CPU, actions of one intra-op thread take that thread's CPU seconds, which leave out what other programs take.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch

from autosplit.planning.alone import SentAlone, StagesAlone, by_stage
from autosplit.runtime.clock import StepClock
from autosplit.runtime.lanes import Lane
from autosplit.schedule.action import Action, Schedule

_LONGER = 1.5
"""By how much a device is kept busy for longer than the action took to issue before."""
_MOST_BUSY_S = 0.5
"""For how long at most: what takes longer to issue met something else, such as a compiler."""

_Way = tuple[int, int, bool]
"""From which stage to which, and whether backward."""


class AloneClock(StepClock):
    """A clock of several steps, one after the other, whose actions run alone; the first warms up and does not count."""

    in_turn = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        """How many steps ended."""
        self._action: Action | None = None
        self._entered_s = self._issued_s = self._inside_s = self._own_s = 0.0
        self._now_s: Callable[[], float] = time.perf_counter
        self._seconds: dict[Action, list[float]] = defaultdict(list)
        self._issue_s: dict[Action, list[float]] = defaultdict(list)
        self._once_s: list[float] = []
        self._known = 0
        self._moved: dict[_Way, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._moving_s: dict[_Way, list[float]] = defaultdict(list)
        self._holds = _Holds()

    @property
    def whole(self) -> str | None:
        """Why the steps ran as one piece; None where they ran action by action."""
        return self._whole

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return len(self._rows)

    def start(self, lanes: Sequence[Lane], *, rows: Sequence[int] = ()) -> None:
        """Begin a step."""
        self._begun.clear()
        self._ended.clear()
        self._copies.clear()
        self._moved.clear()
        self._known, self._inside_s, self._holds.level = 0, 0.0, {}
        self._now_s = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        super().start(lanes, rows=rows)

    def finish(self, loss: Any) -> None:
        """End a step; the first one's times are left out."""
        super().finish(loss)
        if self.steps:
            self._once_s.append(max(0.0, self._whole_s - self._inside_s))
        else:
            self._seconds.clear()
            self._moving_s.clear()
        self.steps += 1

    def begins(self, action: Action) -> None:
        """Take the time at which an action begins, on a device that is through with all else."""
        if not self._runs:
            return
        if self._action != action:
            self._action, self._entered_s = action, time.perf_counter()
        self._arrive()
        lane = self._lanes[action.stage]
        self._holds.begin(lane)
        if known := self._issue_s[action]:
            lane.occupy(min(_LONGER * min(known), _MOST_BUSY_S))
        super().begins(action)
        self._issued_s, self._own_s = time.perf_counter(), self._now_s()

    def ends(self, action: Action) -> None:
        """Take the time, and wait until the action is done."""
        if not self._runs:
            return
        own_s, issue_s = self._now_s() - self._own_s, time.perf_counter() - self._issued_s
        super().ends(action)
        lane, (stamp, _) = self._lanes[action.stage], self._ended[action]
        waited_s = lane.seconds(self._begun[action], stamp)
        self._seconds[action].append(waited_s if lane.asynchronous else own_s)
        self._issue_s[action].append(issue_s if lane.asynchronous else 0.0)
        self._arrive()
        self._holds.end(lane, action)
        self._action = None
        self._inside_s += time.perf_counter() - self._entered_s

    def copied(
        self, move: Callable[[], Any], source: int, target: int, microbatch: int, *, backward: bool, ready: Any
    ) -> Any:
        """Return what ``move`` brings; on one device it changes hands, and is counted as if it were copied."""
        moved = super().copied(move, source, target, microbatch, backward=backward, ready=ready)
        if self._runs and self._lanes[source] is not self._lanes[target]:
            size = sum(tensor.numel() * tensor.element_size() for tensor in moved)
            self._moved[source, target, backward][microbatch] += size
            giver, taker = self._lanes[source], self._lanes[target]
            self._holds.move(giver, taker, size, of=None if backward else (target, microbatch))
        return moved

    def _arrive(self) -> None:
        """Wait for the copies that were issued since, and keep what they took."""
        for way, begun, ended in self._copies[self._known :]:
            if begun is not None:
                seconds = self._lanes[way.target].seconds(begun, ended)
                self._moving_s[way.source, way.target, way.backward].append(seconds)
        self._known = len(self._copies)

    def alone(self, schedule: Schedule, grown_bytes: Sequence[int | None] = ()) -> StagesAlone:
        """Return what was measured; ``grown_bytes`` are by lane where somebody else counted them, else empty."""
        stages = self._lanes[:-1]
        waits = any(lane.asynchronous for lane in stages)
        own = [self._holds.peak.get(lane) for lane in dict.fromkeys(stages)]
        issue_s = {action: min(times) for action, times in self._issue_s.items()}
        return StagesAlone(
            schedule,
            by_stage({action: median(times) for action, times in self._seconds.items()}, stages=schedule.stages),
            by_stage(issue_s, stages=schedule.stages) if waits else {},
            tuple(self._sent_alone()),
            median(self._once_s),
            tuple(grown_bytes or own),
            frozenset(stage for stage, lane in enumerate(stages) if not lane.asynchronous) if waits else frozenset(),
        )

    def _sent_alone(self) -> list[SentAlone]:
        pairs = sorted({(s, t) if not back else (t, s) for s, t, back in self._moved})
        return [
            SentAlone(
                producer,
                consumer,
                max(self._moved[producer, consumer, False].values(), default=0),
                max(self._moved[consumer, producer, True].values(), default=0),
                self._copy_s(producer, consumer, backward=False),
                self._copy_s(consumer, producer, backward=True),
            )
            for producer, consumer in pairs
        ]

    def _copy_s(self, source: int, target: int, *, backward: bool) -> float:
        """Return seconds per microbatch; the gradients of several values come back one by one."""
        times = self._moving_s.get((source, target, backward))
        each = len(self._moved[source, target, backward]) * (self.steps - 1)
        return fmean(times) * len(times) / each if times else 0.0


class _Holds:
    """What each lane holds, from what its device's allocator held before and after each action."""

    def __init__(self) -> None:
        self.level: dict[Lane, int] = {}
        self.peak: dict[Lane, int] = {}
        self._before: int | None = None
        self._level = 0
        self._arrived: dict[tuple[int, int], tuple[Lane, int]] = {}

    def begin(self, lane: Lane) -> None:
        """Look before an action."""
        lane.watch_peak()
        self._before, self._level = lane.held_bytes(), self.level.get(lane, 0)

    def end(self, lane: Lane, action: Action) -> None:
        """Look behind an action, whose backward lets go of what its forward was sent."""
        after, most = lane.held_bytes(), lane.peak_bytes()
        if self._before is None or after is None or most is None:
            return
        self.peak[lane] = max(self.peak.get(lane, 0), self._level + most - self._before)
        self.level[lane] = self.level.get(lane, 0) + after - self._before
        if action.kind in "BI":
            taker, size = self._arrived.pop((action.stage, action.microbatch), (lane, 0))
            self.level[taker] -= size

    def move(self, giver: Lane, taker: Lane, size: int, *, of: tuple[int, int] | None) -> None:
        """Count a copy for the lane that takes it; ``of``: the stage and microbatch that keep it until their backward.

        Between devices allocators count copies themselves. On one there is none: what a forward was sent stays the
        giver's, and would be the taker's too; a gradient goes over to the taker.
        """
        self.level[taker] = self.level.get(taker, 0) + size
        if giver.device != taker.device:
            return
        if of is None:
            self.level[giver] = self.level.get(giver, 0) - size
        else:
            _, before = self._arrived.get(of, (taker, 0))
            self._arrived[of] = taker, before + size
