"""Lengths of a line's stages by place, and the dynamic programs over them that cuts come from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autosplit.partition.line.line import Line

Floats = NDArray[np.float64]

_SHARES = ((0.0, (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)), (1.0, (1.0, 1.05)))
"""Shares of the transfers in a stage's length, and how far above the shortest possible the longest may be."""
_TIES = 1e-9


@dataclass(frozen=True)
class StageSlot:
    """Where a stage may lie: how slow its device is, what it holds, and what it may recompute, the fastest first.

    Each of ``options`` is a name and the share of the forward that is recomputed. ``limit`` is in bytes, None if there
    is no limit.
    """

    scale: float
    in_flight: int
    options: tuple[tuple[str, float], ...]
    limit: float | None


class IntervalDP:
    """Lengths of the stages at each place, by how many units they have and where they end: slots alike share one."""

    def __init__(self, line: Line, slots: Sequence[StageSlot], *, widest: int, least_bytes: bool = False) -> None:
        self.line, self.widest, self.least_bytes = line, widest, least_bytes
        self.spans = line.spans(widest)
        self._seconds: dict[tuple[float, float], Floats] = {}
        kinds = list(dict.fromkeys(slots))
        self.kind = [kinds.index(slot) for slot in slots]
        self.cost = [self._of(slot) for slot in kinds]

    def chains(self) -> Iterator[tuple[int, ...]]:
        """Yield the cuts that come into question."""
        known = set()
        crossing_s = self.spans.crossing_s[: self.widest]
        for share, more in _SHARES:
            costs = self.cost if not share else [cost + share * crossing_s for cost in self.cost]
            shortest = self._program(costs, highest=True)
            if shortest is None:
                return
            value, chain = shortest
            chains = [chain, *reversed(list(self._least(costs, value, more)))]
            for each in chains:
                if each not in known:
                    known.add(each)
                    yield each

    def _least(self, costs: Sequence[Floats], value: float, more: Sequence[float]) -> Iterator[tuple[int, ...]]:
        """Yield the cut with the least sum for each limit on the longest stage, from the loosest to the tightest.

        A cut that keeps a tighter limit as well is the one that would be found for it: it is not sought again.
        """
        loosest = value * max(more) * (1 + 1e-12)
        rows = max(int(np.flatnonzero((cost <= loosest).any(axis=1)).max(initial=-1)) for cost in costs) + 1
        costs = [cost[:rows] for cost in costs]
        summed = [cost + _TIES * cost * cost / (value or 1.0) for cost in costs]
        chain, longest = None, math.inf
        for limit in sorted((value * each * (1 + 1e-12) for each in more), reverse=True):
            if longest > limit:
                within = [np.where(cost <= limit, each, np.inf) for cost, each in zip(costs, summed, strict=True)]
                least = self._program(within, highest=False)
                if least is None:
                    return
                chain = least[1]
                stages = zip(self.kind, pairwise(chain), strict=True)
                longest = max(float(costs[kind][stop - start - 1, stop]) for kind, (start, stop) in stages)
            assert chain is not None, "what keeps no limit was sought"
            yield chain

    def highest(self) -> tuple[int, ...] | None:
        """Return the cut whose highest stage is lowest."""
        best = self._program(self.cost, highest=True)
        return None if best is None else best[1]

    def _of(self, slot: StageSlot) -> Floats:
        cost = np.full((self.widest, self.line.size + 1), np.inf)
        for option, again in reversed(slot.options):
            if slot.limit is None:
                cost = self._works_s(slot.scale, again).copy()
                continue
            fixed, each, least = (array[: self.widest] for array in self.spans.held(option))
            needed = each * slot.in_flight
            needed += fixed
            np.maximum(needed, least, out=needed)
            if self.least_bytes:
                needed /= slot.limit
                np.minimum(cost, needed, out=cost)
            else:
                np.copyto(cost, self._works_s(slot.scale, again), where=needed <= slot.limit)
        cost[self.spans.none[: self.widest]] = np.inf
        return cost

    def _works_s(self, scale: float, again: float) -> Floats:
        """Return what stages take on a device that is so slow, with a part of their forwards done again."""
        if (scale, again) not in self._seconds:
            works_s, forward_s = (array[: self.widest] for array in (self.spans.works_s, self.spans.forward_s))
            self._seconds[scale, again] = scale * (works_s + again * forward_s)
        return self._seconds[scale, again]

    def _program(self, costs: Sequence[Floats], *, highest: bool) -> tuple[float, tuple[int, ...]] | None:
        """Return the value and bounds of the best row of stages; ``costs`` has an entry per kind of place."""
        join = np.maximum if highest else np.add
        most, size = len(costs[0]), self.line.size + 1
        # The value of the best row of stages so far that ends at each place, behind more than a stage reaches back to.
        best = np.full(most + size, np.inf)
        best[most] = 0.0
        # Row n is what stands in front of a stage of n + 1 units that ends at each column.
        before, value = sliding_window_view(best, size)[most - 1 :: -1], np.empty((most, size))
        known = []
        for kind in self.kind:
            known.append(best.copy())
            join(before, costs[kind], out=value)
            np.minimum.reduce(value, axis=0, out=best[most:])
        if not math.isfinite(best[-1]):
            return None
        chain = [size - 1]
        for kind, earlier in zip(reversed(self.kind), reversed(known), strict=True):
            end = chain[-1]
            joined = join(earlier[end : end + most][::-1], costs[kind][:, end])
            chain.append(end - 1 - int(joined.argmin()))
        return float(best[-1]), tuple(chain[::-1])
