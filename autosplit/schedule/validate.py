"""What a schedule promises, checked cell by cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from autosplit.errors import ScheduleError
from autosplit.schedule.action import KINDS, Action, Cell, Kind, Schedule

_ROWS, _COLUMNS, _NEAR = 64, 480, 2
"""A grid of more rows or columns is shown in part."""
_FIRST: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
_OTHER: dict[Kind, Kind] = {"B": "I", "I": "B"}


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule when it is legal; raise ScheduleError with its grid and the offending cell marked otherwise.

    Legal: a stage's actions are in its lane, each once and none missing: of every microbatch one F, and B, or I and
    then W, after it; B and W of a stage are in ascending order of microbatches (gradients add in one order under every
    schedule; I adds to none and may come in any); every action can start.
    """
    for stage, lane in enumerate(schedule.stage_lane):
        if not 0 <= lane < len(schedule.lanes):
            fact = f"stage {stage} is placed in lane {lane}; place it in one of the {len(schedule.lanes)} lanes, 0 on"
            _fail(schedule, fact, [])
    for lane, actions in enumerate(schedule.lanes):
        _check_lane(schedule, lane=lane, actions=actions)
    _check_complete(schedule)
    _check_deadlock(schedule)
    return schedule


def _check_lane(schedule: Schedule, *, lane: int, actions: tuple[Action, ...]) -> None:
    seen: dict[Action, int] = {}
    last: dict[int, Action] = {}
    for position, action in enumerate(actions):
        here = Cell(lane, position)
        if action.stage >= schedule.stages:
            _fail(schedule, f"{action} is of no stage; name one of the {schedule.stages} stages, 0 on", [here])
        home = schedule.lane_of(action.stage, action.microbatch)
        if home != lane:
            _fail(schedule, f"{action} is in lane {lane}; move it to lane {home}", [here])
        if action in seen:
            _fail(schedule, f"{action} is in lane {lane} twice; remove one", [Cell(lane, seen[action]), here])
        other = _of(action, _OTHER)
        if other in seen:
            fact = f"{other} and {action} are two backwards of one microbatch; keep B, or I and W"
            _fail(schedule, fact, [Cell(lane, seen[other]), here])
        first = _of(action, _FIRST)
        if first is not None and first not in seen:
            what = "forward" if first.kind == "F" else "input's gradient"
            _fail(schedule, f"{action} comes before {first}; put the {what} first", [here])
        if action.kind in "BW":
            before = last.setdefault(action.stage, action)
            if action.microbatch < before.microbatch:
                order = "backwards run in ascending order of microbatches"
                _fail(schedule, f"{action} comes after {before}; {order}", [here])
            last[action.stage] = action
        seen[action] = position


def _of(action: Action, kinds: dict[Kind, Kind]) -> Action | None:
    """Return the same stage and microbatch's action of the kind that ``kinds`` gives, if any."""
    kind = kinds.get(action.kind)
    return None if kind is None else Action(action.stage, kind, action.microbatch)


def _check_complete(schedule: Schedule) -> None:
    there = set(schedule)
    split = {action.stage for action in there if action.kind == "I"}
    has_backward, microbatches = schedule.has_backward, schedule.microbatches
    for stage in range(schedule.stages):
        for microbatch in range(microbatches):
            forward, whole, inner, weights = (Action(stage, kind, microbatch) for kind in KINDS)
            if forward not in there:
                _missing(schedule, forward)
            if not has_backward or whole in there:
                continue
            if inner not in there:
                _missing(schedule, inner if stage in split else whole)
            if weights not in there:
                _missing(schedule, weights)


def _check_deadlock(schedule: Schedule) -> None:
    ticks = schedule.clocks
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
    lane = schedule.lane_of(action.stage, action.microbatch)
    lanes[lane] = (*lanes[lane], action)
    shown = replace(schedule, lanes=tuple(lanes))
    _fail(shown, f"{action} is missing; add it where it is marked, or elsewhere", [Cell(lane, len(lanes[lane]) - 1)])


def _fail(schedule: Schedule, fact: str, cells: Iterable[Cell]) -> NoReturn:
    marked = tuple(cells)
    places = tuple((cell.lane, cell.position) for cell in marked)
    grid = _clipped(schedule.grid(frozenset(marked)).splitlines(), lanes={cell.lane for cell in marked})
    raise ScheduleError(f"schedule {schedule.name!r}: {fact}\n{grid}", cells=places)


def _clipped(lines: list[str], *, lanes: set[int]) -> str:
    """Return the grid's lines, of a large one those near the marked lanes and what is around the first mark."""
    if len(lines) > _ROWS:
        lines = [line for lane, line in enumerate(lines) if any(abs(lane - other) <= _NEAR for other in lanes)][:_ROWS]
    if max(map(len, lines), default=0) <= _COLUMNS:
        return "\n".join(lines)
    label = lines[0].index("|") + 2
    mark = min((line.index(">") for line in lines if ">" in line), default=label)
    start = max(label, mark - _COLUMNS // 2)
    before = "... " if start > label else ""
    return "\n".join(f"{line[:label]}{before}{line[start : start + _COLUMNS]}".rstrip() for line in lines)
