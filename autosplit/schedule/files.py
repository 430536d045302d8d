"""Action files: the text form in which ``torch.distributed.pipelining`` keeps a schedule, read and written.

A CSV file with a row per device (torch: rank) and an action per cell; empty cells are ticks in which nothing is done:

```
    0F0,0F1,,0B0,,0B1        device 0
    ,1F0,1B0,1F1,1B1,        device 1
```

Files are data: reading one runs nothing. Of torch's lowered files (``compute_comms``) UNSHARD, RESHARD and REDUCE_GRAD
stay where they are (`Schedule.marks`). How ranks talk (SEND_F, RECV_F, SEND_B, RECV_B) is passed over: values go where
the model uses them, also past a stage, and `autosplit.schedule.order` proves the order. Of ``(0F1;3B0)OVERLAP_F_B`` the
parts are taken one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Cell, Schedule
from autosplit.schedule.catalog import build
from autosplit.schedule.entry import Entry, Reduce, Reshard, Unshard, parse_entry
from autosplit.schedule.order import check_state, with_marks
from autosplit.schedule.validate import validate
from autosplit.units import plural

MOST_BYTES = 2**20
"""A larger file is no schedule that could be planned."""
_DIGITS = 6
_SHOWN = 24
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)


@dataclass(frozen=True)
class FilePosition:
    """Where a cell is in its file, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


def read_actions(path: str | Path) -> Schedule:
    """Return the legal schedule of an action file, named after it.

    Raises ScheduleError that names line and column, with the grid where one can be drawn.
    """
    source = Path(path)
    try:
        with source.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(f"cannot read the action file {str(path)!r}: {reason}") from error
    if len(data) > MOST_BYTES:
        raise ScheduleError(f"{str(path)!r} is no action file: it is larger than {MOST_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{str(path)!r} is no action file: byte {error.start} is no UTF-8 text; write a row of cells such as 2F0 "
            "per device"
        ) from error
    try:
        return parse_actions(text, name=source.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{str(path)!r}, {error}", cells=error.cells) from None


def parse_actions(text: str, *, name: str) -> Schedule:
    """Return the legal schedule that the text of an action file lists; raises ScheduleError as `read_actions` does."""
    rows: list[list[Entry]] = []
    places: list[tuple[FilePosition, ...]] = []
    for line, row in enumerate(_rows(text), start=1):
        cells: list[tuple[Entry, FilePosition]] = []
        for column, cell in enumerate(row, start=1):
            position = FilePosition(line, column)
            try:
                cells += [(entry, position) for entry in _entries(cell)]
            except ScheduleError as error:
                raise ScheduleError(f"{position}: {error}") from None
        work = tuple(position for entry, position in cells if isinstance(entry, Action))
        if not work:
            raise ScheduleError(f"line {line}: it lists no work of a stage; write a row only for devices that have any")
        rows.append([entry for entry, _ in cells])
        places.append(work)
    if not rows:
        raise ScheduleError("line 1: there is nothing in the file; write a row per device, with cells such as 0F0")
    try:
        schedule = validate(_ascending(_placed(rows, name=name)))
    except ScheduleError as error:
        where = "; ".join(_where(places, Cell(*cell)) for cell in error.cells)
        raise ScheduleError(f"{where}: {error}", cells=error.cells) from None
    for line, (lane, marks) in enumerate(zip(schedule.lanes, schedule.marks, strict=False), start=1):
        try:
            check_state(with_marks(lane, marks))
        except ScheduleError as error:
            raise ScheduleError(f"line {line}: {error}") from None
    return schedule


def from_rows(rows: Sequence[Sequence[str]], *, name: str) -> Schedule:
    """Return the schedule of rows of text forms, not validated; raises ScheduleError where a cell is no action."""
    return _placed([list(map(parse_entry, row)) for row in rows], name=name)


def schedule_of(
    name: str,
    *,
    stages: int,
    microbatches: int,
    virtual_stages: int = 1,
    actions: Sequence[Sequence[str]] = (),
    replicas: tuple[int, ...] = (),
) -> Schedule:
    """Return a legal schedule for so many microbatches: the catalog's of that name, or that of ``actions``.

    Raises ScheduleError where there are more microbatches than ``actions`` have, or other stages.
    """
    if not actions:
        return build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages, replicas=replicas)
    whole = from_rows(actions, name=name)
    if whole.stages != stages:
        raise ScheduleError(f"schedule {name!r} is for {whole.stages} stages, and there are {stages}; plan again")
    if microbatches > whole.microbatches:
        raise ScheduleError(
            f"schedule {name!r} has {plural(whole.microbatches, 'microbatch')}, {microbatches} are to run; "
            f"give chunks={whole.microbatches}, or a file with {microbatches}"
        )
    return validate(whole.upto(microbatches))


def dump_actions(schedule: Schedule) -> str:
    """Return a legal schedule as the text of an action file, a column per tick of its clock, as torch reads it."""
    ticks = schedule.clocks
    length = max(ticks.values(), default=-1) + 1
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for lane, actions in enumerate(schedule.lanes):
        row = [""] * length
        for position, action in enumerate(actions):
            row[ticks[Cell(lane, position)]] = str(action)
        writer.writerow(row)
    return out.getvalue()


def _rows(text: str) -> list[list[str]]:
    """Return the cells of each line, without blank lines at the end."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n, \t").split("\n")
    rows = []
    for number, line in enumerate(lines if lines != [""] else (), start=1):
        try:
            rows.append(next(csv.reader([line], strict=True), []))
        except csv.Error as error:
            raise ScheduleError(f"line {number}: it is no line of a CSV file: {error}") from error
    return rows


def _entries(cell: str) -> list[Entry]:
    """Return what a cell lists."""
    text = cell.strip()
    if not text:
        return []
    if (both := _TOGETHER.fullmatch(text)) is not None:
        return [entry for piece in both[1].split(";") for entry in _entries(piece)]
    if any(len(number) > _DIGITS for number in re.findall(r"\d+", text)):
        raise ScheduleError(f"{_short(text)} has a number of more than {_DIGITS} digits")
    try:
        return [parse_entry(text)]
    except ScheduleError:
        form = "stage, F, B, I or W, and microbatch, such as 2F0"
        raise ScheduleError(f"{_short(text)} is no action; write {form}, or leave the cell empty") from None


def _placed(rows: Sequence[Sequence[Entry]], *, name: str) -> Schedule:
    """Return the schedule with its stages where their first action is; every stage up to the last must be somewhere."""
    lanes: list[tuple[Action, ...]] = []
    marks: list[tuple[tuple[int, str], ...]] = []
    for row in rows:
        lanes.append(tuple(entry for entry in row if isinstance(entry, Action)))
        behind = accumulate((isinstance(entry, Action) for entry in row), initial=0)
        kept = (Reduce, Unshard, Reshard)
        marks.append(tuple((n, str(entry)) for n, entry in zip(behind, row, strict=False) if isinstance(entry, kept)))
    lane_of: dict[int, int] = {}
    for lane, actions in enumerate(lanes):
        for action in actions:
            lane_of.setdefault(action.stage, lane)
    last = max(lane_of, default=-1)
    if len(lane_of) <= last:
        absent = next(stage for stage in range(last) if stage not in lane_of)
        lane = lane_of[last]
        position = next(index for index, action in enumerate(lanes[lane]) if action.stage == last)
        raise ScheduleError(
            f"schedule {name!r}: {lanes[lane][position]} is of stage {last}, but stage {absent} is in no row; number "
            "the stages from 0 without gaps",
            cells=((lane, position),),
        )
    stage_lane = tuple(lane_of[stage] for stage in range(last + 1))
    return Schedule(name, tuple(lanes), stage_lane, marks=tuple(marks) if any(marks) else ())


def _ascending(schedule: Schedule) -> Schedule:
    """Return the schedule with each stage's backwards in ascending order of microbatches where they descend throughout.

    torch's looped breadth-first schedule lets them descend; here gradients add in one order under every schedule.
    """
    last = schedule.microbatches - 1
    orders = [[a.microbatch for a in schedule if a.stage == s and a.kind == "B"] for s in range(schedule.stages)]
    whole = [order if len(order) == schedule.microbatches > 1 else [] for order in orders]
    falling = {stage for stage, order in enumerate(whole) if order and order == sorted(order, reverse=True)}
    lanes = tuple(
        tuple(Action(a.stage, a.kind, last - a.microbatch) if a.kind != "F" and a.stage in falling else a for a in lane)
        for lane in schedule.lanes
    )
    return replace(schedule, lanes=lanes) if falling else schedule


def _where(places: Sequence[Sequence[FilePosition]], cell: Cell) -> str:
    row = places[cell.lane]
    return str(row[cell.position]) if cell.position < len(row) else f"end of line {row[-1].line}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
