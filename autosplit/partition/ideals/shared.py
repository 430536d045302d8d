"""Cuts into stages that share devices: what a device carries is known only when all its stages are.

So cuts are judged whole, by the checker: all of them where they are few, else those that a local search meets, which
moves one group or two to another stage, or swaps the places of devices, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Literal

from autosplit.partition.checker import Costs, check
from autosplit.partition.goal import FOREVER, Clock
from autosplit.partition.graph import Graph
from autosplit.partition.problem import Device, Problem, without_room

_FEW = 1500
"""So many cuts are all judged."""
_JUDGED_WORKS = 400_000
"""A local search ends after judging cuts with so many works in all."""

_Key = tuple[float, ...]
_Candidate = tuple[_Key, tuple[int, ...], tuple[int, ...]]
"""A cut of the groups and an order of devices, with what is compared."""


@dataclass(frozen=True)
class Shared:
    """A cut and the device at each position, None when none fits; its value; and whether all cuts were judged.

    The value is the largest load of a device, or its bytes.
    """

    assignment: tuple[int, ...] | None
    order: tuple[int, ...] | None
    value: float
    exhaustive: bool


def best_shared(
    problem: Problem,
    graph: Graph,
    *,
    seeds: Sequence[tuple[int, ...]],
    stages: int,
    least: Literal["load", "bytes"],
    empty: bool,
    clock: Clock = FOREVER,
) -> Shared:
    """Return the best cut into ``stages`` stages that is found to fit the devices."""
    judge = _Judge(problem, graph, stages=stages, least=least, empty=empty, clock=clock)
    orders = judge.orders(most=_FEW)
    cuts = None if orders is None else judge.few_cuts(most=_FEW // len(orders))
    found: _Candidate | None = None
    if orders is not None and cuts is not None:
        found = min(((judge.key(cut, order), cut, order) for order in orders for cut in cuts), default=None)
    else:
        starts = [tuple(seed[graph.group_of.index(group)] for group in range(graph.size)) for seed in seeds]
        found = min((judge.improved(start) for start in dict.fromkeys(starts)), default=None)
    if found is None or found[0][0] > 0:
        return Shared(None, None, math.inf, exhaustive=cuts is not None)
    key, cut, order = found
    return Shared(tuple(cut[group] for group in graph.group_of), order, key[1], exhaustive=cuts is not None)


class _Judge:
    """Judges cuts of groups; counts the works that it has judged."""

    def __init__(
        self,
        problem: Problem,
        graph: Graph,
        *,
        stages: int,
        least: Literal["load", "bytes"],
        empty: bool,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.graph, self.stages, self.least, self.empty = graph, stages, least, empty
        self.positions = problem.places(stages)
        if least == "bytes":
            problem = without_room(problem, stages=stages)
        self.problem = problem
        self.before = [sorted(tails) for tails in graph.predecessors()]
        self.after = [sorted(heads) for heads in graph.successors()]
        self.left = max(_JUDGED_WORKS // len(problem.works), 200)

    def key(self, cut: Sequence[int], order: tuple[int, ...]) -> _Key:
        """Return what is compared: the bytes beyond the capacities, then the worst device, then all others."""
        stage_of = [cut[group] for group in self.graph.group_of]
        costs = check(self.problem, stage_of, order=order, stages=self.stages)
        self.left -= 1
        if self.least == "bytes":
            return (0.0, *sorted(map(float, costs.device_bytes), reverse=True))
        return (self._over(costs), *sorted(costs.device_loads_s, reverse=True), float(max(costs.device_bytes)))

    def _over(self, costs: Costs) -> float:
        given = [(self.problem.devices or ())[device].capacity_bytes for device in costs.order] if self.limited else []
        pairs = zip(costs.device_bytes, given, strict=False)
        return float(sum(max(needed - limit, 0) for needed, limit in pairs if limit is not None))

    @property
    def limited(self) -> bool:
        """Whether any device has a capacity."""
        return self.problem.capacity_bytes is not None

    def orders(self, *, most: int) -> list[tuple[int, ...]] | None:
        """Return the orders of devices that differ, None when they may be more than ``most``."""
        devices = self.problem.devices
        if devices is None or not self.problem.free_order:
            return [tuple(range(self.positions))]
        if math.perm(len(devices), self.positions) > most:
            return None
        kinds: dict[tuple[Device, ...], tuple[int, ...]] = {}
        for order in permutations(range(len(devices)), self.positions):
            kinds.setdefault(tuple(devices[device] for device in order), order)
        return list(kinds.values())

    def few_cuts(self, *, most: int) -> list[tuple[int, ...]] | None:
        """Return all legal cuts, None when they are more than ``most``."""
        cuts: list[tuple[int, ...]] = [()]
        for tails in self.before:
            cuts = [
                (*cut, stage) for cut in cuts for stage in range(max((cut[t] for t in tails), default=0), self.stages)
            ]
            # Each cut so far can be completed, so there will be no fewer.
            if len(cuts) > most * (1 if self.empty else self.stages):
                return None
        cuts = [cut for cut in cuts if self.empty or len(set(cut)) == self.stages]
        return cuts if len(cuts) <= most else None

    def improved(self, cut: tuple[int, ...]) -> _Candidate:
        """Return the best that moves lead to from a cut, and its key."""
        order = tuple(range(self.positions))
        best = (self.key(cut, order), cut, order)
        better: _Candidate | None = best
        while better is not None:
            best = better
            better = self._first_better(best, self._neighbours(*best[1:]))
            if better is None:
                # The first of two moves may leave a stage empty that the second fills.
                pairs = (pair for first in self._neighbours(*best[1:]) for pair in self._neighbours(*first))
                better = self._first_better(best, pairs)
        return best

    def _first_better(
        self, best: _Candidate, candidates: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> _Candidate | None:
        for candidate in candidates:
            if self.left <= 0 or self.clock.over:
                return None
            if not self.empty and len(set(candidate[0])) < self.stages:
                continue
            key = self.key(*candidate)
            if key < best[0]:
                return (key, *candidate)
        return None

    def _neighbours(
        self, cut: tuple[int, ...], order: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        devices = self.problem.devices
        if devices is not None and self.problem.free_order:
            unused = [device for device in range(len(devices)) if device not in order]
            for left, right in combinations((*order, *unused), 2):
                if left in order and devices[left] != devices[right]:
                    swap = {left: right, right: left}
                    yield cut, tuple(swap.get(device, device) for device in order)
        for group, own in enumerate(cut):
            first = max((cut[tail] for tail in self.before[group]), default=0)
            last = min((cut[head] for head in self.after[group]), default=self.stages - 1)
            for stage in sorted(range(first, last + 1), key=lambda stage: (abs(stage - own), stage)):
                if stage != own:
                    yield (*cut[:group], stage, *cut[group + 1 :]), order
