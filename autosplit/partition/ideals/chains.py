"""The best chain of ideals through a table: dynamic programming over (slots used, ideal).

    best[used + a slot, J] = min over ideals I < J of max(best[used, I], cost of the stage J - I on the slot)

In fixed order "used" is a number of stages; in free order it says how many slots of each kind are taken.
After Tarnawski et al. 2020, "Efficient algorithms for device placement of DNN graph operators", section 5.

The states, and the moves between them, which say what slot the next stage takes:

```
fixed order, 3 stages            free order, 3 stages, slots of kinds a a b        (taken of a, taken of b)

0 --slot 0--> 1 --slot 1--> 2        (0,0) --a--> (1,0) --a--> (2,0)               every move adds one slot,
              2 --slot 2--> 3          |b           |b           |b                and the final states have
                                     (0,1) --a--> (1,1) --a--> (2,1)               three in all
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import FOREVER, Clock, Goal, Place
from autosplit.partition.ideals.stage_costs import StageCosts
from autosplit.partition.ideals.table import Floats, Ints, Table


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
                    place = places.setdefault(goal.place(slots[0], stage=sum(own)), len(places))
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
        kinds.setdefault(goal.place(slot, stage=0), []).append(slot)
    return tuple(map(tuple, kinds.values()))


@dataclass(frozen=True)
class Chain:
    """The best value, and the ideals from the empty set to everything, one more than there are stages.

    ``slots[stage]`` is the slot that the stage took; none are named where each took its own.
    """

    value: float
    ideals: tuple[int, ...]
    slots: tuple[int, ...] = ()


def best_chain(table: Table, *, goal: Goal, clock: Clock = FOREVER) -> Chain | None:
    """Return the best chain within the goal's limits, or None when there is none; OutOfTime where ``clock`` is over."""
    return _Search(table, goal).run(clock)


class _Search:
    """The tables ``best[ideal, state]`` and ``back[ideal, state]``, the ideal at which the last stage began."""

    def __init__(self, table: Table, goal: Goal) -> None:
        self.table = table
        self.moves = Moves.of(goal)
        self.costs = StageCosts(table, goal)
        self.empty = goal.empty
        self.best: Floats = np.full((len(table), self.moves.states), np.inf)
        self.back: NDArray[np.int32] = np.full((len(table), self.moves.states), -1, dtype=np.int32)
        self.total = int(table.weight[-1])
        self.limit = np.array([self._quanta(most) for most in _most(table, goal)], dtype=np.int64)
        self.room = self.moves.room(self.limit)
        self.final = self.moves.used == self.moves.stages

    def _quanta(self, most: float) -> int:
        """Return the weight that a stage may have; each group's was rounded by half a quantum, so allow for all."""
        if most / self.table.quantum >= self.total:
            return self.total
        return math.ceil(most / self.table.quantum) + self.table.graph.size

    def run(self, clock: Clock) -> Chain | None:
        self.best[0, 0] = 0.0
        for ideal in range(len(self.table)):
            clock.check()
            if self.empty:
                self.moves.pass_on(self.best[ideal], self.back[ideal], ideal)
            alive = (self.best[ideal] < np.inf) & (self.total - self.table.weight[ideal] <= self.room)
            waves = [wave for wave in (every.among(alive) for every in self.moves.waves) if len(wave.origin)]
            if waves:
                self._extend(ideal, waves)
        last = len(self.table) - 1
        state = min(np.flatnonzero(self.final).tolist(), key=lambda state: float(self.best[last, state]))
        return self._trace(state) if self.best[last, state] < np.inf else None

    def _extend(self, ideal: int, waves: Sequence[Transitions]) -> None:
        """Try the stages from ``ideal`` to larger ones by all these moves."""
        larger = self._candidates(ideal, waves)
        if not len(larger):
            return
        used = sorted({int(place) for wave in waves for place in wave.place})
        larger, costs = self.costs.of(ideal, larger, [self.moves.places[place] for place in used])
        if not len(larger):
            return
        for wave in waves:
            rows = np.searchsorted(used, wave.place)
            self._update(ideal, larger, wave, costs=costs[rows] if len(used) > 1 else costs)

    def _candidates(self, ideal: int, waves: Sequence[Transitions]) -> Ints:
        """Return the ideals that may end such a stage: not too much weight, and what is left must fit elsewhere."""
        weight, last = self.table.weight, len(self.table) - 1
        room = max(int(self.room[wave.target].max()) for wave in waves)
        most = max(int(self.limit[wave.slot].max()) for wave in waves)
        start = max(ideal + 1, int(np.searchsorted(weight, self.total - room, side="left")))
        stop = int(np.searchsorted(weight, weight[ideal] + most, side="right"))
        if all(self.final[wave.target].all() for wave in waves):
            start = max(start, last)
        return self.table.supersets(ideal, start=start, stop=stop) if start < stop else np.empty(0, dtype=np.int64)

    def _update(self, ideal: int, larger: Ints, wave: Transitions, *, costs: Floats) -> None:
        """Take what is better: ``costs`` has a row for each move, or one for all."""
        before = self.best[ideal, wave.origin]
        if len(before) == 1:
            target = int(wave.target[0])
            value = np.maximum(before[0], costs[0])
            better = value < self.best[larger, target]
            larger = larger[better]
            self.best[larger, target] = value[better]
            self.back[larger, target] = ideal
            return
        first, after = int(wave.target[0]), int(wave.target[-1]) + 1
        dense = after - first == len(wave.target)
        where = (larger, slice(first, after)) if dense else np.ix_(larger, wave.target)
        values = np.maximum(before, costs.T)
        known = self.best[where]
        better = values < known
        self.best[where] = np.minimum(values, known)
        back = self.back[where]
        back[better] = ideal
        self.back[where] = back

    def _trace(self, state: int) -> Chain:
        """Return the chain that ends in ``state``."""
        position = len(self.table) - 1
        value = float(self.best[position, state])
        chain, kinds = [self.table.ideals[position]], []
        while self.moves.used[state]:
            began = int(self.back[position, state])
            state, kind = self._origin(state, began=began, position=position)
            position = began
            chain.append(self.table.ideals[position])
            kinds.append(kind)
        slots = [iter(own) for own in self.moves.kinds]
        return Chain(value, tuple(chain[::-1]), tuple(next(slots[kind]) for kind in reversed(kinds)))

    def _origin(self, state: int, *, began: int, position: int) -> tuple[int, int]:
        """Return the state before and the kind of slot taken by the best move to ``state``."""
        moves = self.moves.into(state)
        if len(moves) > 1:
            values = [self._value(began, position, origin, place) for origin, _, place in moves]
            moves = [moves[int(np.argmin(values))]]
        return moves[0][:2]

    def _value(self, began: int, position: int, origin: int, place: int) -> float:
        before = float(self.best[began, origin])
        if began == position or before == math.inf:
            return before
        _, costs = self.costs.of(began, np.array([position]), [self.moves.places[place]])
        return max(before, float(costs[0, 0])) if costs.size else math.inf


def _most(table: Table, goal: Goal) -> list[float]:
    """Return what a stage on each slot may weigh at most."""
    if table.by_bytes:
        return list(goal.capacity_bytes or (math.inf,) * goal.slots)
    if goal.terms is None:
        return [goal.load_limit_s] * goal.slots
    return [goal.load_limit_s / terms.work for terms in goal.terms]
