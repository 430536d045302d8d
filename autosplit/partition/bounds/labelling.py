"""Boundaries as labels of groups, and the order in which the groups can be eliminated one by one.

An ideal is a labelling of all groups by 0 (inside) and 1 (outside) in which no edge goes from 1 to 0; two nested ideals
are one by 0, 1 (between them) and 2. What a labelling costs is a sum of terms that look at one or two variables each:

    time of a group, by its label  +  crossing cost of a pair (low, high), where label(low) < label(high)

A tensor of two pins is such a pair. One of more pins crosses where its lowest and its highest label differ: these are
labels of pins where one pin precedes all others, or follows them; else those of a helper variable below, or above, all.

Sums of this form are optimised by eliminating variables: what the terms of a variable say about its neighbours is
written down as one term of these neighbours (Bertele & Brioschi 1972, "Nonserial Dynamic Programming"). The work grows
with the number of neighbours at that moment, which stays small where a graph is long and thin, however many ideals
it has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autosplit.partition.graph import Graph, reach

_QUANTA = 2**45
"""Times and costs are rounded down to whole numbers of so many parts of them all: their sums in float64 are exact."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A variable, and those that it is tied to when it is eliminated, in ascending order."""

    variable: int
    scope: tuple[int, ...]


@dataclass(frozen=True)
class Labelling:
    """Variables, of which the first are the graph's groups.

    ``times`` and ``crossing`` are in quanta. In ``below`` are pairs of which the first never has the higher label.
    ``spanned`` names pairs and their tensors (positions in the graph): where a tensor has pins in the lowest and in the
    highest label, one of its pairs has these labels.
    """

    quantum_s: float
    times: tuple[float, ...]
    below: frozenset[Pair]
    crossing: dict[Pair, float]
    spanned: dict[Pair, list[int]]
    steps: tuple[Step, ...]

    @property
    def width(self) -> int:
        """The most neighbours that a variable has when it is eliminated."""
        return max(len(step.scope) for step in self.steps)

    @property
    def pairs(self) -> list[Pair]:
        """All pairs, the smaller variable first, that a term looks at."""
        return sorted({(min(pair), max(pair)) for pair in (*self.below, *self.crossing)})

    def allows(self, pair: Pair, labels: Pair) -> bool:
        """Tell whether the variables of ``pair`` may have these labels."""
        left, right = labels
        return not (left > right and pair in self.below) and not (left < right and pair[::-1] in self.below)

    def cost(self, pair: Pair, labels: Pair) -> float:
        """Return what crosses between the variables of ``pair``."""
        left, right = labels
        if left == right:
            return 0.0
        return self.crossing.get(pair if left < right else pair[::-1], 0.0)


def labelling(graph: Graph) -> Labelling:
    """Return the terms of the graph's boundaries; costs are rounded down, so no stage costs more than it does."""
    total_s = math.fsum(graph.times_s) + math.fsum(tensor.cost_s for tensor in graph.tensors)
    quantum_s = total_s / _QUANTA if total_s else 1.0
    terms = _Terms(graph, quantum_s)
    for index, tensor in enumerate(graph.tensors):
        pins = sorted({tensor.producer, *tensor.consumers})
        for pair in terms.add(pins, float(math.floor(tensor.cost_s / quantum_s))):
            terms.spanned.setdefault(pair, []).append(index)
    below = frozenset(terms.below)
    steps = _steps(len(terms.times), (*below, *terms.crossing))
    return Labelling(quantum_s, tuple(terms.times), below, terms.crossing, terms.spanned, steps)


class _Terms:
    """What ``labelling`` collects, tensor by tensor."""

    def __init__(self, graph: Graph, quantum_s: float) -> None:
        self.times = [float(math.floor(time_s / quantum_s)) for time_s in graph.times_s]
        self.edges = graph.edges
        self.below = set(graph.edges)
        self.crossing: dict[Pair, float] = {}
        self.spanned: dict[Pair, list[int]] = {}
        self.before = reach(graph.predecessors(), range(graph.size))
        self.after = reach(graph.successors(), range(graph.size - 1, -1, -1))

    def add(self, pins: Sequence[int], cost: float) -> list[Pair]:
        """Add a tensor with these pins; return the pairs of which one has a low and a high label where its pins do."""
        low = next((pin for pin in pins if all(self.after[pin] >> other & 1 for other in pins)), None)
        high = next((pin for pin in pins if all(self.before[pin] >> other & 1 for other in pins)), None)
        if len(pins) == 2:
            # Positions are topological: only the first pin can precede the second.
            first, second = pins
            either = [(first, second)] if low is not None else [(first, second), (second, first)]
            for pair in either:
                self._cross(pair, cost)
            return either
        ends = (self._helper() if low is None else low, self._helper() if high is None else high)
        if low is None:
            self.below |= {(ends[0], pin) for pin in pins}
        if high is None:
            self.below |= {(pin, ends[1]) for pin in pins}
        self._cross(ends, cost)
        for close in ([(low, pin) for pin in pins if pin != low], [(pin, high) for pin in pins if pin != high]):
            known = [(left, right) for left, right in close if left is not None and right is not None]
            if known and self.edges.issuperset(known):
                return known
        return [ends]

    def _cross(self, pair: Pair, cost: float) -> None:
        self.crossing[pair] = self.crossing.get(pair, 0.0) + cost

    def _helper(self) -> int:
        self.times.append(0.0)
        return len(self.times) - 1


def _steps(size: int, pairs: Iterable[Pair]) -> tuple[Step, ...]:
    """Eliminate the variable with the fewest neighbours next."""
    near: list[set[int]] = [set() for _ in range(size)]
    for left, right in pairs:
        near[left].add(right)
        near[right].add(left)
    waiting = [(len(others), variable) for variable, others in enumerate(near)]
    heapq.heapify(waiting)
    steps, gone = [], [False] * size
    while waiting:
        count, variable = heapq.heappop(waiting)
        if gone[variable] or count != len(near[variable]):
            continue
        gone[variable] = True
        steps.append(Step(variable, tuple(sorted(near[variable]))))
        for other in near[variable]:
            near[other] |= near[variable]
            near[other] -= {variable, other}
            heapq.heappush(waiting, (len(near[other]), other))
    return tuple(steps)
