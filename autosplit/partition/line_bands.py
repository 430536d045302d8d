"""Lengths of a line's stages by place, and the dynamic programs over them that cuts come from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autosplit.partition.line import Line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SHARES = ((0.0, (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)), (1.0, (1.0, 1.05)))
"""Shares of the transfers in a stage's length, and how far above the shortest possible the longest may be."""
_TIES = 1e-9


@dataclass(frozen=True)
class Place:
    """Where a stage may lie: how slow its device is, what it holds, and what it may recompute, the fastest first.

    Each of ``options`` is a name and which part of its forwards the stage does again. ``limit`` is in bytes, None where
    there is none.
    """

    scale: float
    in_flight: int
    options: tuple[tuple[str, float], ...]
    limit: float | None


class Bands:
    """Lengths of the stages at each place, by how many units they have and where they end: places alike share one."""

    def __init__(self, line: Line, places: Sequence[Place], *, widest: int, least_bytes: bool = False) -> None:
        self.line, self.least_bytes = line, least_bytes
        ends, lengths = np.arange(line.size + 1), np.arange(1, widest + 1)[:, None]
        self.tail: Ints = ends - lengths
        self.none = self.tail < 0
        self.tail = np.where(self.none, 0, self.tail)
        self.ends = np.broadcast_to(ends, self.tail.shape)
        self.forward_s: Floats = line.forward_s[self.ends] - line.forward_s[self.tail]
        self.works_s: Floats = self.forward_s + line.backward_s[self.ends] - line.backward_s[self.tail]
        self._bytes: dict[str, tuple[Floats, Floats, Floats]] = {}
        kinds = list(dict.fromkeys(places))
        self.kind = [kinds.index(place) for place in places]
        self.cost = [self._of(place) for place in kinds]

    def chains(self) -> Iterator[tuple[int, ...]]:
        """Yield the cuts that come into question."""
        known = set()
        crossing_s = self.line.cut_s[self.tail] + self.line.cut_s[self.ends]
        for share, more in _SHARES:
            costs = self.cost if not share else [own + share * crossing_s for own in self.cost]
            shortest = self._program(costs, highest=True)
            if shortest is None:
                return
            value, chain = shortest
            found = [chain, *reversed(list(self._least(costs, value, more)))]
            for each in found:
                if each not in known:
                    known.add(each)
                    yield each

    def _least(self, costs: Sequence[Floats], value: float, more: Sequence[float]) -> Iterator[tuple[int, ...]]:
        """Yield the cut with the least sum for each limit on the longest stage, from the loosest to the tightest.

        A cut that keeps a tighter limit as well is the one that would be found for it: it is not sought again.
        """
        loosest = value * max(more) * (1 + 1e-12)
        rows = max(int(np.flatnonzero((own <= loosest).any(axis=1)).max(initial=-1)) for own in costs) + 1
        costs = [own[:rows] for own in costs]
        summed = [own + _TIES * own * own / (value or 1.0) for own in costs]
        chain, longest = None, math.inf
        for limit in sorted((value * each * (1 + 1e-12) for each in more), reverse=True):
            if longest > limit:
                within = [np.where(own <= limit, each, np.inf) for own, each in zip(costs, summed, strict=True)]
                least = self._program(within, highest=False)
                if least is None:
                    return
                chain = least[1]
                longest = self._longest(costs, chain)
            assert chain is not None, "what keeps no limit was sought"
            yield chain

    def _longest(self, costs: Sequence[Floats], chain: tuple[int, ...]) -> float:
        """Return the longest stage of a cut."""
        stages = zip(self.kind, pairwise(chain), strict=True)
        return max(float(costs[kind][stop - start - 1, stop]) for kind, (start, stop) in stages)

    def highest(self) -> tuple[int, ...] | None:
        """Return the cut whose highest stage is lowest."""
        found = self._program(self.cost, highest=True)
        return None if found is None else found[1]

    def _of(self, place: Place) -> Floats:
        cost = np.full(self.tail.shape, np.inf)
        for option, again in reversed(place.options):
            if place.limit is None:
                cost = place.scale * (self.works_s + again * self.forward_s)
                continue
            fixed, each, least = self._held(option)
            needed = np.maximum(fixed + place.in_flight * each, least)
            if self.least_bytes:
                cost = np.minimum(cost, needed / place.limit)
            else:
                cost = np.where(needed <= place.limit, place.scale * (self.works_s + again * self.forward_s), cost)
        cost[self.none] = np.inf
        return cost

    def _held(self, option: str) -> tuple[Floats, Floats, Floats]:
        if option not in self._bytes:
            table = self.line.table(option)
            fixed, each, least = (own[self.tail, self.ends] for own in (table.fixed, table.each, table.least))
            self._bytes[option] = fixed, each, least
        return self._bytes[option]

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
            own = join(earlier[end : end + most][::-1], costs[kind][:, end])
            chain.append(end - 1 - int(own.argmin()))
        return float(best[-1]), tuple(chain[::-1])
