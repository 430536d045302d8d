"""One entry of a schedule, its text form, and the lanes of a whole step."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from autosplit.errors import ScheduleError
from autosplit.schedule.rows import Rows, rows_of

Kind = Literal["F", "B", "I", "W"]
"""F: forward of one microbatch. B: its whole backward. I: the gradient of the input only. W: the weights' gradients."""


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
    """Return an action in words: ``stage 2, backward, microbatch 5``."""
    kind = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}[action.kind]
    return f"stage {action.stage}, {kind}, microbatch {action.microbatch}"


class Cell(NamedTuple):
    """A place in a schedule: a lane and a position in it."""

    lane: int
    position: int


@dataclass(frozen=True)
class Schedule:
    """The actions of one step, a lane per device.

    Attributes:
        name: what errors call it.
        lanes: lane ``d`` lists, in order, what device ``d`` does.
        stage_lane: the lane of each stage. Left out, lane ``i`` holds stage ``i``; a device that holds several
            (*virtual*) stages is named several times.
    """

    name: str
    lanes: tuple[tuple[Action, ...], ...]
    stage_lane: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stage_lane:
            object.__setattr__(self, "stage_lane", tuple(range(len(self.lanes))))

    def __iter__(self) -> Iterator[Action]:
        return (action for lane in self.lanes for action in lane)

    @cached_property
    def stages(self) -> int:
        """Number of stages, virtual ones too."""
        return len(self.stage_lane)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of the step."""
        return max((action.microbatch + 1 for action in self), default=0)

    @cached_property
    def has_backward(self) -> bool:
        """False for a forward-only schedule."""
        return self.kinds != {"F"} and bool(self.kinds)

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
        own = Action(stage, "F", microbatch)
        return (own,) if stage == self.stages - 1 else (own, self.input_gradient(stage + 1, microbatch))

    def clocks(self) -> Mapping[Cell, int]:
        """Return the clock tick of each cell when every action takes one tick and starts as early as it can.

        Cells that can never start (a deadlock) are missing. They come by tick, then by lane.
        """
        return self._clocks

    @cached_property
    def _clocks(self) -> Mapping[Cell, int]:
        rows = self.rows
        return MappingProxyType(dict(zip(map(Cell, rows.lanes, rows.positions), rows.ticks, strict=True)))

    @cached_property
    def rows(self) -> Rows:
        """The actions that can start as numbers, by clock tick and then by lane."""
        return rows_of(self.lanes, stages=self.stages)

    @cached_property
    def in_order(self) -> tuple[Action, ...]:
        """The actions that can start, by clock tick and then by lane."""
        return tuple(self.lanes[lane][at] for lane, at in zip(self.rows.lanes, self.rows.positions, strict=True))

    def grid(self, marked: Collection[Cell] = ()) -> str:
        """Return the schedule as text: a row per lane, a column per clock tick, marked cells as ``>2F0<``.

        Actions that can never start follow at the end of their row.
        """
        ticks = self.clocks()
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
