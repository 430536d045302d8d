"""One entry of a schedule, its text form, the lanes of a whole step, and their clock."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from autosplit.errors import ScheduleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Kind = Literal["F", "B", "I", "W", "U"]
"""F: forward of one microbatch. B: its whole backward. I: the gradient of the input only. W: the weights' gradients.
U: an update of a stage, in a stream only."""
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
Gradients = Literal["all", "inputs", "none"]
"""Of what a stage's backward makes gradients: of weights and inputs, of inputs only, or there is no backward."""
_KEPT: Mapping[Gradients, Mapping[Kind, Kind]] = {
    "all": {kind: kind for kind in KINDS},
    "inputs": {"F": "F", "B": "B", "I": "B"},
    "none": {"F": "F"},
}


class Action(NamedTuple):
    """What one stage does for one microbatch; the text form is ``2F0`` (stage 2, forward, microbatch 0).

    It is the text form of ``torch.distributed.pipelining``'s schedule files.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``text`` names; ``Action.parse(str(action)) == action``."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip(), re.ASCII)
        if match is None:
            raise ScheduleError(f"{text!r} is no action; write stage, F, B, I or W, and microbatch, such as '2F0'")
        return cls(stage=int(match[1]), kind=cast(Kind, match[2]), microbatch=int(match[3]))


def describe(action: Action) -> str:
    """Return an action in words: ``stage 2, backward, microbatch 5``; another entry of a list as its text."""
    if not isinstance(action, Action):
        return str(action)
    kinds = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients", "U": "update"}
    kind = kinds[action.kind]
    return f"stage {action.stage}, {kind}, microbatch {action.microbatch}"


class Cell(NamedTuple):
    """A place in a schedule: a lane and a position in it."""

    lane: int
    position: int


def gradients_of(stages: int, *, flows: Collection[int], trained: Collection[int]) -> tuple[Gradients, ...]:
    """Return of what each stage makes gradients: none before the first stage through which they flow (``flows``).

    ``trained`` are those with weights to train. The last always has a backward, as a loss may have parameters.
    """
    first = min((*flows, stages - 1))
    return tuple("none" if s < first else "all" if s in trained else "inputs" for s in range(stages))


@dataclass(frozen=True)
class Schedule:
    """The actions of one step, a lane per device.

    Attributes:
        name: what errors call it.
        lanes: lane ``d`` lists, in order, what device ``d`` does.
        stage_lane: the lane that holds each stage's parameters. Left out, lane ``i`` holds stage ``i``; a device that
            holds several (*virtual*) stages is named several times. Where an action runs, `lane_of` says.
        replicas: how many lanes each stage has, from its ``stage_lane`` on; empty: one each.
        marks: by lane, what a file says of parameters and gradients, ``0UNSHARD`` or ``0REDUCE_GRAD``, each with the
            number of the lane's actions that it stands behind; empty: what passes place.
    """

    name: str
    lanes: tuple[tuple[Action, ...], ...]
    stage_lane: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    marks: tuple[tuple[tuple[int, str], ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.stage_lane:
            first = accumulate(self.replicas[:-1], initial=0) if self.replicas else range(len(self.lanes))
            object.__setattr__(self, "stage_lane", tuple(first))

    def __iter__(self) -> Iterator[Action]:
        return (action for lane in self.lanes for action in lane)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Each lane's actions and marks, in order, as text."""
        rows = [[str(action) for action in lane] for lane in self.lanes]
        for row, lane_marks in zip(rows, self.marks, strict=False):
            for behind, mark in reversed(lane_marks):
                row.insert(behind, mark)
        return tuple(map(tuple, rows))

    def upto(self, microbatches: int) -> Schedule:
        """Return the schedule of the first microbatches only; marks stay behind the actions that are left."""
        return self._changed(lambda action: action if action.microbatch < microbatches else None)

    def needed(self, gradients: Sequence[Gradients]) -> Schedule:
        """Return the schedule with what makes gradients only, by stage.

        A stage without weight gradients has no W, and its input gradient (I) is its whole backward. Without any it has
        forwards only.
        """
        if set(gradients) == {"all"}:
            return self
        kinds = [_KEPT[makes] for makes in gradients]
        return self._changed(lambda a: a._replace(kind=kinds[a.stage][a.kind]) if a.kind in kinds[a.stage] else None)

    def _changed(self, change: Callable[[Action], Action | None]) -> Schedule:
        rows = [[change(action) for action in lane] for lane in self.lanes]
        marks = tuple(
            tuple((sum(action is not None for action in row[:behind]), mark) for behind, mark in lane_marks)
            for row, lane_marks in zip(rows, self.marks, strict=False)
        )
        lanes = tuple(tuple(action for action in row if action is not None) for row in rows)
        return replace(self, lanes=lanes, marks=marks)

    @cached_property
    def stages(self) -> int:
        """Number of stages, virtual ones too."""
        return len(self.stage_lane)

    def lane_of(self, stage: int, microbatch: int) -> int:
        """Return the lane that runs a stage's actions of a microbatch: replicas take them in turn."""
        return self.stage_lane[stage] + (microbatch % self.replicas[stage] if self.replicas else 0)

    def lanes_of(self, stage: int) -> range:
        """Return the lanes that hold a stage's parameters: one, or one per replica."""
        first = self.stage_lane[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    def stages_on(self, lane: int) -> tuple[int, ...]:
        """Return the stages whose parameters a lane holds, ascending."""
        return tuple(stage for stage in range(self.stages) if lane in self.lanes_of(stage))

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of the step."""
        return max((action.microbatch + 1 for action in self), default=0)

    @cached_property
    def has_backward(self) -> bool:
        """False for a forward-only schedule."""
        return self.kinds != {"F"} and bool(self.kinds)

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """The stages that have a backward."""
        return frozenset(action.stage for action in self if action.kind in "BI")

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(action.kind for action in self)

    @cached_property
    def _split(self) -> frozenset[Action]:
        return frozenset(action for action in self if action.kind == "I")

    def input_gradient(self, stage: int, microbatch: int) -> Action:
        """Return the action that makes the gradient of a stage's input: I where the backward is split, B elsewhere."""
        if self._split and (split := Action(stage, "I", microbatch)) in self._split:
            return split
        return Action(stage, "B", microbatch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions of any lane that must end before ``action`` starts.

        ```
            0Fm --> 1Fm --> 2Fm      a forward needs the stage before it,
             |       |       |
            0Bm <-- 1Im <-- 2Bm      a backward its own forward and the input's gradient of the stage behind it
                     |               (B makes it, or I where the backward is split),
                    1Wm              the weights' gradients what their own I left
        ```
        """
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return (Action(stage - 1, "F", microbatch),) if stage else ()
        if action.kind == "W":
            return (Action(stage, "I", microbatch),)
        forward = Action(stage, "F", microbatch)
        return (forward,) if stage == self.stages - 1 else (forward, self.input_gradient(stage + 1, microbatch))

    @property
    def clocks(self) -> Mapping[Cell, int]:
        """The clock tick of each cell when every action takes one tick and starts as early as it can.

        Cells that can never start (a deadlock) are missing. They come by tick, then by lane.
        """
        return dict(zip(self.rows.cells, self.rows.ticks.tolist(), strict=True))

    @cached_property
    def rows(self) -> Rows:
        """The actions that can start as numbers, by clock tick and then by lane."""
        return _rows_of(self)

    @cached_property
    def issue_order(self) -> tuple[Action, ...]:
        """All actions by clock tick and then by lane: the order in which one thread issues every lane.

        Raises ScheduleError when some can never start.
        """
        order = tuple(self.lanes[lane][position] for lane, position in self.rows.cells)
        blocked = sum(map(len, self.lanes)) - len(order)
        if blocked:
            raise ScheduleError(
                f"{blocked} actions of schedule {self.name!r} can never start; validate(schedule) shows where\n{self}"
            )
        return order

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """How many microbatches each stage holds at most on a lane: begun by their forward and not released.

        B releases a microbatch, or W where the backward is split. Without a backward the forward itself releases it.
        """
        import numpy as np  # the command line asks for the names of schedules without it

        most = [0] * self.stages
        for lane in self.lanes:
            stages = np.array([action.stage for action in lane])
            change = np.array([{"F": 1, "I": 0}.get(action.kind, -1) for action in lane])
            for stage in set(stages.tolist()):
                held = change[stages == stage].cumsum().max() if stage in self.differentiated else 1
                most[stage] = max(most[stage], int(held))
        return tuple(most)

    def grid(self, marked: Collection[Cell] = ()) -> str:
        """Return the schedule as text: a row per lane, a column per clock tick, marked cells as ``>2F0<``.

        Actions that can never start follow at the end of their row.
        """
        ticks = self.clocks
        rows: list[list[str]] = []
        for lane, actions in enumerate(self.lanes):
            row: list[str] = []
            for position, action in enumerate(actions):
                cell = Cell(lane, position)
                row += ["."] * (ticks.get(cell, len(row)) - len(row))
                row.append(f">{action}<" if cell in marked else str(action))
            rows.append(row)
        width = max((len(text) for row in rows for text in row), default=1)
        label = len(str(max(len(self.lanes) - 1, 0)))
        lines = (
            f"lane {lane:>{label}} | " + " ".join(f"{text:<{width}}" for text in row) for lane, row in enumerate(rows)
        )
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.grid()


@dataclass(frozen=True, eq=False)
class Rows:
    """The actions that can start, by clock tick and within a tick by lane: arrays with one entry per action.

    Attributes:
        ticks: its tick when every action takes one and starts as early as it can.
        lanes, positions: where it stands in the schedule.
        stages, kinds, microbatches: what it is; kinds are numbered as in ``KINDS``.
        same: the row of what it needs of the same stage: a backward its forward, W its I.
        near: the row of what it needs of a neighbouring stage. ``len(ticks)`` stands for nothing, here and below.
        forward: the row of each stage's forward of each microbatch: [stage, microbatch].
        gradient: the row of what makes the gradient of its input, I where the backward is split and B elsewhere.
    """

    ticks: Ints
    lanes: Ints
    positions: Ints
    stages: Ints
    kinds: Ints
    microbatches: Ints
    same: Ints
    near: Ints
    forward: Ints
    gradient: Ints

    @property
    def cells(self) -> Iterator[Cell]:
        """Where each stands in the schedule."""
        return map(Cell, self.lanes.tolist(), self.positions.tolist())


def _rows_of(schedule: Schedule) -> Rows:
    """Return the rows of a schedule; what can never start (a deadlock) has none.

    Actions are numbers here, by kind, stage and microbatch; ``same`` and ``near`` are what `Schedule.needs` says.
    """
    import numpy as np  # the command line asks for the names of schedules without it

    microbatches = schedule.microbatches
    stages = max([schedule.stages, *(action.stage + 2 for action in schedule)])
    shape = len(KINDS), stages, microbatches
    numbers = np.arange(math.prod(shape)).reshape(shape)
    forward, backward, split, _ = numbers
    begin = {kind: number * stages * microbatches for number, kind in enumerate(KINDS)}
    lanes = [[begin[kind] + stage * microbatches + m for stage, kind, m in lane] for lane in schedule.lanes]
    exists = np.zeros(numbers.size, dtype=np.bool_)
    exists[[number for lane in lanes for number in lane]] = True
    gradient = np.where(exists.reshape(shape)[2], split, backward)
    same, near = np.full((2, *shape), numbers.size)
    same[1:3], same[3] = forward, split
    near[0, 1:], near[1:3, :-1] = forward[:-1], gradient[1:]
    near[1:3, schedule.stages - 1 : schedule.stages] = numbers.size
    ticks = _ticks(lanes, same.ravel().tolist(), near.ravel().tolist())

    counts = [len(of_lane) for of_lane in ticks]
    tick = np.array([each for of_lane in ticks for each in of_lane], dtype=np.int64)
    actions = np.array(
        [n for of_lane, count in zip(lanes, counts, strict=True) for n in of_lane[:count]], dtype=np.int64
    )
    lane = np.repeat(np.arange(len(lanes)), counts)
    position = np.array([n for count in counts for n in range(count)], dtype=np.int64)
    order = np.lexsort((lane, tick))
    actions = actions[order]
    row = np.full(numbers.size + 1, len(actions))
    row[actions] = np.arange(len(actions))
    kinds, of_stage, microbatch = np.unravel_index(actions, shape)
    return Rows(
        ticks=tick[order],
        lanes=lane[order],
        positions=position[order],
        stages=of_stage,
        kinds=kinds,
        microbatches=microbatch,
        same=row[same.ravel()[actions]],
        near=row[near.ravel()[actions]],
        forward=row[forward][: schedule.stages],
        gradient=row[gradient][: schedule.stages],
    )


def _ticks(lanes: Sequence[Sequence[int]], same: Sequence[int], near: Sequence[int]) -> list[list[int]]:
    """Return the clock tick of each action that can start, following each lane until it waits for another's action."""
    ticks: list[list[int]] = [[] for _ in lanes]
    done: list[int | None] = [None] * len(same) + [-1]
    waiting: dict[int, list[int]] = {}
    running = list(range(len(lanes)))
    while running:
        lane = running.pop()
        of_lane, tick = ticks[lane], ticks[lane][-1] if ticks[lane] else -1
        numbers = lanes[lane]
        for position in range(len(of_lane), len(numbers)):
            number = numbers[position]
            before, beside = done[same[number]], done[near[number]]
            if before is None or beside is None:
                waiting.setdefault(same[number] if before is None else near[number], []).append(lane)
                break
            tick = max(tick, before, beside) + 1
            of_lane.append(tick)
            if done[number] is None:
                done[number] = tick
            if number in waiting:
                running += waiting.pop(number)
    return ticks
