"""A schedule made ready for lanes that run at the same time: what each action waits for and whom it tells.

lane 0   0F0 ──────────────┐        2F0 takes values of stages 0 and 1, so it waits for both messages;
lane 1         1F0 ──────┐ │        0F0 tells lanes 1 and 2.
lane 2               2F0 ◄─┴─┘      A backward waits for the stages that took its values, and tells those it took from.

A lane may hold several stages. What passes between those needs no message: a lane works in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from autosplit.schedule.action import Action, Schedule


class Turn(NamedTuple):
    """One action of a lane, its number, the numbers of the actions that it waits for, and the lanes that it tells."""

    action: Action
    number: int
    needs: tuple[int, ...]
    tells: tuple[int, ...]


Turns = tuple[tuple[Turn, ...], ...]
"""The turns of every lane, in order."""


def turns(schedule: Schedule, sources: Sequence[AbstractSet[int]]) -> Turns:
    """Return every lane's turns, where stage ``s`` takes values of the stages ``sources[s]``.

    Only actions of other lanes are waited for; a lane's own come in its own order. A need that the schedule does not
    contain (a backward's forward, in a schedule of backwards only) counts as done. Weight gradients wait for nothing
    but their own input gradient.
    """
    users = [{t for t, taken in enumerate(sources) if s in taken} for s in range(len(sources))]
    numbers = {action: n for n, action in enumerate(schedule)}

    def turn(action: Action) -> Turn:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "W":
            return Turn(action, numbers[action], (), ())
        before, after = (sources, users) if kind == "F" else (users, sources)
        lane = schedule.lane_of(stage, microbatch)
        others = [other for other in sorted(before[stage]) if schedule.lane_of(other, microbatch) != lane]
        needs = [_made(schedule, other, kind, microbatch) for other in others]
        tells = {schedule.lane_of(other, microbatch) for other in after[stage]} - {lane}
        return Turn(action, numbers[action], tuple(numbers[n] for n in needs if n in numbers), tuple(sorted(tells)))

    return tuple(tuple(turn(action) for action in lane) for lane in schedule.lanes)


def _made(schedule: Schedule, stage: int, kind: str, microbatch: int) -> Action:
    """Return the action that makes what a stage sends: its forward, or what makes the gradients of its input."""
    return Action(stage, "F", microbatch) if kind == "F" else schedule.input_gradient(stage, microbatch)


def forwards(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, in its order: what a call of the pipe runs first."""
    lanes = tuple(tuple(action for action in lane if action.kind == "F") for lane in schedule.lanes)
    return replace(schedule, name="forward", lanes=lanes)


def backwards(schedule: Schedule) -> Schedule:
    """Return the whole backwards of a call: its forwards in reverse, as autograd takes one thread's graph."""
    lanes = tuple(
        tuple(Action(action.stage, "B", action.microbatch) for action in reversed(lane))
        for lane in forwards(schedule).lanes
    )
    return replace(schedule, name="backward", lanes=lanes)
