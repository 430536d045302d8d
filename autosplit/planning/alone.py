"""The digital twin of a step: stages measured alone, put together by the simulator.

    stage 0 alone   F 1.9 ms  B 3.8 ms ─┐
    stage 1 alone   F 2.0 ms  B 4.1 ms ─┼─► simulate ─► the step on devices of their own, or of all on one
    copies alone    0─►1 0.1 ms        ─┘

What is put together was measured where one device may stand for several; what is predicted is a step that this machine
may be too small to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autosplit.schedule.action import Action, Kind, Schedule
from autosplit.schedule.simulate import Timeline, TransferTime, simulate

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
        merged = Schedule(f"{self.schedule.name} on one device", (self.schedule.issue_order,), (0,) * self._stages)
        return self._simulated(merged, (), issued=True)

    def speed_up(self, timeline: Timeline) -> float:
        """Return how many times as fast a simulated step is as all its actions one after the other."""
        return self.serial_s / timeline.step_s

    @property
    def _stages(self) -> int:
        return self.schedule.stages

    def _simulated(self, schedule: Schedule, transfers: tuple[TransferTime, ...], *, issued: bool) -> Timeline:
        if schedule.stages != self._stages:
            raise ValueError(f"{self._stages} stages were measured, schedule {schedule.name!r} has {schedule.stages}")
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
    found: dict[Kind, tuple[float, ...]] = {}
    for kind in dict.fromkeys(action.kind for action in measured):
        own: list[Sequence[float]] = [
            [seconds for action, seconds in measured.items() if (action.kind, action.stage) == (kind, stage)]
            for stage in range(stages)
        ]
        found[kind] = tuple(fmean(values) if values else 0.0 for values in own)
    return found
