"""The best chain of ideals through a table: dynamic programming over (stages used, ideal).

    best[used + 1, J] = min over ideals I < J of max(best[used, I], cost of the stage J - I as stage ``used``)

After Tarnawski et al. 2020, "Efficient algorithms for device placement of DNN graph operators", section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import FOREVER, PLAIN, CostBasis, Goal, Timer
from autosplit.partition.ideals.table import Floats, IdealTable, Ints


@dataclass(frozen=True)
class IdealChain:
    """The best value, and the ideals from the empty set to everything, one more than there are stages."""

    value: float
    ideals: tuple[int, ...]


def best_chain(table: IdealTable, *, goal: Goal, clock: Timer = FOREVER) -> IdealChain | None:
    """Return the best chain within the goal's limits, or None; raise OutOfTime when ``clock`` has expired."""
    return _ChainSearch(table, goal).run(clock)


class _ChainSearch:
    """The tables ``best[ideal, used]`` and ``back[ideal, used]``, the ideal at which the last stage began."""

    def __init__(self, table: IdealTable, goal: Goal) -> None:
        self.table, self.goal = table, goal
        self.costs = _StageCosts(table, goal)
        self.best: Floats = np.full((len(table), goal.stages + 1), np.inf)
        self.back: NDArray[np.int32] = np.full(self.best.shape, -1, dtype=np.int32)
        self.total = int(table.weight[-1])
        self.limit: Ints = np.array([self._quanta(most) for most in _most(table, goal)], dtype=np.int64)
        # What the stages that are left can take, by how many are used.
        self.room: Ints = np.append(np.cumsum(self.limit[::-1])[::-1], 0)
        bases = [goal.cost_basis(stage) for stage in range(goal.stages)]
        self.bases = list(dict.fromkeys(bases))
        self.basis_of: Ints = np.array([self.bases.index(basis) for basis in bases])

    def _quanta(self, most: float) -> int:
        """Return the weight that a stage may have; each group's was rounded by half a quantum, so allow for all."""
        if most / self.table.quantum >= self.total:
            return self.total
        return math.ceil(most / self.table.quantum) + self.table.graph.size

    def run(self, clock: Timer) -> IdealChain | None:
        self.best[0, 0] = 0.0
        for ideal in range(len(self.table)):
            clock.check()
            if self.goal.empty:
                self._pass_on(ideal)
            alive = (self.best[ideal] < np.inf) & (self.total - self.table.weight[ideal] <= self.room)
            used = np.flatnonzero(alive[:-1])
            if len(used):
                self._extend(ideal, used)
        return self._trace() if self.best[-1, -1] < np.inf else None

    def _pass_on(self, ideal: int) -> None:
        """Allow empty stages: an ideal that is reached with some stages is reached with more."""
        least = np.minimum.accumulate(self.best[ideal])
        self.back[ideal, least < self.best[ideal]] = ideal
        self.best[ideal] = least

    def _extend(self, ideal: int, used: Ints) -> None:
        """Try the stages from ``ideal`` to larger ones behind so many that are used."""
        larger = self._candidates(ideal, used)
        if not len(larger):
            return
        bases = np.unique(self.basis_of[used])
        larger, costs = self.costs.of(ideal, larger, [self.bases[index] for index in bases.tolist()])
        if not len(larger):
            return
        if len(bases) > 1:
            costs = costs[np.searchsorted(bases, self.basis_of[used])]
        values = np.maximum(self.best[ideal, used], costs.T)
        where = np.ix_(larger, used + 1)
        known = self.best[where]
        better = values < known
        self.best[where] = np.where(better, values, known)
        self.back[where] = np.where(better, ideal, self.back[where])

    def _candidates(self, ideal: int, used: Ints) -> Ints:
        """Return the ideals that may end such a stage: not too much weight, and what is left must fit elsewhere."""
        weight, last = self.table.weight, len(self.table) - 1
        room, most = int(self.room[used + 1].max()), int(self.limit[used].max())
        start = max(ideal + 1, int(np.searchsorted(weight, self.total - room, side="left")))
        stop = int(np.searchsorted(weight, weight[ideal] + most, side="right"))
        if used[0] == self.goal.stages - 1:
            start = max(start, last)
        return self.table.supersets(ideal, start=start, stop=stop) if start < stop else np.empty(0, dtype=np.int64)

    def _trace(self) -> IdealChain:
        """Return the chain that all stages make."""
        position = len(self.table) - 1
        chain = [self.table.ideals[position]]
        for used in range(self.goal.stages, 0, -1):
            position = int(self.back[position, used])
            chain.append(self.table.ideals[position])
        return IdealChain(float(self.best[-1, -1]), tuple(chain[::-1]))


class _StageCosts:
    """Costs of the stages from one ideal to larger ones, for one goal."""

    def __init__(self, table: IdealTable, goal: Goal) -> None:
        self.table, self.goal = table, goal
        self._needs_loads = goal.least == "load" or math.isfinite(goal.load_limit_s)

    def of(self, ideal: int, larger: Ints, bases: Sequence[CostBasis]) -> tuple[Ints, Floats]:
        """Return which of ``larger`` may end a stage on one of the bases at least, and the costs: [place, larger].

        Where a stage is beyond a limit its cost is infinite.
        """
        if not self._needs_loads:
            return larger, self._bytes(ideal, larger, bases)
        loads = self._loads(ideal, larger, bases)
        within = loads <= self.goal.load_limit_s
        if not within.all():
            kept = within.any(axis=0)
            larger, loads = larger[kept], np.where(within, loads, np.inf)[:, kept]
        if not self.goal.needs_bytes or not len(larger):
            return larger, loads
        needed = self._bytes(ideal, larger, bases)
        if self.goal.least == "bytes":
            return larger, np.where(np.isfinite(loads), needed, np.inf)
        return larger, np.where(np.isfinite(needed), loads, np.inf)

    def _loads(self, ideal: int, larger: Ints, bases: Sequence[CostBasis]) -> Floats:
        """Return the loads, one row for all bases where these are plain."""
        works_s, nets_s = self.table.works_s(ideal, larger), self.table.nets_s(ideal, larger)
        if all(basis.terms == PLAIN for basis in bases):
            return (works_s + nets_s)[None, :]
        return np.stack([basis.terms.work * works_s + basis.terms.net * nets_s for basis in bases])

    def _bytes(self, ideal: int, larger: Ints, bases: Sequence[CostBasis]) -> Floats:
        """Return what the stages need, infinite beyond the capacity."""
        fixed, resident = self.table.static_and_transient(ideal, larger), self.table.residents(ideal, larger)
        in_flight = np.array([[basis.in_flight] for basis in bases])
        capacity = np.array([[basis.capacity_bytes] for basis in bases])
        needed = fixed + in_flight * resident
        return np.where(needed <= capacity, needed, np.inf)


def _most(table: IdealTable, goal: Goal) -> list[float]:
    """Return what each stage may weigh at most."""
    if table.by_bytes:
        return list(goal.capacity_bytes or (math.inf,) * goal.stages)
    if goal.terms is None:
        return [goal.load_limit_s] * goal.stages
    return [goal.load_limit_s / terms.work for terms in goal.terms]
