"""The log of one step: when its actions began and ended, what was copied, and what devices held meanwhile.

    CPU lane      the host's clock, on the thread that runs the action
    CUDA lane     events that take the time: on the compute stream behind what a forward waits for and behind each
                  action, on the stream of incoming copies around a copy; nothing waits for them before the step ends

A log of actions ``alone`` waits after each action and each copy, so that nothing else is under way:

    host    issue 0F0 │ wait ........ │ issue 1F0 │ wait ...
    device  [ busy ][ 0F0 ]           [ busy ][ 1F0 ]            [ busy ]: until the action is issued as a whole

A device that is kept busy while an action is issued then runs it in one go: its time is the device's, and the host's
time to issue it stands beside it.

What comes out of a log is worked out in :mod:`autosplit.measured`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from autosplit.devices import Allocations
from autosplit.runtime.lanes.lanes import Lane
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.entry import Entry, Receive, Send
from autosplit.schedule.lists import Actions

MARK = "autosplit stage "
"""What the profiler's marks begin with; the stage and the microbatch follow for which something is allocated."""
_LONGER = 1.5
"""By how much a device is kept busy for longer than the action took to issue before."""
_MOST_BUSY_S = 0.5
"""For how long at most: what takes longer to issue met something else, such as a compiler."""


@dataclass(frozen=True)
class Began:
    """An action has what it takes and begins; a forward's first such event comes before it fetches its inputs."""

    action: Action
    stamp: Any
    host_s: float
    thread_s: float
    held_bytes: int | None


@dataclass(frozen=True)
class Ended:
    """An action is issued. ``done_s``: the host's time when it was also done, where the host waited for that."""

    action: Action
    stamp: Any
    host_s: float
    thread_s: float
    done_s: float
    held_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Performed:
    """A send, a receive or a sum was issued: an entry of a list that is no action."""

    entry: Entry


@dataclass(frozen=True)
class Copied:
    """Values of one microbatch went from one stage to another, or gradients back; on one device without stamps."""

    source: int
    target: int
    microbatch: int
    backward: bool
    size_bytes: int
    begun: Any
    ended: Any


@dataclass(frozen=True)
class Zero:
    """A stamp of a lane, and the host's time when it was reached: devices have clocks of their own, which meet here."""

    stamp: Any
    host_s: float

    @classmethod
    def of(cls, lane: Lane) -> Zero:
        """Wait until a lane is through with what it was given."""
        stamp = lane.stamp()
        lane.clock.seconds(stamp, stamp)
        # A lane that works when it is called reads the host's clock itself: a later look would only shift it.
        return cls(stamp, time.perf_counter() if lane.asynchronous else stamp)


class StepLog:
    """Notes what happens in one step, between :meth:`start` and :meth:`finish` only.

    Several lanes' threads may write at the same time.

    Attributes:
        in_turn: whether one thread is to issue all lanes' actions, one after the other.
        whole: why the step ran as one piece; None where it ran action by action.
        allocations: what CPU lanes allocate, under marks; None where that is not asked for. What goes from CPU lane to
            CPU lane is copied then, as between devices.
    """

    def __init__(
        self, *, alone: bool = False, issue_s: Mapping[Action, float] | None = None, allocations: bool = False
    ) -> None:
        self.alone = alone
        self.in_turn = alone or allocations
        self.allocations = Allocations() if allocations else None
        self.whole: str | None = None
        self.lanes: tuple[Lane, ...] = ()
        self.lane: Callable[[int, int], Lane] = lambda stage, _: self.lanes[stage]
        """Returns the lane that runs a microbatch of a stage."""
        self.rows: tuple[int, ...] = ()
        self.zeros: dict[Lane, Zero] = {}
        self.events: list[Began | Ended | Copied | Performed] = []
        self.before_bytes: dict[Lane, int | None] = {}
        self.peak_bytes: dict[Lane, int | None] = {}
        self.started_s = self.whole_s = 0.0
        self.loss: torch.Tensor | None = None
        self._issue_s = issue_s or {}
        self._thread_s: Callable[[], float] = time.perf_counter
        self._runs = False
        self._mark: ExitStack | None = None
        self._profiling = ExitStack()

    def start(
        self,
        lanes: Sequence[Lane],
        *,
        lane: Callable[[int, int], Lane] | None = None,
        rows: Sequence[int] = (),
        whole: str | None = None,
    ) -> None:
        """Begin, when the lanes are through with what they were given.

        ``lanes`` has one per stage and the caller's, ``rows`` those of each microbatch; ``lane`` returns that of a
        stage and a microbatch. ``whole``: why the step is going to run as one piece.
        """
        self.lanes, self.rows, self.whole = tuple(lanes), tuple(rows), whole
        self.lane = lane or self.lane
        self._thread_s = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        cells = [(stage, microbatch) for stage in range(len(lanes) - 1) for microbatch in range(len(rows))]
        every = dict.fromkeys((*lanes, *(self.lane(*cell) for cell in cells)))
        self.zeros = {each: Zero.of(each) for each in every}
        for each in every:
            each.clock.watch_peak()
        self.before_bytes = {each: each.clock.held_bytes() for each in every}
        self.started_s, self._runs = time.perf_counter(), True
        if self.allocations is not None and whole is None and any(each.device.type == "cpu" for each in lanes[:-1]):
            self._profiling.enter_context(self.allocations)
        else:
            self.allocations = None

    def finish(self, loss: torch.Tensor) -> None:
        """End, when the lanes are through with the step."""
        self._runs = False
        for lane in self.zeros:
            Zero.of(lane)
        self.peak_bytes = {lane: lane.clock.peak_bytes() for lane in self.zeros}
        self.whole_s, self.loss = time.perf_counter() - self.started_s, loss

    def close(self) -> None:
        """End the marks and the profiler, whatever became of the step."""
        self._unmark()
        self._profiling.close()

    def begins(self, action: Action) -> None:
        """Note that an action begins; of several times for the same action the last one is when it had its inputs."""
        if not self._runs:
            return
        lane = self.lane(action.stage, action.microbatch)
        if self.alone:
            lane.clock.watch_peak()
            if known := self._issue_s.get(action):
                with lane.active():
                    lane.clock.occupy(min(_LONGER * known, _MOST_BUSY_S))
        stamp, held = lane.stamp(), lane.clock.held_bytes()
        self.events.append(Began(action, stamp, time.perf_counter(), self._thread_s(), held))
        if self.allocations is not None and self._mark is None:
            self._mark = ExitStack()
            self._mark.enter_context(record_function(f"{MARK}{action.stage} {action.microbatch}"))

    def ends(self, action: Action) -> None:
        """Note that an action is issued, and wait for it where it is to run alone."""
        self._unmark()
        if not self._runs:
            return
        thread_s, lane = self._thread_s(), self.lane(action.stage, action.microbatch)
        stamp, host_s = lane.stamp(), time.perf_counter()
        if self.alone:
            lane.clock.seconds(stamp, stamp)
        done_s = time.perf_counter() if self.alone else host_s
        peak = lane.clock.peak_bytes() if self.alone else None
        self.events.append(Ended(action, stamp, host_s, thread_s, done_s, lane.clock.held_bytes(), peak))

    def note(self, entry: Entry) -> None:
        """Note that a send, a receive or a sum was issued."""
        if self._runs:
            self.events.append(Performed(entry))

    def actions(self, schedule: Schedule) -> Actions:
        """Return what every lane of a schedule performed, in its order: an action where it had its inputs and began."""
        lists: list[list[Entry]] = [[] for _ in schedule.lanes]
        last = {event.action: event for event in self.events if isinstance(event, Began)}
        for event in self.events:
            if isinstance(event, Performed):
                entry = event.entry
                microbatch = entry.route.microbatch if isinstance(entry, (Send, Receive)) else 0
                lists[schedule.lane_of(entry.stage, microbatch)].append(entry)
            elif isinstance(event, Began) and last[event.action] is event:
                lists[schedule.lane_of(event.action.stage, event.action.microbatch)].append(event.action)
        return Actions(tuple(map(tuple, lists)), "taken")

    def copied(
        self, move: Callable[[], Any], source: int, target: int, microbatch: int, *, backward: bool, ready: Any
    ) -> Any:
        """Return what ``move`` brings from one stage to another; ``ready`` is the event behind what is brought."""
        if not self._runs:
            return move()
        giver, taker = self.lane(source, microbatch), self.lane(target, microbatch)
        begun = ended = None
        if giver.device == taker.device:
            moved = move()
        else:
            taker.wait(ready)
            begun = taker.stamp(copies=True)
            moved = move()
            ended = taker.stamp(copies=True)
            if self.alone:
                taker.clock.seconds(begun, ended)
        size = sum(tensor.numel() * tensor.element_size() for tensor in moved)
        self.events.append(Copied(source, target, microbatch, backward, size, begun, ended))
        if self.allocations is None or giver is taker or {giver.device.type, taker.device.type} != {"cpu"}:
            return moved
        with record_function(f"{MARK}{target} {microbatch}"):
            return tuple(tensor.clone() for tensor in moved)

    def _unmark(self) -> None:
        """Have what is allocated from now on be nobody's until the next action."""
        if self._mark is not None:
            self._mark.close()
        self._mark = None
