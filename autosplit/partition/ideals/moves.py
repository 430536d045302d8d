"""The states of the search for a chain, and the moves between them: which slot the next stage takes.

```
fixed order, 3 stages            free order, 3 stages, slots of kinds a a b        (taken of a, taken of b)

0 --slot 0--> 1 --slot 1--> 2        (0,0) --a--> (1,0) --a--> (2,0)               every move adds one slot,
              2 --slot 2--> 3          |b           |b           |b                and the final states have
                                     (0,1) --a--> (1,1) --a--> (2,1)               three in all
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import PLAIN, Goal, Terms
from autosplit.partition.ideals.table import Floats, Ints


@dataclass(frozen=True)
class Place:
    """What the cost of one stage depends on: stages on equal places cost the same."""

    terms: Terms
    capacity_bytes: float
    in_flight: int


@dataclass(frozen=True)
class Transitions:
    """Moves to different states, ascending: from which state, to which, and with which slot and place."""

    origin: Ints
    target: Ints
    slot: Ints
    place: Ints

    def among(self, alive: NDArray[np.bool_]) -> Transitions:
        """Return the moves from states that are alive."""
        kept = alive[self.origin]
        return (
            self if kept.all() else Transitions(self.origin[kept], self.target[kept], self.slot[kept], self.place[kept])
        )


@dataclass(frozen=True)
class Moves:
    """All states in an order in which moves go forward, the first one first; the final ones; and the moves.

    ``slots[state]`` lists the slots taken, where they are taken in the order of their kinds.
    """

    places: tuple[Place, ...]
    used: Ints
    waves: tuple[Transitions, ...]
    stages: int
    kinds: tuple[tuple[int, ...], ...]
    """The slots of each kind; one slot per kind in fixed order."""
    taken: tuple[tuple[int, ...], ...]
    """How many slots of each kind are taken, per state."""

    @classmethod
    def of(cls, goal: Goal) -> Moves:
        """Return the moves of a goal."""
        kinds = _kinds(goal)
        if not goal.free_order:
            taken = [tuple(int(slot < used) for slot in range(goal.stages)) for used in range(goal.stages + 1)]
        else:
            every = product(*(range(len(slots) + 1) for slots in kinds))
            taken = sorted((own for own in every if sum(own) <= goal.stages), key=lambda own: (sum(own), own))
        index = {own: state for state, own in enumerate(taken)}
        places: dict[Place, int] = {}
        waves = []
        for kind, slots in enumerate(kinds):
            moves = []
            for own, origin in index.items():
                target = index.get((*own[:kind], own[kind] + 1, *own[kind + 1 :]))
                if target is not None:
                    place = places.setdefault(_place(goal, slots[0], stage=sum(own)), len(places))
                    moves.append((origin, target, slots[0], place))
            waves.append(moves)
        if not goal.free_order:
            waves = [[move for moves in waves for move in moves]]
        return cls(
            places=tuple(places),
            used=np.array([sum(own) for own in taken]),
            waves=tuple(Transitions(*np.array(moves, dtype=np.int64).T) for moves in waves if moves),
            stages=goal.stages,
            kinds=kinds,
            taken=tuple(taken),
        )

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.taken)

    def room(self, limit: Ints) -> Ints:
        """Return how much the stages after each state can take when a slot takes ``limit[slot]`` at most."""
        if len(self.waves) == 1:
            return np.append(np.cumsum(limit[: self.stages][::-1])[::-1], 0)
        found = []
        for own, used in zip(self.taken, self.used, strict=True):
            left = [limit[slot] for slots, count in zip(self.kinds, own, strict=True) for slot in slots[count:]]
            found.append(sum(sorted(left, reverse=True)[: self.stages - used]))
        return np.array(found, dtype=np.int64)

    def pass_on(self, row: Floats, back: NDArray[np.int32], ideal: int) -> None:
        """Let slots stay empty: what a state has, the states that it moves to have as well."""
        if len(self.waves) == 1:
            least = np.minimum.accumulate(row)
            back[least < row] = ideal
            row[:] = least
            return
        pairs = [pair for wave in self.waves for pair in zip(wave.origin.tolist(), wave.target.tolist(), strict=True)]
        for origin, target in sorted(pairs):
            if row[origin] < row[target]:
                row[target], back[target] = row[origin], ideal

    def into(self, state: int) -> list[tuple[int, int, int]]:
        """Return (origin, kind, place) of the moves to a state."""
        found = []
        for wave in self.waves:
            for at in np.flatnonzero(wave.target == state):
                kind = next(kind for kind, slots in enumerate(self.kinds) if slots[0] == wave.slot[at])
                found.append((int(wave.origin[at]), kind, int(wave.place[at])))
        return found


def _kinds(goal: Goal) -> tuple[tuple[int, ...], ...]:
    if not goal.free_order:
        return tuple((slot,) for slot in range(goal.stages))
    kinds: dict[Place, list[int]] = {}
    for slot in range(goal.slots):
        kinds.setdefault(_place(goal, slot, stage=0), []).append(slot)
    return tuple(map(tuple, kinds.values()))


def _place(goal: Goal, slot: int, *, stage: int) -> Place:
    return Place(
        terms=PLAIN if goal.terms is None else goal.terms[slot],
        capacity_bytes=math.inf if goal.capacity_bytes is None else goal.capacity_bytes[slot],
        in_flight=goal.in_flight[stage] if goal.needs_bytes else 0,
    )
