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

A tensor skips a stage when it has one pin before the stage and another after it. The stage then pays for it less often
than its two boundaries say. What it can reach at most is found for all tensors at once: the labels 0, 1, 2 (before,
inside, after the stage) are chosen so that a weighted sum is the largest, by eliminating variables; going back through
the eliminations gives the largest sum for each pair of labels of each pair of variables ("max-marginals", Dawid 1992,
"Applications of a general propagation algorithm for probabilistic expert systems").
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import FOREVER, Clock
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


Floats = NDArray[np.float64]

PRICES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Every price of a stage's load, and every share of its first ideal's ``ends``, gives a valid bound. Sums are exact."""


@dataclass(frozen=True)
class Skips:
    """Bounds for each pair that a tensor spans, in quanta; ``starts`` and ``ends`` of an ideal as in ``bounds``.

    Attributes:
        pairs: the pairs of variables.
        least_ends, most_starts: of the ideals that the tensor crosses.
        gains: by ``SHARES``, starts or ends, ``PRICES`` and pair. With ``I`` and ``J`` the ideals of a stage, the most
            of ``starts(J)``, or ``ends(J)``, minus ``share * ends(I) + (1 - share) * starts(I) + price * load``.
    """

    pairs: tuple[Pair, ...]
    least_ends: Floats
    most_starts: Floats
    gains: Floats


def skips(labels: Labelling, *, clock: Clock = FOREVER) -> Skips:
    """Return the bounds for all tensors."""
    pairs = tuple(labels.spanned)
    one, two = _boundary(labels), _stage(labels, shares=SHARES)
    clock.check()
    single = np.array([_pick(one, pair, 1) for pair in pairs]).reshape(len(pairs), 2)
    double = np.array([_pick(two, pair, 2) for pair in pairs]).reshape(len(pairs), len(SHARES), 2, len(PRICES))
    return Skips(pairs, -single[:, 0], single[:, 1], np.moveaxis(double, 0, -1))


def leads(labels: Labelling, *, limit: float) -> Floats:
    """Return for each pair that a tensor spans how far beyond ``ends(I)`` a stage that it skips has ``starts(J)``."""
    table = _stage(labels, shares=(1.0,))
    gains = np.array([_pick(table, pair, 2) for pair in labels.spanned]).reshape(-1, 2, len(PRICES))[:, 0]
    least: Floats = (gains + limit * np.array(PRICES)).min(axis=1)
    return least


def _pick(table: dict[Pair, Floats], pair: Pair, last: int) -> Floats:
    return table[pair][0, last] if pair in table else table[pair[::-1]][last, 0]


def _boundary(labels: Labelling) -> dict[Pair, Floats]:
    """Return the max-marginals of -(time + crossing) and time - crossing of an ideal."""
    times = np.zeros((len(labels.times), 2, 2))
    times[:, 0, :] = np.array(labels.times)[:, None] * (-1.0, 1.0)
    return _marginals(labels.steps, times, _terms(labels, np.full((2, 2, 2), -1.0)))


def _stage(labels: Labelling, *, shares: Sequence[float]) -> dict[Pair, Floats]:
    """Return the max-marginals of what ``Skips`` has as ``gains``."""
    share, toward, price = (axis.ravel() for axis in np.meshgrid(shares, (-1.0, 1.0), PRICES, indexing="ij"))
    times = np.zeros((len(labels.times), 3, len(price)))
    times[:, 1, :] = np.array(labels.times)[:, None] * (1.0 - price)
    gained = np.zeros((3, 3, len(price)))
    for own in np.ndindex(3, 3):
        gained[own] = (1.0 - 2.0 * share) * (0 in own) + toward * (2 in own) - price * (1 in own)
    return _marginals(labels.steps, times, _terms(labels, gained))


def _terms(labels: Labelling, gained: Floats) -> dict[Pair, Floats]:
    """Return what each pair adds, by its two labels, when what crosses counts ``gained`` times."""
    size = len(gained)
    rises = np.triu(np.ones((size, size)), 1)[:, :, None]
    falls = np.triu(np.ones((size, size)), 1).T[:, :, None]
    terms = {}
    for pair in labels.pairs:
        term = gained * (labels.cost(pair, (0, 1)) * rises + labels.cost(pair, (1, 0)) * falls)
        for labelled, across in (((0, 1), rises), ((1, 0), falls)):
            if not labels.allows(pair, labelled):
                term = np.where(across > 0, -np.inf, term)
        terms[pair] = term
    return terms


def _marginals(steps: Sequence[Step], times: Floats, terms: dict[Pair, Floats]) -> dict[Pair, Floats]:
    """Return for each pair, by its two labels, the largest sum of all terms; the last axis are independent sums."""
    place = {step.variable: index for index, step in enumerate(steps)}
    own: list[list[Pair]] = [[] for _ in steps]
    for pair in terms:
        own[min(place[pair[0]], place[pair[1]])].append(pair)
    messages: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in steps]
    parent = [min((place[other] for other in step.scope), default=-1) for step in steps]
    joint, up, apart = [], [], np.zeros(times.shape[2])
    for index, step in enumerate(steps):
        axes = (step.variable, *step.scope)
        table = _spread(times[step.variable], (step.variable,), axes)
        for pair in own[index]:
            table = table + _spread(terms[pair], pair, axes)
        for scope, message in messages[index]:
            table = table + _spread(message, scope, axes)
        joint.append(table)
        up.append(table.max(axis=0))
        if step.scope:
            messages[parent[index]].append((step.scope, up[-1]))
        else:
            apart = apart + up[-1]
        messages[index].clear()
    found: dict[Pair, Floats] = {}
    belief: list[Floats] = [apart] * len(steps)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        axes = (step.variable, *step.scope)
        if step.scope:
            above = steps[parent[index]]
            rest = _reduce(belief[parent[index]], (above.variable, *above.scope), step.scope)
        else:
            rest = apart
        known = np.isfinite(up[index])
        rest = np.where(known, rest - np.where(known, up[index], 0.0), -np.inf)
        belief[index] = joint[index] + rest[None]
        for pair in own[index]:
            found[pair] = _reduce(belief[index], axes, pair)
    return found


def _spread(table: Floats, scope: Sequence[int], axes: Sequence[int]) -> Floats:
    """Return ``table`` with its axes, named by ``scope``, where ``axes`` has them, and length 1 elsewhere."""
    order = sorted(range(len(scope)), key=lambda axis: axes.index(scope[axis]))
    size = table.shape[0]
    shape = [size if variable in scope else 1 for variable in axes]
    return table.transpose([*order, len(scope)]).reshape([*shape, table.shape[-1]])


def _reduce(table: Floats, axes: Sequence[int], scope: Sequence[int]) -> Floats:
    """Return the maxima of ``table`` over all axes but those that ``scope`` names, in its order."""
    gone = tuple(axis for axis, variable in enumerate(axes) if variable not in scope)
    left = [variable for variable in axes if variable in scope]
    maxima: Floats = table.max(axis=gone) if gone else table
    return maxima.transpose([*(left.index(variable) for variable in scope), len(scope)])
