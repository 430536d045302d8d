"""When each action of a schedule starts and ends, from the times of its stages and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.order import issue_order


@dataclass(frozen=True)
class TransferTime:
    """How long the values between two stages travel, per microbatch: forward, and their gradients back."""

    producer: int
    consumer: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: its length, the idle fraction over all its devices, and every action's span in issue order."""

    step_s: float
    bubble: float
    spans: tuple[Span, ...]


def simulate(
    schedule: Schedule,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers: tuple[TransferTime, ...] = (),
) -> Timeline:
    """Return the timeline when ``forward_s[stage]`` and ``backward_s[stage]`` are one microbatch's times.

    A transfer takes no lane time; it only delays its consumer. An action starts when its lane is free and all that it
    needs has ended and arrived.
    """
    duration = {"F": forward_s, "B": backward_s}
    delays = _delays(transfers)
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.stages
    spans: list[Span] = []
    for action in issue_order(schedule):
        ready = [ends[need] for need in schedule.needs(action)]
        for other, delay_s in delays.get((action.kind, action.stage), ()):
            ready.append(ends[Action(other, action.kind, action.microbatch)] + delay_s)
        start_s = max(free[action.stage], *ready, 0.0)
        end_s = start_s + duration[action.kind][action.stage]
        free[action.stage] = ends[action] = end_s
        spans.append(Span(action, start_s, end_s))
    step_s = max(free, default=0.0)
    busy_s = sum(duration[span.action.kind][span.action.stage] for span in spans)
    bubble = 1.0 - busy_s / (step_s * schedule.stages) if step_s else 0.0
    return Timeline(step_s=step_s, bubble=bubble, spans=tuple(spans))


def _delays(transfers: tuple[TransferTime, ...]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Map (kind, waiting stage) to the stages it waits for and how long their values travel."""
    delays: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for transfer in transfers:
        if not 0 <= transfer.producer < transfer.consumer:
            raise ValueError(f"a transfer goes to a later stage, not from {transfer.producer} to {transfer.consumer}")
        delays.setdefault(("F", transfer.consumer), []).append((transfer.producer, transfer.forward_s))
        delays.setdefault(("B", transfer.producer), []).append((transfer.consumer, transfer.backward_s))
    return delays
