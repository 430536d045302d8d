"""When each action of a schedule starts and ends, from the times of its stages and transfers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autosplit.schedule.action import KINDS, Action, Kind, Rows, Schedule


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TransferTime:
    """How long the values between two stages travel, per microbatch: forward, and their gradients back."""

    producer: int
    consumer: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class LaneTime:
    """One device on the clock: when its first action starts and its last one ends, and how long it works between."""

    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        step_s: its length.
        bubble: the idle fraction over all its devices.
        spans: every action's span, in issue order.
        lanes: what each device does.
        host_s: how long the thread that issues every lane's actions issues; it waits for nothing.
    """

    step_s: float
    bubble: float
    spans: tuple[Span, ...]
    lanes: tuple[LaneTime, ...]
    host_s: float = 0.0


def simulate(
    schedule: Schedule,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    input_gradient_s: Sequence[float] | None = None,
    weight_gradient_s: Sequence[float] | None = None,
    transfers: tuple[TransferTime, ...] = (),
    issue_s: Mapping[Kind, Sequence[float]] | None = None,
    host_stages: Collection[int] = (),
) -> Timeline:
    """Return the timeline from one microbatch's times of each stage, virtual ones too.

    ``forward_s[stage]`` is F's time, ``backward_s`` B's, ``input_gradient_s`` I's and ``weight_gradient_s`` W's; the
    kinds that the schedule does not use may be left out. A transfer takes no lane time; it only delays its consumer,
    and there is none between stages on one lane. An action starts when its lane is free and all that it needs has
    ended and arrived. Raises ValueError when times of a kind that the schedule uses are missing.

    ``issue_s[kind][stage]`` is how long one host thread takes to issue an action, for all lanes, in the order of
    ``schedule.issue_order``; it does not wait for lanes, and no action starts before it is issued. The actions of
    ``host_stages`` it runs itself, when what they need is there.
    """
    duration = _durations(schedule, (forward_s, backward_s, input_gradient_s, weight_gradient_s))
    delays = _delays(schedule, transfers)
    order = schedule.issue_order
    starts, ends, issued = _clocked(schedule, duration, delays, issue_s, host_stages)
    spans = tuple(map(Span, order, starts, ends))
    lanes = _lane_times(schedule, spans, duration)
    step_s = max(ends, default=0.0)
    busy_s = sum(duration[span.action.kind][span.action.stage] for span in spans)
    bubble = 1.0 - busy_s / (step_s * len(lanes)) if step_s else 0.0
    return Timeline(
        step_s=step_s,
        bubble=bubble,
        spans=spans,
        lanes=lanes,
        host_s=max(issued, default=0.0),
    )


def simulate_step_s(
    schedule: Schedule,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    input_gradient_s: Sequence[float] | None = None,
    weight_gradient_s: Sequence[float] | None = None,
    transfers: tuple[TransferTime, ...] = (),
) -> float:
    """Return the length of the step that `simulate` would return the timeline of, without its spans."""
    duration = _durations(schedule, (forward_s, backward_s, input_gradient_s, weight_gradient_s))
    return max(_clocked(schedule, duration, _delays(schedule, transfers))[1], default=0.0)


def _clocked(
    schedule: Schedule,
    duration: Mapping[Kind, Sequence[float]],
    delays: _Delays,
    issue_s: Mapping[Kind, Sequence[float]] | None = None,
    host_stages: Collection[int] = (),
) -> tuple[list[float], list[float], list[float]]:
    """Return when each action starts, ends, and was issued, where that takes time; in issue order."""
    rows = schedule.rows
    takes = [duration.get(kind, ()) for kind in KINDS]
    issue = [() if issue_s is None else issue_s.get(kind, ()) for kind in KINDS]
    coming = [_sources(rows, delays, kind, schedule.stages) for kind in KINDS]
    free, host_s, starts, issued = [0.0] * len(schedule.lanes), 0.0, list[float](), list[float]()
    ends = [0.0] * (len(rows.ticks) + 1)
    actions = zip(rows.stages, rows.kinds, rows.microbatches, rows.own, rows.near, strict=True)
    for row, (stage, kind, microbatch, own, near) in enumerate(actions):
        if issue_s is not None:
            host_s += 0.0 if stage in host_stages else issue[kind][stage]
            issued.append(host_s)
        lane = schedule.lane_of(stage, microbatch)
        start_s = max(free[lane], ends[own], ends[near], host_s)
        for source, delay_s in coming[kind][stage]:
            if (arrived_s := ends[source[microbatch]] + delay_s) > start_s:
                start_s = arrived_s
        starts.append(start_s)
        free[lane] = ends[row] = start_s + takes[kind][stage]
        if stage in host_stages:
            host_s = ends[row]
    return starts, ends[:-1], issued


def _sources(rows: Rows, delays: _Delays, kind: Kind, stages: int) -> list[list[tuple[list[int], float]]]:
    """Return for each stage the rows, by microbatch, of what actions of a kind wait for, and how long it travels."""
    if kind == "W":
        return [[] for _ in range(stages)]
    way, of = ("forward", rows.forward) if kind == "F" else ("back", rows.gradient)
    return [[(of[delay.stage], delay.seconds) for delay in delays.get((way, stage), ())] for stage in range(stages)]


def _durations(schedule: Schedule, times: Sequence[Sequence[float] | None]) -> dict[Kind, Sequence[float]]:
    given = {kind: seconds for kind, seconds in zip(KINDS, times, strict=True) if seconds is not None}
    missing = sorted(schedule.kinds - given.keys())
    if missing:
        names = {"B": "backward_s", "I": "input_gradient_s", "W": "weight_gradient_s"}
        raise ValueError(
            f"schedule {schedule.name!r} has actions of kind {' and '.join(missing)}; "
            f"give {' and '.join(names[kind] for kind in missing)}"
        )
    return given


def _lane_times(
    schedule: Schedule, spans: Sequence[Span], duration: Mapping[Kind, Sequence[float]]
) -> tuple[LaneTime, ...]:
    of_lane: list[list[Span]] = [[] for _ in schedule.lanes]
    for span in spans:
        of_lane[schedule.lane_of(span.action.stage, span.action.microbatch)].append(span)
    return tuple(
        LaneTime(
            start_s=own[0].start_s if own else 0.0,
            end_s=own[-1].end_s if own else 0.0,
            busy_s=sum(duration[span.action.kind][span.action.stage] for span in own),
        )
        for own in of_lane
    )


@dataclass(frozen=True)
class _Delay:
    """How long values from another stage travel, forward or back."""

    stage: int
    seconds: float


_Delays = dict[tuple[str, int], list[_Delay]]


def _delays(schedule: Schedule, transfers: tuple[TransferTime, ...]) -> _Delays:
    """Map (direction, waiting stage) to the stages of other lanes that it waits for."""
    delays: _Delays = {}
    for transfer in transfers:
        if not 0 <= transfer.producer < transfer.consumer:
            raise ValueError(f"a transfer goes to a later stage, not from {transfer.producer} to {transfer.consumer}")
        if schedule.stage_lane[transfer.producer] != schedule.stage_lane[transfer.consumer]:
            forward, back = (
                _Delay(transfer.producer, transfer.forward_s),
                _Delay(transfer.consumer, transfer.backward_s),
            )
            delays.setdefault(("forward", transfer.consumer), []).append(forward)
            delays.setdefault(("back", transfer.producer), []).append(back)
    return delays
