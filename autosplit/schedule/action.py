"""One entry of a schedule, its text form, and the lanes of a whole step."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, cast

from autosplit.errors import ScheduleError

Kind = Literal["F", "B"]
"""F: forward of one microbatch. B: its backward."""


@dataclass(frozen=True, order=True)
class Action:
    """One stage's forward or backward of one microbatch; the text form is ``2F0`` (stage 2, forward, microbatch 0)."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``text`` names; ``Action.parse(str(action)) == action``."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text.strip(), re.ASCII)
        if match is None:
            raise ScheduleError(f"{text!r} is no action; write stage, F or B, and microbatch, such as '2F0'")
        return cls(stage=int(match[1]), kind=cast(Kind, match[2]), microbatch=int(match[3]))


def describe(action: Action) -> str:
    """Return an action in words: ``stage 2, backward, microbatch 5``."""
    kind = {"F": "forward", "B": "backward"}[action.kind]
    return f"stage {action.stage}, {kind}, microbatch {action.microbatch}"


@dataclass(frozen=True, order=True)
class Cell:
    """A place in a schedule: a lane and a position in it."""

    lane: int
    position: int


@dataclass(frozen=True)
class Schedule:
    """The actions of one step: lane ``i`` lists, in order, what stage ``i`` does."""

    name: str
    lanes: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages, one lane each."""
        return len(self.lanes)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the step."""
        return max((action.microbatch + 1 for lane in self.lanes for action in lane), default=0)

    @property
    def has_backward(self) -> bool:
        """False for a forward-only schedule."""
        return any(action.kind == "B" for lane in self.lanes for action in lane)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions of any lane that must end before ``action`` starts.

        ```
            0Fm --> 1Fm --> 2Fm      a forward needs the stage before it,
             |       |       |
            0Bm <-- 1Bm <-- 2Bm      a backward its own forward and the backward of the stage behind it
        ```
        """
        if action.kind == "F":
            return (Action(action.stage - 1, "F", action.microbatch),) if action.stage else ()
        own = Action(action.stage, "F", action.microbatch)
        return (own,) if action.stage == self.stages - 1 else (own, Action(action.stage + 1, "B", action.microbatch))

    def clocks(self) -> dict[Cell, int]:
        """Return the clock tick of each cell when every action takes one tick and starts as early as it can.

        Cells that can never start (a deadlock) are missing.
        """
        ticks: dict[Cell, int] = {}
        done: set[Action] = set()
        position = [0] * self.stages
        clock = 0
        while True:
            starting = [
                Cell(lane, position[lane])
                for lane, actions in enumerate(self.lanes)
                if position[lane] < len(actions) and done.issuperset(self.needs(actions[position[lane]]))
            ]
            if not starting:
                return ticks
            for cell in starting:
                ticks[cell] = clock
                done.add(self.lanes[cell.lane][cell.position])
                position[cell.lane] += 1
            clock += 1

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
        label = len(str(max(self.stages - 1, 0)))
        lines = (
            f"lane {lane:>{label}} | " + " ".join(f"{text:<{width}}" for text in row) for lane, row in enumerate(rows)
        )
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.grid()
