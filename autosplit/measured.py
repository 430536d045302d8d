"""What the caller of a pipe is told of it: the plan's report, and what steps really did beside it.

The logs of steps tell a step's timeline, what lanes held, and what every action takes alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from autosplit.devices import Allocations
from autosplit.errors import InputError, PlanError
from autosplit.files import write_text
from autosplit.history import RecordingNote
from autosplit.planning.timeline import Bar, HeldBytes, Sent, SentAlone, StagesAlone, StepTimeline, by_stage
from autosplit.report.page import page
from autosplit.report.sections import FORMS, render
from autosplit.report.trace_file import trace_text
from autosplit.runtime.lanes.ambient import one_intra_op_thread
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.step_log import MARK, Began, Copied, Ended, Performed, StepLog
from autosplit.schedule.action import Action, Kind, Schedule
from autosplit.trace.borrowed.state import left_alone, random_state_on_refusal

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan


class Profiled:
    """The part of a pipe that reports: its plan, and the steps that were profiled."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Plan | None:
            """The plan; None before the first call when no sample was given."""

        _core: Any
        _train_step: Any

    def report(self, form: Literal["text", "markdown", "json"] = "text", *, width: int | None = None) -> str:
        """Return the partition report; what `profile_step` measured stands beside what was predicted.

        Args:
            form: "text" for a terminal, "markdown", or "json": the plan's fields, and "recorded" for what was measured.
            width: columns of a text; None: 120.

        Raises:
            InputError: there is no such form.
        """
        if form not in FORMS:
            raise InputError(f"form={form!r} is none of {', '.join(map(repr, FORMS))}")
        if self.plan is None:
            return "not planned yet: the pipe plans itself on its first call, or give autosplit a sample="
        text = render(self.plan, form, width=width, measured=self._core.measured)
        return text + str(self._core.recordings.notes()) + self._core.stream.text if form == "text" else text

    @property
    def recordings(self) -> tuple[RecordingNote, ...]:
        """The recordings of the model so far, each with ``reason``, ``way_out``, ``time_s``; a line when printed."""
        return tuple(self._core.recordings.history.notes)

    @property
    def draws_as_model(self) -> bool:
        """Whether random operations draw the plain model's own numbers, in the kind of call that was prepared last."""
        return self._core.options.rng == "plain" and not self._core.off_tape

    @property
    def profiled(self) -> StepTimeline | None:
        """The times of the step that was profiled last, and the bytes that were counted last; None before."""
        measured: StepTimeline | None = self._core.measured
        return measured

    def profile_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Any = None,
        loss_reduction: str = "auto",
        memory: bool = False,
        **kwargs: Any,
    ) -> StepTimeline:
        """Run a training step as `train_step` does, to every bit, and return when each action and transfer ran.

        The host waits for all devices before the first action and behind the last. What a kind of step needs the first
        time (recording it, a proof of its loss) is not in the times. :meth:`report`, :meth:`save_trace` and
        :meth:`save_page` put what was found beside the plan.

        CUDA devices tell the most bytes that they held, by their allocator's peak, which is reset. With ``memory`` CPU
        lanes do too: one thread runs them in turn under torch's profiler, and what goes from lane to lane is copied, as
        between devices. The times are then not a step's.
        """
        with random_state_on_refusal(), contextlib.closing(StepLog(allocations=memory)) as log:
            self._train_step(args, kwargs, target, loss_fn, loss_reduction, log)
        step = timeline(log, self._planned().schedule_for(len(log.rows) or 1))
        self._core.measured = _together(self._core.measured, step)
        return step

    def profile_stages(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Any = None,
        loss_reduction: str = "auto",
        repeats: int = 3,
        memory: bool = False,
        **kwargs: Any,
    ) -> StagesAlone:
        """Run a training step's actions each alone on its device, and return what they take.

        One thread issues them in the schedule's order and waits for each; every action runs ``repeats`` times after a
        first time that does not count. From that `StagesAlone` predicts the step: with every lane on a device of its
        own, or all on one. So one device tells what several would do. ``memory`` counts what CPU lanes allocate, in a
        step more; CUDA devices count by themselves. Gradients, buffers and the random state are left as they were.

        Raises:
            InputError: the step does not run action by action, and why; ``repeats`` is below 1.
        """
        if repeats < 1:
            raise InputError(f"repeats={repeats} measures nothing; give 1 or more")
        logs: list[StepLog] = []
        threaded = self._core.options.lanes == "threads"
        with left_alone(self._core.model, (args, kwargs, target, loss_fn)), one_intra_op_thread(only=threaded):
            for number in range(repeats + 1 + memory):
                counts = number > repeats
                log = StepLog(alone=not counts, issue_s=least_issue_s(logs), allocations=counts)
                with contextlib.closing(log):
                    self._train_step(args, kwargs, target, loss_fn, loss_reduction, log)
                logs.append(log)
        if log.whole is not None:
            raise InputError(f"the step does not run action by action, so no stage runs alone: {log.whole}")
        schedule = self._planned().schedule_for(len(log.rows))
        grown = lane_memory(logs.pop(), schedule) if memory else ()
        return stages_alone(logs, schedule, [None if held is None else held.grown_bytes for held in grown])

    def save_trace(self, path: str | Path, measured: StepTimeline | None = None) -> None:
        """Write the plan's step as a file for Perfetto (Chrome's trace format), beside the step that was profiled last.

        Raises OSError, and PlanError where nothing is planned yet.
        """
        write_text(path, trace_text(self._planned(), measured or self._core.measured))

    def save_page(self, path: str | Path, measured: StepTimeline | None = None) -> None:
        """Write the plan as one HTML page that needs nothing but a browser, beside the step that was profiled last.

        Raises OSError, and PlanError where nothing is planned yet.
        """
        write_text(path, page(self._planned(), measured=measured or self._core.measured))

    def _planned(self) -> Plan:
        if self.plan is None:
            raise PlanError("there is no plan yet: call the pipe first, or give autosplit a sample=")
        return self.plan


def _together(before: StepTimeline | None, step: StepTimeline) -> StepTimeline:
    """Return the times of the last step that was timed with the bytes of the last one in which they were counted."""
    if before is None:
        return step
    if not step.timed:
        return replace(before, memory=step.memory) if before.timed else step
    return step if step.memory else replace(step, memory=before.memory)


def timeline(log: StepLog, schedule: Schedule) -> StepTimeline:
    """Return a step; ``schedule`` has the numbers of its lanes. Seconds count from its first action."""
    first, last, ends = _actions(log)
    lanes = {a: log.lane(a.stage, a.microbatch) for a in ends}
    times = {a: (_host_s(log, lanes[a], last[a].stamp), _host_s(log, lanes[a], ends[a].stamp)) for a in ends}
    first_s = min((begun for begun, _ in times.values()), default=log.started_s)
    last_s = max((end for _, end in times.values()), default=log.started_s + log.whole_s)
    bars = [
        Bar(
            schedule.lane_of(a.stage, a.microbatch),
            a.stage,
            a.kind,
            a.microbatch,
            begun - first_s,
            end - first_s,
            held_bytes=ends[a].held_bytes,
            issue_s=ends[a].host_s - first[a].host_s if lanes[a].asynchronous else None,
        )
        for a, (begun, end) in times.items()
    ]
    sent = _sent(log, {action: end - first_s for action, (_, end) in times.items()}, first_s, schedule)
    return StepTimeline(
        tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.lane, bar.end_s))),
        tuple(sorted(sent, key=lambda copy: (copy.start_s, copy.source, copy.target))),
        last_s - first_s,
        measured=True,
        once_s=max(0.0, log.whole_s - (last_s - first_s)),
        loss=None if log.loss is None else float(log.loss),
        whole=log.whole,
        memory=lane_memory(log, schedule),
        rows=log.rows,
        timed=not log.in_turn,
        actions=log.actions(schedule),
    )


def lane_memory(log: StepLog, schedule: Schedule) -> tuple[HeldBytes | None, ...]:
    """Return what each lane's device held: as the log counted on the CPU, as the device's allocator did elsewhere.

    Nothing where nobody counted.
    """
    if not log.lanes:  # a replica without rows
        return ()
    held: list[HeldBytes | None] = [None] * len(schedule.lanes)
    grown = {} if log.allocations is None else _allocated_bytes(log.allocations, schedule)
    for number, lane in _lanes(log, schedule).items():
        before, peak = log.before_bytes.get(lane), log.peak_bytes.get(lane)
        if before is not None and peak is not None:
            held[number] = HeldBytes(before, peak - before)
        elif log.allocations is not None and lane.device.type == "cpu":
            held[number] = HeldBytes(None, grown.get(number, 0))
    return tuple(held) if any(held) else ()


def _lanes(log: StepLog, schedule: Schedule) -> dict[int, Lane]:
    """Return the lanes by their numbers."""
    cells = ((s, microbatch) for s in range(schedule.stages) for microbatch in range(schedule.microbatches))
    return dict(sorted({schedule.lane_of(*cell): log.lane(*cell) for cell in cells}.items()))


def least_issue_s(logs: Iterable[StepLog]) -> dict[Action, float]:
    """Return how long actions take to issue: the least of several steps, since a full queue makes a host wait."""
    least: dict[Action, float] = {}
    for log in logs:
        _, last, ends = _actions(log)
        for action, end in ends.items():
            waits = log.lane(action.stage, action.microbatch).asynchronous
            issue_s = end.host_s - last[action].host_s if waits else 0.0
            least[action] = min(least.get(action, issue_s), issue_s)
    return least


def stages_alone(logs: Sequence[StepLog], schedule: Schedule, grown_bytes: Sequence[int | None] = ()) -> StagesAlone:
    """Return what actions took that ran alone; the first of the steps warmed up and counts for issue times only.

    ``grown_bytes`` are by lane where somebody else counted them, else empty.
    """
    *stages, _ = logs[0].lanes
    waits = any(lane.asynchronous for lane in stages)
    seconds: dict[Action, list[float]] = defaultdict(list)
    once_s = []
    for log in logs[1:]:
        first, last, ends = _actions(log)
        for action, end in ends.items():
            lane, begun = log.lane(action.stage, action.microbatch), last[action]
            own_s = end.thread_s - begun.thread_s
            seconds[action].append(lane.clock.seconds(begun.stamp, end.stamp) if lane.asynchronous else own_s)
        once_s.append(max(0.0, log.whole_s - sum(end.done_s - first[action].host_s for action, end in ends.items())))
    held = _held_peaks(logs)
    return StagesAlone(
        schedule,
        by_stage({action: median(times) for action, times in seconds.items()}, stages=schedule.stages),
        by_stage(least_issue_s(logs), stages=schedule.stages) if waits else {},
        tuple(_sent_alone(logs[1:])),
        median(once_s),
        tuple(grown_bytes or [held.get(lane) for lane in _lanes(logs[0], schedule).values()]),
        frozenset(stage for stage, lane in enumerate(stages) if not lane.asynchronous) if waits else frozenset(),
    )


def _actions(log: StepLog) -> tuple[dict[Action, Began], dict[Action, Began], dict[Action, Ended]]:
    """Return by action its first and its last beginning, and its end."""
    begins = [event for event in log.events if isinstance(event, Began)]
    first = {event.action: event for event in reversed(begins)}
    last = {event.action: event for event in begins}
    return first, last, {event.action: event for event in log.events if isinstance(event, Ended)}


def _ends(log: StepLog, copy: Copied) -> tuple[Lane, Lane]:
    return log.lane(copy.source, copy.microbatch), log.lane(copy.target, copy.microbatch)


def _copies(log: StepLog) -> list[Copied]:
    return [event for event in log.events if isinstance(event, Copied)]


def _host_s(log: StepLog, lane: Lane, stamp: Any) -> float:
    zero = log.zeros[lane]
    return zero.host_s + lane.clock.seconds(zero.stamp, stamp)


def _sent(log: StepLog, ends: Mapping[Action, float], first_s: float, schedule: Schedule) -> list[Sent]:
    """Return what went from lane to lane; tensors that went the same way are one, as they travel together."""
    spans: dict[tuple[int, int, int, bool], tuple[float, float]] = {}
    for copy in _copies(log):
        source, target = (schedule.lane_of(stage, copy.microbatch) for stage in (copy.source, copy.target))
        if source == target:
            continue
        if copy.begun is None:
            kinds: tuple[Kind, ...] = ("I", "B") if copy.backward else ("F",)
            producers = [Action(copy.source, kind, copy.microbatch) for kind in kinds]
            start_s = end_s = next((ends[action] for action in producers if action in ends), 0.0)
        else:
            _, lane = _ends(log, copy)
            start_s, end_s = (_host_s(log, lane, stamp) - first_s for stamp in (copy.begun, copy.ended))
        key = copy.source, copy.target, copy.microbatch, copy.backward
        low, high = spans.get(key, (start_s, end_s))
        spans[key] = min(low, start_s), max(high, end_s)
    return [Sent(*key, *span) for key, span in spans.items()]


def _sent_alone(logs: Sequence[StepLog]) -> list[SentAlone]:
    """Return bytes and seconds per microbatch between stages; the gradients of several values come back one by one."""
    sizes: dict[tuple[int, int, int, bool], int] = defaultdict(int)
    times: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for log in logs:
        for copy in _copies(log):
            giver, taker = _ends(log, copy)
            if giver is not taker:
                sizes[copy.source, copy.target, copy.microbatch, copy.backward] += copy.size_bytes
            if copy.begun is not None:
                times[copy.source, copy.target, copy.backward].append(taker.clock.seconds(copy.begun, copy.ended))

    def most_bytes(*route: Any) -> int:
        return max((size for (s, t, _, back), size in sizes.items() if (s, t, back) == route), default=0) // len(logs)

    def copy_s(*route: Any) -> float:
        microbatches = sum((s, t, back) == route for s, t, _, back in sizes)
        return fmean(times[route]) * len(times[route]) / (microbatches * len(logs)) if route in times else 0.0

    pairs = sorted({(t, s) if back else (s, t) for s, t, _, back in sizes})
    return [
        SentAlone(
            producer,
            consumer,
            most_bytes(producer, consumer, False),
            most_bytes(consumer, producer, True),
            copy_s(producer, consumer, False),
            copy_s(consumer, producer, True),
        )
        for producer, consumer in pairs
    ]


def _held_peaks(logs: Iterable[StepLog]) -> dict[Lane, int]:
    """Return the most bytes of its own that each lane held in steps whose actions ran alone.

    They are what its device's allocator held before and after each action, and what it was sent. Between devices
    allocators count copies themselves. On one there is none: what a forward was sent stays the giver's, and would be
    the taker's too until its backward; a gradient goes over to the taker.
    """
    peaks: dict[Lane, int] = {}
    for log in logs:
        level: dict[Lane, int] = defaultdict(int)
        arrived: dict[tuple[int, int], int] = defaultdict(int)
        began: tuple[int | None, int] = (None, 0)
        for event in log.events:
            if isinstance(event, Copied):
                giver, taker = _ends(log, event)
                if giver is taker:
                    continue
                level[taker] += event.size_bytes
                if giver.device == taker.device and event.backward:
                    level[giver] -= event.size_bytes
                elif giver.device == taker.device:
                    arrived[event.target, event.microbatch] += event.size_bytes
            if isinstance(event, (Copied, Performed)):
                continue
            lane, before = log.lane(event.action.stage, event.action.microbatch), began[0]
            if isinstance(event, Began):
                began = event.held_bytes, level[lane]
            elif before is not None and event.held_bytes is not None and event.peak_bytes is not None:
                peaks[lane] = max(peaks.get(lane, 0), began[1] + event.peak_bytes - before)
                level[lane] += event.held_bytes - before
                if event.action.kind in "BI":
                    level[lane] -= arrived.pop((event.action.stage, event.action.microbatch), 0)
    return peaks


def _allocated_bytes(run: Allocations, schedule: Schedule) -> dict[int, int]:
    """Return by lane the most bytes that it had at once: of blocks that its actions, and copies to it, allocated.

    lane 0   ──[0F0]──────[0F1]────────────[0B0]──      its own blocks, from the first action on
    lane 1   ────────[1F0]─────[1F1][1B0]─────────      the innermost mark says whose a block is
    """
    owner: list[int | None] = [None] * len(run.changes)
    marks = [operation for operation in run.operations if operation.name.startswith(MARK)]
    for mark in sorted(marks, key=lambda operation: operation.depth):
        lane = schedule.lane_of(*map(int, mark.name.removeprefix(MARK).split()))
        owner[mark.first : mark.last] = [lane] * (mark.last - mark.first)
    lane_of: dict[int, int | None] = {}
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    for index, (block, size) in enumerate(run.changes):
        held_by = lane_of.setdefault(block, owner[index])
        if held_by is not None:
            live[held_by] = live.get(held_by, 0) + size
            most[held_by] = max(most.get(held_by, 0), live[held_by])
    return most
