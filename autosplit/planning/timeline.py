"""A step on the clock: predicted from a plan, recorded while it ran, or put together from stages measured alone.

The last is a digital twin of a step that this machine may be too small to run:

    stage 0 alone   F 1.9 ms  B 3.8 ms ─┐
    stage 1 alone   F 2.0 ms  B 4.1 ms ─┼─► simulate ─► the step on devices of their own, or of all on one
    copies alone    0─►1 0.1 ms        ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autosplit.planning.plan.plan import Plan
from autosplit.schedule.action import Action, Kind, Schedule
from autosplit.schedule.lists import Actions
from autosplit.schedule.simulate import Timeline, TransferTime, simulate


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
        actions: what every lane performed, measured, or is going to: `Plan.actions`.
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
    actions: Actions | None = None


def simulated(plan: Plan, *, issue_s: Mapping[Kind, Sequence[float]] | None = None) -> Timeline:
    """Return the simulated step of a plan; ``issue_s`` is how long a host issues the actions, where it is to count.

    Of processes each issues its own device's.
    """
    return simulate(
        plan.schedule_for(len(plan.microbatch_rows)),
        forward_s=[stage.forward_s for stage in plan.stages],
        backward_s=[stage.backward_s for stage in plan.stages],
        input_gradient_s=[stage.backward_s - stage.weight_s for stage in plan.stages],
        weight_gradient_s=[stage.weight_s for stage in plan.stages],
        transfers=[TransferTime(**dict(transfer)) for transfer in plan.transfers],
        issue_s=issue_s,
        own_hosts=plan.processes,
    )


def predicted(plan: Plan) -> StepTimeline:
    """Return the simulated step of a plan, from what the plan holds and nothing else."""
    timeline = simulated(plan)
    schedule = timeline.schedule
    bars = tuple(
        Bar(schedule.lane_of(stage, microbatch), stage, kind, microbatch, span.start_s, span.end_s)
        for span in timeline.spans
        for stage, kind, microbatch in (span.action,)
    )
    ends = {span.action: span.end_s for span in timeline.spans}
    sent = []
    microbatches = schedule.microbatches
    for time in plan.transfers:
        for microbatch in range(microbatches):
            if schedule.lane_of(time.producer, microbatch) == schedule.lane_of(time.consumer, microbatch):
                continue
            ready_s = ends[Action(time.producer, "F", microbatch)]
            sent.append(Sent(time.producer, time.consumer, microbatch, False, ready_s, ready_s + time.forward_s))
            back = schedule.input_gradient(time.consumer, microbatch)
            if back in ends and time.producer in schedule.differentiated:
                ready_s = ends[back]
                sent.append(Sent(time.consumer, time.producer, microbatch, True, ready_s, ready_s + time.backward_s))
    return StepTimeline(bars, tuple(sent), timeline.step_s, measured=False, actions=plan.actions)


def host_step(plan: Plan) -> Timeline | None:
    """Return the simulated step whose kernels host threads issue, in the order of the schedule.

    None where nothing is known of how long that takes, or lanes issue for themselves.
    """
    if not any(stage.forward_issue_s or stage.backward_issue_s for stage in plan.stages):
        return None
    sharing = 1 if plan.processes else plan.issue_threads
    there = [stage.forward_issue_s / sharing for stage in plan.stages]
    back = [stage.backward_issue_s / sharing for stage in plan.stages]
    split = [stage.weight_s / stage.backward_s if stage.backward_s else 0.0 for stage in plan.stages]
    issue: dict[Kind, list[float]] = {
        "F": there,
        "B": back,
        "I": [(1 - share) * whole for share, whole in zip(split, back, strict=True)],
        "W": [share * whole for share, whole in zip(split, back, strict=True)],
    }
    return simulated(plan, issue_s=issue)


Link = Callable[[int, int, int], float]
"""Seconds that so many bytes take from one stage to another: ``link(producer, consumer, bytes)``."""


@dataclass(frozen=True)
class SentAlone:
    """What goes between two stages per microbatch: bytes there and back, and seconds where it was really copied."""

    producer: int
    consumer: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True)
class StagesAlone:
    """What the actions of a step take when nothing else runs; made by `PipelinedModule.profile_stages`.

    Attributes:
        schedule: the schedule whose actions ran.
        seconds: by kind of action, what it takes each stage on its device: the median of the steps, the mean of the
            microbatches.
        issue_s: likewise, how long the host takes to issue them; empty where work is done when the call returns.
        host_stages: the stages that run on the thread that issues the others; empty where every lane has its own.
        sent: what goes from stage to stage.
        once_s: seconds of a step outside its actions.
        grown_bytes: by lane, the most that it held at once above what it held before; None where nobody counts.
    """

    schedule: Schedule
    seconds: Mapping[Kind, tuple[float, ...]]
    issue_s: Mapping[Kind, tuple[float, ...]]
    sent: tuple[SentAlone, ...]
    once_s: float
    grown_bytes: tuple[int | None, ...]
    host_stages: frozenset[int] = frozenset()

    @property
    def cell_s(self) -> tuple[float, ...]:
        """By stage, seconds of one microbatch: all its actions."""
        return tuple(map(sum, zip(*self.seconds.values(), strict=True)))

    @property
    def serial_s(self) -> float:
        """Seconds of all actions one after the other, on one device without gaps."""
        return self.schedule.microbatches * sum(self.cell_s)

    def step(self, schedule: Schedule | None = None, *, link: Link | None = None, issued: bool = True) -> Timeline:
        """Return the simulated step with every lane on a device of its own.

        Args:
            schedule: another schedule for these stages, of actions of the same kinds; None: the one that ran.
            link: what values take between stages; None: what their copies took here, nothing on one device.
            issued: whether one host thread issues all actions; else every device has a host that keeps up.

        Raises ValueError where the schedule has kinds of actions that did not run.
        """
        return self._simulated(schedule or self.schedule, self._transfers(link), issued=issued)

    def on_one_device(self) -> Timeline:
        """Return the simulated step with all lanes on one device, whose kernels leave no room for another's."""
        merged = Schedule(
            f"{self.schedule.name} on one device", (self.schedule.issue_order,), (0,) * self.schedule.stages
        )
        return self._simulated(merged, (), issued=True)

    def _simulated(self, schedule: Schedule, transfers: Sequence[TransferTime], *, issued: bool) -> Timeline:
        if schedule.stages != (count := self.schedule.stages):
            raise ValueError(f"{count} stages were measured, schedule {schedule.name!r} has {schedule.stages}")
        return simulate(
            schedule,
            forward_s=self.seconds["F"],
            backward_s=self.seconds.get("B"),
            input_gradient_s=self.seconds.get("I"),
            weight_gradient_s=self.seconds.get("W"),
            transfers=transfers,
            issue_s=self.issue_s if issued and self.issue_s else None,
            host_stages=self.host_stages if issued else (),
        )

    def _transfers(self, link: Link | None) -> tuple[TransferTime, ...]:
        if link is None:
            return tuple(TransferTime(s.producer, s.consumer, s.forward_s, s.backward_s) for s in self.sent)
        return tuple(
            TransferTime(
                s.producer,
                s.consumer,
                link(s.producer, s.consumer, s.forward_bytes),
                link(s.consumer, s.producer, s.backward_bytes),
            )
            for s in self.sent
        )


def by_stage(measured: Mapping[Action, float], *, stages: int) -> dict[Kind, tuple[float, ...]]:
    """Return the mean over microbatches of each kind of action, stage by stage; a stage without one has 0."""
    means: dict[Kind, tuple[float, ...]] = {}
    for kind in dict.fromkeys(action.kind for action in measured):
        samples: list[Sequence[float]] = [
            [seconds for action, seconds in measured.items() if (action.kind, action.stage) == (kind, stage)]
            for stage in range(stages)
        ]
        means[kind] = tuple(fmean(values) if values else 0.0 for values in samples)
    return means
