"""A schedule made ready for lanes that run at the same time: what each action waits for and whom it tells.

stage 0   0F0 ──────────────┐        2F0 takes values of stages 0 and 1, so it waits for both messages;
stage 1         1F0 ──────┐ │        0F0 tells stages 1 and 2.
stage 2               2F0 ◄─┴─┘      A backward waits for the stages that took its values, and tells those it took from.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
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
    contain (a backward's forward, in a schedule of backwards only) counts as done.
    """
    users = [{t for t, taken in enumerate(sources) if s in taken} for s in range(len(sources))]
    numbers = {action: n for n, action in enumerate(action for lane in schedule.lanes for action in lane)}

    def turn(action: Action) -> Turn:
        before, after = (sources, users) if action.kind == "F" else (users, sources)
        stage, kind = action.stage, action.kind
        needs = (Action(other, kind, action.microbatch) for other in sorted(before[stage] - {stage}))
        tells = tuple(sorted(after[stage] - {stage}))
        return Turn(action, numbers[action], tuple(numbers[n] for n in needs if n in numbers), tells)

    return tuple(tuple(turn(action) for action in lane) for lane in schedule.lanes)


def backwards(stages: int, microbatches: int) -> Schedule:
    """Return the backwards of a call: descending microbatches, the order in which autograd takes one thread's graph."""
    lanes = tuple(tuple(Action(s, "B", m) for m in reversed(range(microbatches))) for s in range(stages))
    return Schedule("backward", lanes)
