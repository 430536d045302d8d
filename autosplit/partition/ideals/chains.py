"""The best chain of ideals through a table: dynamic programming over (stages used, ideal).

    best[used + 1, J] = min over ideals I < J of max(best[used, I], cost of the stage J - I as stage ``used``)

After Tarnawski et al. 2020, "Efficient algorithms for device placement of DNN graph operators", section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import FOREVER, Goal, Timer
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
        self.best: Floats = np.full((len(table), goal.stages + 1), np.inf)
        self.back: NDArray[np.int32] = np.full(self.best.shape, -1, dtype=np.int32)
        self.total = int(table.weight[-1])
        self.limit = self._quanta(goal.capacity_bytes if table.by_bytes else goal.load_limit_s)

    def _quanta(self, most: float) -> int:
        """Return the weight that a stage may have; each group's was rounded by half a quantum, so allow for all."""
        if most / self.table.quantum >= self.total:
            return self.total
        return math.ceil(most / self.table.quantum) + self.table.graph.size

    def run(self, clock: Timer) -> IdealChain | None:
        self.best[0, 0] = 0.0
        room = self.limit * np.arange(self.goal.stages, -1, -1)  # of the stages that are left
        for ideal in range(len(self.table)):
            clock.check()
            if self.goal.empty:
                self._pass_on(ideal)
            alive = (self.best[ideal] < np.inf) & (self.total - self.table.weight[ideal] <= room)
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
        larger, costs = self._costs(ideal, larger) if len(larger) else (larger, np.zeros(0))
        if not len(larger):
            return
        values = np.maximum(self.best[ideal, used], costs[:, None])
        where = np.ix_(larger, used + 1)
        known = self.best[where]
        better = values < known
        self.best[where] = np.where(better, values, known)
        self.back[where] = np.where(better, ideal, self.back[where])

    def _candidates(self, ideal: int, used: Ints) -> Ints:
        """Return the ideals that may end such a stage: not too much weight, and what is left must fit elsewhere."""
        weight, last = self.table.weight, len(self.table) - 1
        room = self.limit * (self.goal.stages - 1 - int(used[0]))
        start = max(ideal + 1, int(np.searchsorted(weight, self.total - room, side="left")))
        stop = int(np.searchsorted(weight, weight[ideal] + self.limit, side="right"))
        if used[0] == self.goal.stages - 1:
            start = max(start, last)
        return self.table.supersets(ideal, start=start, stop=stop) if start < stop else np.empty(0, dtype=np.int64)

    def _costs(self, ideal: int, larger: Ints) -> tuple[Ints, Floats]:
        """Return which of ``larger`` may end a stage that begins at ``ideal``, and what it costs then."""
        table, goal = self.table, self.goal
        held = table.static[larger] - table.static[ideal]
        if goal.least == "bytes" and math.isinf(goal.load_limit_s):
            kept = held <= goal.capacity_bytes
            return larger[kept], held[kept]
        loads = table.time_s[larger] - table.time_s[ideal] + table.tensors.stage_cost(ideal, larger)
        kept = (loads <= goal.load_limit_s) & (held <= goal.capacity_bytes)
        return larger[kept], (held if goal.least == "bytes" else loads)[kept]

    def _trace(self) -> IdealChain:
        """Return the chain that all stages make."""
        position = len(self.table) - 1
        chain = [self.table.ideals[position]]
        for used in range(self.goal.stages, 0, -1):
            position = int(self.back[position, used])
            chain.append(self.table.ideals[position])
        return IdealChain(float(self.best[-1, -1]), tuple(chain[::-1]))
