"""Better cuts nearby: single groups that change stages, and pairs that swap, between any two stages.

Chains of ideals near a chain reach only what moves across neighbouring boundaries. In wide graphs under tight
capacities the way to a better cut often leads through stages far apart. The search goes downhill until no step
improves, then some random steps away and downhill again; the random numbers are the same every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autosplit.partition.goal import Clock, Goal
from autosplit.partition.graph import Graph
from autosplit.partition.ideals.chains import Chain

_KICKS = 100
_STRENGTH = 6
"""How often the search goes away from the best cut, and at most how many groups then change stages."""

Key = tuple[float, tuple[float, ...]]
"""Bytes beyond the capacities, and the loads from the largest down: less is better."""


def best_nearby(graph: Graph, ideals: Sequence[int], *, goal: Goal, clock: Clock) -> Chain | None:
    """Return the best chain that steps from the chain of ``ideals`` lead to, or None when none fits the capacities."""
    stages = [later & ~earlier for earlier, later in pairwise(ideals)]
    search = _Descent(graph, goal, clock)
    chance = random.Random(0)
    best = search.downhill(stages)
    for _ in range(_KICKS):
        other = search.downhill(search.kicked(best, chance))
        if search.key(other) < search.key(best):
            best = other
    excess, loads = search.key(best)
    if excess:
        return None
    chain = [0]
    for inside in best:
        chain.append(chain[-1] | inside)
    return Chain(loads[0], tuple(chain))


class _Descent:
    """Stages as sets of groups, one bit each."""

    def __init__(self, graph: Graph, goal: Goal, clock: Clock) -> None:
        self.graph, self.goal, self.clock = graph, goal, clock
        self.tensors = [(_bits(tensor.pins), tensor.cost_s) for tensor in graph.tensors]
        self.before = [_bits(tails) for tails in graph.predecessors()]
        self.after = [_bits(heads) for heads in graph.successors()]
        self.costs: dict[tuple[int, int], tuple[float, float]] = {}

    def key(self, stages: Sequence[int]) -> Key:
        """Return how good a cut is."""
        costs = [self._cost(inside, stage) for stage, inside in enumerate(stages)]
        return sum(excess for excess, _ in costs), tuple(sorted((load for _, load in costs), reverse=True))

    def downhill(self, stages: list[int]) -> list[int]:
        """Return the cut after the best step, again and again, until none improves."""
        own = self.key(stages)
        while True:
            self.clock.check()
            steps = [(self.key(other), other) for other in self._steps(stages)]
            key, other = min(steps, default=(own, stages))
            if key >= own:
                return stages
            own, stages = key, other

    def kicked(self, stages: list[int], chance: random.Random) -> list[int]:
        """Return the cut after a few random steps."""
        for _ in range(chance.randint(2, _STRENGTH)):
            steps = list(self._shifts(stages, range(len(stages))))
            stages = chance.choice(steps) if steps else stages
        return stages

    def _steps(self, stages: list[int]) -> Iterator[list[int]]:
        """Yield what can help: steps that concern the stage with the largest excess, or else the largest load."""
        worst = max(range(len(stages)), key=lambda stage: self._cost(stages[stage], stage))
        yield from self._shifts(stages, (worst,))
        for stage, inside in enumerate(stages):
            if stage != worst:
                for left in _groups(stages[worst]):
                    for right in _groups(inside):
                        other = _moved(_moved(stages, left, worst, stage), right, stage, worst)
                        if self._fits(left, stage, other) and self._fits(right, worst, other):
                            yield other

    def _shifts(self, stages: list[int], concerned: Sequence[int]) -> Iterator[list[int]]:
        for start, inside in enumerate(stages):
            for group in _groups(inside):
                for end in range(len(stages)) if start in concerned else concerned:
                    if end != start and (self.goal.empty or inside != 1 << group):
                        other = _moved(stages, group, start, end)
                        if self._fits(group, end, other):
                            yield other

    def _fits(self, group: int, stage: int, stages: Sequence[int]) -> bool:
        """Tell whether a group's predecessors are not later, and its successors not earlier, than its stage."""
        later = sum(stages[stage + 1 :])
        earlier = sum(stages[:stage])
        return not self.before[group] & later and not self.after[group] & earlier

    def _cost(self, inside: int, stage: int) -> tuple[float, float]:
        """Return the bytes beyond the capacity, and the load."""
        if (inside, stage) not in self.costs:
            load = sum(self.graph.times_s[group] for group in _groups(inside))
            load += sum(cost for pins, cost in self.tensors if pins & inside and pins & ~inside)
            self.costs[inside, stage] = max(self._bytes(inside, stage), 0.0), load
        return self.costs[inside, stage]

    def _bytes(self, inside: int, stage: int) -> float:
        """Return the bytes beyond the capacity, negative where there is room."""
        if self.goal.capacity_bytes is None:
            return 0.0
        graph, groups = self.graph, _groups(inside)
        kept = sum(graph.resident_bytes[group] for group in groups)
        for storage in graph.storages:
            ends = _bits(storage.consumers)
            produced = storage.producer is not None and inside >> storage.producer & 1
            crossing = ends & ~inside if produced else ends & inside
            if crossing or _bits(storage.savers) & inside:
                kept += storage.bytes
        fixed = sum(graph.static_bytes[group] for group in groups)
        transient = max((graph.transient_bytes[group] for group in groups), default=0)
        return fixed + self.goal.in_flight[stage] * kept + transient - self.goal.capacity_bytes[stage]


def _moved(stages: Sequence[int], group: int, start: int, end: int) -> list[int]:
    other = list(stages)
    other[start] &= ~(1 << group)
    other[end] |= 1 << group
    return other


def _bits(groups: frozenset[int] | set[int]) -> int:
    return sum(1 << group for group in groups)


def _groups(inside: int) -> list[int]:
    return [group for group in range(inside.bit_length()) if inside >> group & 1]
