"""How many microbatches a schedule's devices hold, counted on its actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import ge

from autosplit.schedule.action import Action, Schedule


@dataclass(frozen=True, order=True)
class Holding:
    """What one stage holds at a moment, in microbatches.

    Attributes:
        full: begun by their forward, and their B or I has not ended: all that the forward saved.
        waiting: between I and W: only what the weights' gradients need.
    """

    full: int
    waiting: int


@dataclass(frozen=True)
class LaneHoldings:
    """What one device holds.

    Attributes:
        stages: the stages on the device, ascending.
        most: microbatches held at most at any moment, over all its stages: a microbatch counts once per stage.
        peaks: what the stages hold (one `Holding` each) at the moments that no other moment exceeds in every number.
            Whatever a full and a waiting microbatch of each stage weigh, the device's peak is one of these.
    """

    stages: tuple[int, ...]
    most: int
    peaks: tuple[tuple[Holding, ...], ...]


@dataclass(frozen=True)
class InFlight:
    """How many microbatches are held at most: ``held[stage]``, ``waiting[stage]`` of them between I and W; per device.

    Held is begun by the forward and not released: by B, or by W where the backward is split. Without a backward the
    forward itself releases its microbatch.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    lanes: tuple[LaneHoldings, ...]


def in_flight_of(schedule: Schedule) -> InFlight:
    """Return what the devices of a legal schedule hold, by counting through their lanes."""
    held, waiting = [0] * schedule.stages, [0] * schedule.stages
    lanes = []
    for lane, actions in enumerate(schedule.lanes):
        stages = tuple(stage for stage, place in enumerate(schedule.stage_lane) if place == lane)
        moments = _moments(actions, stages=stages, keeps=schedule.has_backward)
        for moment in moments:
            for stage, full, left in zip(stages, moment[::2], moment[1::2], strict=True):
                held[stage] = max(held[stage], full + left)
                waiting[stage] = max(waiting[stage], left)
        most = max(map(sum, moments), default=0)
        lanes.append(LaneHoldings(stages=stages, most=most, peaks=tuple(map(_holdings, _greatest(moments)))))
    return InFlight(held=tuple(held), waiting=tuple(waiting), lanes=tuple(lanes))


def most_held(actions: Iterable[Action], *, stage: int) -> int:
    """Return how many microbatches of one stage a lane with a backward holds at most."""
    own = (action for action in actions if action.stage == stage)
    return max(map(sum, _moments(own, stages=(stage,), keeps=True)), default=0)


_Moment = tuple[int, ...]
"""What each stage of a lane holds, full and waiting in turn."""


def _moments(actions: Iterable[Action], *, stages: tuple[int, ...], keeps: bool) -> set[_Moment]:
    """Return what a lane holds each time before it lets something go: between these it only grows.

    ```
                 F F F I W F I W
        full     1 2 3 2 2 3 2 2
        waiting  0 0 0 1 0 0 1 0
                     ^ ^   ^ ^
    ```
    """
    place = {stage: 2 * index for index, stage in enumerate(stages)}
    now = [0] * (2 * len(stages))
    moments: set[_Moment] = set()
    grown = False
    for action in actions:
        full = place[action.stage]
        if action.kind == "F":
            if grown and not keeps:
                now = [0] * len(now)
            now[full] += 1
            grown = True
            continue
        if grown:
            moments.add(tuple(now))
        now[full + (action.kind == "W")] -= 1
        now[full + 1] += action.kind == "I"
        grown = action.kind == "I"
    if grown:
        moments.add(tuple(now))
    return moments


def _greatest(moments: set[_Moment]) -> list[_Moment]:
    """Return the moments that no other exceeds in every number, sorted."""
    kept: list[_Moment] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(map(ge, other, moment)) for other in kept):
            kept.append(moment)
    return kept[::-1]


def _holdings(moment: _Moment) -> tuple[Holding, ...]:
    pairs = zip(moment[::2], moment[1::2], strict=True)
    return tuple(Holding(full=full, waiting=waiting) for full, waiting in pairs)
