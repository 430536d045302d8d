"""One device's actions as they are written, for schedules that are patterns of a few stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from autosplit.schedule.action import Action, Kind


class LaneWriter:
    """Writes one device's actions: ``add(2, "FIW")`` appends stage 2's next forward, input and weight gradients.

    Each stage's actions of a kind take the microbatches in ascending order. A stage whose microbatches of that kind are
    used up adds nothing, so a pattern may be written past the end.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._actions: list[Action] = []
        self._next: dict[tuple[int, Kind], int] = {}

    def add(self, stage: int, kinds: str) -> None:
        """Append the stage's next action of each kind."""
        for kind in cast(Iterable[Kind], kinds):
            microbatch = self._next.get((stage, kind), 0)
            if microbatch < self._microbatches:
                self._next[stage, kind] = microbatch + 1
                self._actions.append(Action(stage, kind, microbatch))

    def lane(self) -> tuple[Action, ...]:
        """Return what was written."""
        return tuple(self._actions)
