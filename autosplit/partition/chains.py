"""The best chain of ideals through a table: dynamic programming over (stages used, ideal).

    best[stages + 1, J] = min over ideals I < J of max(best[stages, I], cost of the stage J - I)

After Tarnawski et al. 2020, "Efficient algorithms for device placement of DNN graph operators", section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.table import Floats, Ints, Table


@dataclass(frozen=True)
class Goal:
    """What to minimise over the stages, the maximum load or the maximum bytes, and within which limits.

    ``in_flight`` has one entry per stage and so sets how many there are. ``empty`` allows stages without a group.
    """

    in_flight: tuple[int, ...]
    least: str = "load"
    load_limit_s: float = math.inf
    capacity_bytes: tuple[float, ...] | None = None
    empty: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.in_flight)

    @property
    def needs_bytes(self) -> bool:
        """Whether bytes matter at all."""
        return self.least == "bytes" or self.capacity_bytes is not None


@dataclass(frozen=True)
class Chain:
    """The best value, and the ideals from the empty set to everything, one more than there are stages."""

    value: float
    ideals: tuple[int, ...]


def best_chain(table: Table, *, goal: Goal) -> Chain | None:
    """Return the best chain within the goal's limits, or None when there is none."""
    best = np.full((goal.stages + 1, len(table)), np.inf)
    back = np.full((goal.stages + 1, len(table)), -1, dtype=np.int32)
    best[0, 0] = 0.0
    windows = _Windows(table, goal)
    for ideal in range(len(table)):
        if goal.empty:
            for used in range(goal.stages):
                if best[used, ideal] < best[used + 1, ideal]:
                    best[used + 1, ideal], back[used + 1, ideal] = best[used, ideal], ideal
        used_counts = windows.live(ideal, np.flatnonzero(best[: goal.stages, ideal] < np.inf))
        if len(used_counts):
            larger = windows.candidates(ideal, used=int(used_counts[0]))
            if len(larger):
                _extend(table, goal, ideal=ideal, larger=larger, used_counts=used_counts, best=best, back=back)
    if not np.isfinite(best[-1, -1]):
        return None
    chain, position = [table.ideals[-1]], len(table) - 1
    for used in range(goal.stages, 0, -1):
        position = int(back[used, position])
        chain.append(table.ideals[position])
    return Chain(float(best[-1, -1]), tuple(chain[::-1]))


def _extend(
    table: Table,
    goal: Goal,
    *,
    ideal: int,
    larger: Ints,
    used_counts: Ints,
    best: Floats,
    back: NDArray[np.int32],
) -> None:
    """Try the stages from ``ideal`` to each of ``larger`` as the next stage after each number of stages used."""
    loads = table.loads(ideal, larger) if goal.least == "load" or math.isfinite(goal.load_limit_s) else None
    if loads is not None:
        kept = loads <= goal.load_limit_s
        larger, loads = larger[kept], loads[kept]
    if goal.needs_bytes:
        fixed, resident = table.static_and_transient(ideal, larger), table.residents(ideal, larger)
    for used in used_counts:
        fits: NDArray[np.bool_] | slice = slice(None)
        cost = loads
        if goal.needs_bytes:
            needed = fixed + goal.in_flight[used] * resident
            cost = needed if goal.least == "bytes" else loads
            if goal.capacity_bytes is not None:
                fits = needed <= goal.capacity_bytes[used]
        assert cost is not None
        target = larger[fits]
        value = np.maximum(best[used, ideal], cost[fits])
        better = value < best[used + 1, target]
        target = target[better]
        best[used + 1, target] = value[better]
        back[used + 1, target] = ideal


class _Windows:
    """Which ideals can follow which: no stage weighs more than its limit, and the rest must fit in the stages left."""

    def __init__(self, table: Table, goal: Goal) -> None:
        self.table = table
        self.goal = goal
        total = int(table.weight[-1])
        most = max(goal.capacity_bytes or (math.inf,)) if table.by_bytes else goal.load_limit_s
        # Each group's weight was rounded by at most half a quantum: allow for all of them.
        self.limit = total if most / table.quantum >= total else math.ceil(most / table.quantum) + table.graph.size
        self.total = total

    def live(self, ideal: int, used_counts: Ints) -> Ints:
        """Keep the stage counts after which the remaining stages can take the remaining weight."""
        left = self.total - self.table.weight[ideal]
        return used_counts[left <= (self.goal.stages - used_counts) * self.limit]

    def candidates(self, ideal: int, *, used: int) -> Ints:
        """Return the ideals that may end the stage that begins at ``ideal`` after ``used`` or more stages."""
        weight = self.table.weight
        least = self.total - (self.goal.stages - used - 1) * self.limit
        start = max(ideal + 1, int(np.searchsorted(weight, least, side="left")))
        stop = int(np.searchsorted(weight, weight[ideal] + self.limit, side="right"))
        if used == self.goal.stages - 1:
            start = max(start, len(self.table) - 1)
        return self.table.supersets(ideal, start=start, stop=stop) if start < stop else np.empty(0, dtype=np.int64)
