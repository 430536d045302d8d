"""How many microbatches a schedule's devices hold, counted on its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
        moments = set(_moments(actions, stages=stages, keeps=schedule.has_backward))
        for holdings in moments:
            for stage, holding in zip(stages, holdings, strict=True):
                held[stage] = max(held[stage], holding.full + holding.waiting)
                waiting[stage] = max(waiting[stage], holding.waiting)
        most = max((sum(holding.full + holding.waiting for holding in holdings) for holdings in moments), default=0)
        lanes.append(LaneHoldings(stages=stages, most=most, peaks=_greatest(moments)))
    return InFlight(held=tuple(held), waiting=tuple(waiting), lanes=tuple(lanes))


def most_held(actions: Iterable[Action], *, stage: int) -> int:
    """Return how many microbatches of one stage a lane with a backward holds at most."""
    own = (action for action in actions if action.stage == stage)
    moments = _moments(own, stages=(stage,), keeps=True)
    return max((holding.full + holding.waiting for (holding,) in moments), default=0)


def _moments(actions: Iterable[Action], *, stages: tuple[int, ...], keeps: bool) -> Iterator[tuple[Holding, ...]]:
    """Yield what the stages hold while each forward runs, and after each I: between these nothing grows."""
    full: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    for action in actions:
        if action.kind == "F":
            full[action.stage] += 1
        elif action.kind == "W":
            waiting[action.stage] -= 1
        else:
            full[action.stage] -= 1
            waiting[action.stage] += action.kind == "I"
        if action.kind in "FI":
            yield tuple(Holding(full=full[stage], waiting=waiting[stage]) for stage in stages)
        if not keeps:
            full[action.stage] -= 1


def _greatest(moments: set[tuple[Holding, ...]]) -> tuple[tuple[Holding, ...], ...]:
    """Return the moments that no other exceeds, sorted."""

    def exceeds(more: tuple[Holding, ...], less: tuple[Holding, ...]) -> bool:
        return more != less and all(
            one.full >= other.full and one.waiting >= other.waiting for one, other in zip(more, less, strict=True)
        )

    return tuple(sorted(moment for moment in moments if not any(exceeds(other, moment) for other in moments)))
