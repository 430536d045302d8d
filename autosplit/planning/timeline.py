"""A step on the clock, as bars: predicted from a plan alone, or recorded while it ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from autosplit.planning.plan.plan import Plan
from autosplit.schedule.action import Action, Kind
from autosplit.schedule.simulate import TransferTime, simulate, simulate_step_s

Found = TypeVar("Found")


@dataclass(frozen=True)
class Bar:
    """One action on its lane; seconds from the start of the step."""

    lane: int
    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float
    held_bytes: int | None = None
    """Bytes that tensors had on its device when it was issued; None where that was predicted or is not counted."""
    issue_s: float | None = None
    """How long the host took to issue it, measured; None where it was predicted, or the lane's thread is the device."""


@dataclass(frozen=True)
class Sent:
    """Values of one microbatch on their way from one stage to another, forward, or gradients back."""

    source: int
    target: int
    microbatch: int
    backward: bool
    start_s: float
    end_s: float


@dataclass(frozen=True)
class HeldBytes:
    """What a lane's device held in a recorded step.

    Attributes:
        before_bytes: what tensors had on it before the step, the caller's own too; None where nobody counts them.
        grown_bytes: the most that they had above that during the step.
    """

    before_bytes: int | None
    grown_bytes: int


@dataclass(frozen=True)
class StepTimeline:
    """What every lane does over a step.

    ``step_s`` is the length of the step that the bars are of, without what runs once per step beside them.

    Attributes:
        once_s: measured: how long the step took beside its bars, before the first and behind the last.
        loss: measured: the loss of the step.
        whole: measured: why the step ran as one piece, so that it has no bars or forwards and then backwards.
        memory: measured: what each lane's device held; None where nobody counts that. Lanes of one device have the
            same.
        rows: measured: the rows of its microbatches.
        timed: measured: whether its times are a step's; not where one thread ran the lanes in turn to count bytes.
    """

    bars: tuple[Bar, ...]
    sent: tuple[Sent, ...]
    step_s: float
    measured: bool
    once_s: float = 0.0
    loss: float | None = None
    whole: str | None = None
    memory: tuple[HeldBytes | None, ...] = ()
    rows: tuple[int, ...] = ()
    timed: bool = True


def predicted_step_s(plan: Plan) -> float:
    """Return the length of the simulated step of a plan."""
    return simulated(plan, simulate_step_s)


def simulated(plan: Plan, run: Callable[..., Found]) -> Found:
    """Return what a simulation, given the schedule and times of a plan, finds."""
    return run(
        plan.schedule_for(len(plan.microbatch_rows)),
        forward_s=[stage.forward_s for stage in plan.stages],
        backward_s=[stage.backward_s for stage in plan.stages],
        input_gradient_s=[stage.backward_s - stage.weight_s for stage in plan.stages],
        weight_gradient_s=[stage.weight_s for stage in plan.stages],
        transfers=_travels(plan),
    )


def _travels(plan: Plan) -> tuple[TransferTime, ...]:
    return tuple(TransferTime(t.producer, t.consumer, t.forward_s, t.backward_s) for t in plan.transfers)


def predicted(plan: Plan) -> StepTimeline:
    """Return the simulated step of a plan, from what the plan holds and nothing else."""
    schedule, found = plan.schedule_for(len(plan.microbatch_rows)), simulated(plan, simulate)
    bars = tuple(
        Bar(schedule.lane_of(stage, microbatch), stage, kind, microbatch, span.start_s, span.end_s)
        for span in found.spans
        for stage, kind, microbatch in (span.action,)
    )
    ends = {span.action: span.end_s for span in found.spans}
    sent = []
    microbatches = schedule.microbatches
    for time in _travels(plan):
        for microbatch in range(microbatches):
            if schedule.lane_of(time.producer, microbatch) == schedule.lane_of(time.consumer, microbatch):
                continue
            ready_s = ends[Action(time.producer, "F", microbatch)]
            sent.append(Sent(time.producer, time.consumer, microbatch, False, ready_s, ready_s + time.forward_s))
            back = schedule.input_gradient(time.consumer, microbatch)
            if back in ends:
                ready_s = ends[back]
                sent.append(Sent(time.consumer, time.producer, microbatch, True, ready_s, ready_s + time.backward_s))
    return StepTimeline(bars, tuple(sent), found.step_s, measured=False)
