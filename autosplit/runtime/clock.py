"""When the actions of one step ran, by the clocks of their lanes.

    CPU lane      the host's clock, on the thread that runs the action
    CUDA lane     events that take the time: on the compute stream behind what a forward waits for and behind each
                  action, on the stream of incoming copies around a copy; nothing waits for them before the step ends

Devices have clocks of their own. They meet before the first action: the host waits for a stamp of every lane and looks
at its own clock when that is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autosplit.planning.timeline import Bar, HeldBytes, Sent, StepTimeline
from autosplit.runtime.lanes import Lane
from autosplit.schedule.action import Action, Kind


@dataclass(frozen=True)
class _Way:
    """One microbatch's values from one stage to another, or gradients back."""

    source: int
    target: int
    microbatch: int
    backward: bool


@dataclass(frozen=True)
class _Zero:
    """A stamp of a lane, and the host's time when it was reached."""

    stamp: Any
    host_s: float

    @classmethod
    def of(cls, lane: Lane) -> _Zero:
        stamp = lane.stamp()
        lane.seconds(stamp, stamp)
        # A lane that works when it is called reads the host's clock itself: a later look would only shift it.
        return cls(stamp, time.perf_counter() if lane.asynchronous else stamp)


class StepClock:
    """Takes the time of one step's actions and copies; it looks on between :meth:`start` and :meth:`finish` only.

    Several lanes' threads call it at the same time: each writes under its own actions.
    """

    in_turn = False
    """Whether one thread is to issue all lanes' actions, one after the other."""

    def __init__(self) -> None:
        self._whole: str | None = None
        self._lanes: tuple[Lane, ...] = ()
        self._zeros: dict[Lane, _Zero] = {}
        self._begun: dict[Action, Any] = {}
        self._ended: dict[Action, tuple[Any, int | None]] = {}
        self._issue_began: dict[Action, float] = {}
        self._issued: dict[Action, float] = {}
        self._copies: list[tuple[_Way, Any, Any]] = []
        self._before: dict[Lane, int | None] = {}
        self._peaks: dict[Lane, int | None] = {}
        self._started_s = self._whole_s = 0.0
        self._loss: torch.Tensor | None = None
        self._rows: tuple[int, ...] = ()
        self._runs = False

    def start(self, lanes: Sequence[Lane], *, rows: Sequence[int] = ()) -> None:
        """Begin: ``lanes`` has one per stage and the caller's, ``rows`` those of each microbatch.

        The host waits until they are through with what they were given.
        """
        self._lanes, self._rows = tuple(lanes), tuple(rows)
        self._zeros = {lane: _Zero.of(lane) for lane in self._lanes}
        for lane in self._zeros:
            lane.watch_peak()
        self._before = {lane: lane.held_bytes() for lane in self._zeros}
        self._started_s, self._runs = time.perf_counter(), True

    def finish(self, loss: torch.Tensor) -> None:
        """End, when the lanes are through with the step."""
        self._runs = False
        for lane in self._zeros:
            _Zero.of(lane)
        self._peaks = {lane: lane.peak_bytes() for lane in self._zeros}
        self._whole_s, self._loss = time.perf_counter() - self._started_s, loss

    def start_whole(self, lanes: Sequence[Lane], why: str) -> None:
        """Begin as :meth:`start` does; the step will run as one piece, for the reason given."""
        self._whole = why
        self.start(lanes)

    def close(self) -> None:
        """End what the clock itself has under way, whatever became of the step: nothing here."""

    # -- what the cells tell -------------------------------------------------------------------------------------
    def begins(self, action: Action) -> None:
        """Take the time at which an action begins; a later call for the same action counts."""
        if self._runs:
            self._issue_began.setdefault(action, time.perf_counter())
            self._begun[action] = self._lanes[action.stage].stamp()

    def ends(self, action: Action) -> None:
        """Take the time at which an action ends, and the bytes that its device holds."""
        if self._runs:
            lane = self._lanes[action.stage]
            self._ended[action] = lane.stamp(), lane.held_bytes()
            if lane.asynchronous:
                self._issued[action] = time.perf_counter() - self._issue_began[action]

    def copied(
        self, move: Callable[[], Any], source: int, target: int, microbatch: int, *, backward: bool, ready: Any
    ) -> Any:
        """Return what ``move`` brings from one stage to another; ``ready`` is the event behind what is brought."""
        giver, taker = self._lanes[source] if self._runs else None, self._lanes[target] if self._runs else None
        if giver is None or taker is None:
            return move()
        way = _Way(source, target, microbatch, backward)
        if giver.device == taker.device:
            self._copies.append((way, None, None))
            return move()
        taker.wait(ready)
        begun = taker.stamp(copies=True)
        moved = move()
        self._copies.append((way, begun, taker.stamp(copies=True)))
        return moved

    # -- what came out -------------------------------------------------------------------------------------------
    def timeline(self, stage_lane: Sequence[int]) -> StepTimeline:
        """Return the step; ``stage_lane`` has the number of each stage's lane. Seconds count from its first action."""
        times = {
            action: (self._host_s(action.stage, self._begun[action]), self._host_s(action.stage, end))
            for action, (end, _) in self._ended.items()
        }
        first_s = min((begun for begun, _ in times.values()), default=self._started_s)
        last_s = max((end for _, end in times.values()), default=self._started_s + self._whole_s)
        bars = [
            Bar(
                stage_lane[a.stage],
                a.stage,
                a.kind,
                a.microbatch,
                begun - first_s,
                end - first_s,
                held_bytes=self._ended[a][1],
                issue_s=self._issued.get(a),
            )
            for a, (begun, end) in times.items()
        ]
        sent = self._sent({action: end - first_s for action, (_, end) in times.items()}, first_s, stage_lane)
        return StepTimeline(
            tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.lane, bar.end_s))),
            tuple(sorted(sent, key=lambda way: (way.start_s, way.source, way.target))),
            last_s - first_s,
            measured=True,
            once_s=max(0.0, self._whole_s - (last_s - first_s)),
            loss=None if self._loss is None else float(self._loss),
            whole=self._whole,
            memory=self.memory(stage_lane),
            rows=self._rows,
        )

    def memory(self, stage_lane: Sequence[int]) -> tuple[HeldBytes | None, ...]:
        """Return what each lane's device held, as its allocator counts it; nothing where no device's does."""
        found: list[HeldBytes | None] = [None] * (max(stage_lane) + 1)
        for number, lane in zip(stage_lane, self._lanes, strict=False):
            before, peak = self._before.get(lane), self._peaks.get(lane)
            if before is not None and peak is not None:
                found[number] = HeldBytes(before, peak - before)
        return tuple(found) if any(found) else ()

    def _host_s(self, stage: int, stamp: Any) -> float:
        lane = self._lanes[stage]
        zero = self._zeros[lane]
        return zero.host_s + lane.seconds(zero.stamp, stamp)

    def _sent(self, ends: dict[Action, float], first_s: float, stage_lane: Sequence[int]) -> list[Sent]:
        """Return what went from lane to lane; tensors that went the same way are one, as they travel together."""
        spans: dict[_Way, tuple[float, float]] = {}
        for way, begun, ended in self._copies:
            if stage_lane[way.source] == stage_lane[way.target]:
                continue
            if begun is None:
                kinds: tuple[Kind, ...] = ("I", "B") if way.backward else ("F",)
                made = [Action(way.source, kind, way.microbatch) for kind in kinds]
                start_s = end_s = next((ends[action] for action in made if action in ends), 0.0)
            else:
                start_s, end_s = (self._host_s(way.target, stamp) - first_s for stamp in (begun, ended))
            low, high = spans.get(way, (start_s, end_s))
            spans[way] = min(low, start_s), max(high, end_s)
        return [Sent(w.source, w.target, w.microbatch, w.backward, *span) for w, span in spans.items()]


class Whole(NamedTuple):
    """The clock of a step that runs as one piece, and why it does."""

    clock: StepClock
    why: str

    @classmethod
    def of(cls, clock: StepClock | None, why: str) -> Whole | None:
        """Return both, None where nobody asked for times."""
        return None if clock is None else cls(clock, why)
