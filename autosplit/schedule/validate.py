"""What a schedule promises, checked cell by cell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Cell, Schedule


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule when it is legal; raise ScheduleError with its grid and the offending cell marked otherwise.

    Legal: lane ``i`` holds stage ``i``'s actions, each once and none missing; a backward follows its forward;
    backwards are in ascending order of microbatches (gradients add in one order under every schedule); every action
    can start.
    """
    for lane, actions in enumerate(schedule.lanes):
        _check_lane(schedule, lane=lane, actions=actions)
    _check_deadlock(schedule)
    return schedule


def _check_lane(schedule: Schedule, *, lane: int, actions: tuple[Action, ...]) -> None:
    seen: dict[Action, int] = {}
    last_backward = -1
    for position, action in enumerate(actions):
        cell = Cell(lane, position)
        if action.stage != lane:
            _fail(schedule, f"{action} is in lane {lane}; move it to lane {action.stage}", [cell])
        if action in seen:
            _fail(schedule, f"{action} is in lane {lane} twice; remove one", [Cell(lane, seen[action]), cell])
        if action.kind == "B":
            if Action(lane, "F", action.microbatch) not in seen:
                _fail(schedule, f"{action} comes before {lane}F{action.microbatch}; put the forward first", [cell])
            if action.microbatch < last_backward:
                _fail(
                    schedule,
                    f"{action} comes after {lane}B{last_backward}; backwards run in ascending order of microbatches",
                    [cell],
                )
            last_backward = action.microbatch
        seen[action] = position
    for kind in ("F", "B") if schedule.has_backward else ("F",):
        for microbatch in range(schedule.microbatches):
            if Action(lane, kind, microbatch) not in seen:
                _missing(schedule, Action(lane, kind, microbatch))


def _check_deadlock(schedule: Schedule) -> None:
    ticks = schedule.clocks()
    cells = [Cell(lane, position) for lane, actions in enumerate(schedule.lanes) for position in range(len(actions))]
    blocked: dict[int, Cell] = {}
    for cell in cells:
        if cell not in ticks:
            blocked.setdefault(cell.lane, cell)
    if blocked:
        done = {schedule.lanes[cell.lane][cell.position] for cell in ticks}
        waits = []
        for cell in blocked.values():
            action = schedule.lanes[cell.lane][cell.position]
            waits += [f"{action} waits for {need}" for need in schedule.needs(action) if need not in done]
        _fail(schedule, f"deadlock: {', '.join(waits)}; reorder one of these lanes", blocked.values())


def _missing(schedule: Schedule, action: Action) -> NoReturn:
    lanes = list(schedule.lanes)
    lanes[action.stage] = (*lanes[action.stage], action)
    shown = Schedule(schedule.name, tuple(lanes))
    _fail(
        shown,
        f"{action} is missing; add it where it is marked, or elsewhere",
        [Cell(action.stage, len(lanes[action.stage]) - 1)],
    )


def _fail(schedule: Schedule, fact: str, cells: Iterable[Cell]) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name!r}: {fact}\n{schedule.grid(frozenset(cells))}")
