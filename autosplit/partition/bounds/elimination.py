"""A lower bound of the largest load, and boundaries that come close to it, without listing the ideals.

Write ``w`` for the time of an ideal and ``c`` for the cost of the tensors that cross it: with pins inside and outside.
A stage pays for the tensors that have pins inside and outside of the stage. Those that cross just one of its two ideals
are among them; one that crosses both may be paid once, or not at all: it *skips* the stage. Let no load be above T, and
let I and J be the ideals before and after a stage. Then

* no tensor crosses both: w(J) + c(J) <= T + w(I) - c(I), so for the largest possible starts := w - c and ends := w + c

      ends(J) <= T + starts(I),      starts(J) <= the most starts of any ideal whose ends are at most T + starts(I);

* a tensor crosses both: that is possible only if ends(I) reaches the least ends of the ideals that this tensor crosses,
  and then starts(J) is at most the most starts of these ideals, and by Lagrange's rule (Everett 1963, "Generalized
  Lagrange multiplier method") for every price >= 0 and every share from 0 to 1, as T - load >= 0 and
  share * ends(I) + (1 - share) * starts(I) = w(I) + (2 * share - 1) * c(I), at most that plus the maximum of

      w(J) - w(I) - c(J) + (1 - 2 * share) * c(I) + price * (T - load)

  over all pairs of ideals that the tensor crosses; likewise ends(J), with + c(J). See ``labelling``.

From ``starts = ends = 0`` of the empty set follow bounds for each ideal in turn. Where starts after the last stage but
one stay below all time - T, T is a lower bound. Everything grows with T, so the largest such T is found by halving.
Tensors that can skip a stage and let it get further than the average stage has to are left out: loads only shrink.
Ideals with c above ``dear`` are left out of the profile and stand for starts = ends - 2 c < ends - 2 dear.

Boundaries that attain the bounds of the first kind are returned as well. Nothing makes them nest, or keeps a tensor
from skipping a stage, so their loads may be above the bound: they are a place to start from, often optimal.

The profile of a graph's boundaries says which times and crossing costs its ideals have. Ideals with the same time +
crossing and time - crossing are alike to stages that no tensor skips: then

    load of the stage from I to J = (time(J) + crossing(J)) - (time(I) - crossing(I))

so of all ideals only those matter that no other beats in both numbers. Variables are eliminated one by one (see
``labelling``); a term holds for each labelling of its variables the pairs of numbers that are left ("front").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.bounds.labelling import PRICES, SHARES, Floats, Labelling, Skips, Step, labelling, leads, skips
from autosplit.partition.goal import FOREVER, Clock
from autosplit.partition.graph import Graph

Ints = NDArray[np.int64]

_POINTS = 2**15
"""Larger fronts are thinned: neighbours become one point that is as good as both."""

_MANY = 2**12
"""More points are sifted on a grid of so many cells before they are sorted."""

_SUMS = 2**21
"""Sums of two fronts have at most so many points."""


@dataclass(frozen=True)
class ParetoFront:
    """Points, ascending in both numbers: ``ends`` = time + crossing and ``starts`` = time - crossing, in quanta.

    ``parts`` are the choices that the points come from, ``part`` and ``index`` which of them and where in it.
    """

    ends: Floats
    starts: Floats
    parts: tuple[Part, ...] = ()
    part: Ints | None = None
    index: Ints | None = None

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True)
class Part:
    """Label ``label`` of ``variable``, and a front of each term that it was added up from."""

    variable: int
    label: int
    fronts: tuple[ParetoFront, ...]


@dataclass(frozen=True)
class _Term:
    scope: tuple[int, ...]
    table: dict[tuple[int, ...], ParetoFront]


_NOTHING = ParetoFront(np.zeros(1), np.zeros(1))


def profile(labels: Labelling, *, dear: float, work: int, clock: Clock = FOREVER) -> ParetoFront | None:
    """Return the front of the ideals whose crossing costs at most ``dear``, None if more than ``work`` points arise."""
    terms: list[list[_Term]] = [[] for _ in labels.times]
    place = {step.variable: index for index, step in enumerate(labels.steps)}

    def keep(term: _Term) -> None:
        terms[min(term.scope, key=place.__getitem__)].append(term)

    for pair in labels.pairs:
        own = {both: labels.cost(pair, both) for both in np.ndindex(2, 2) if labels.allows(pair, both)}
        keep(_Term(pair, {both: _point(cost, -cost) if cost else _NOTHING for both, cost in own.items()}))
    whole, done = _NOTHING, 0
    for step in labels.steps:
        clock.check()
        time = labels.times[step.variable]
        term = _Term((step.variable,), {(0,): _point(time, time), (1,): _NOTHING})
        reduced = _eliminate(step, [term, *terms[step.variable]], dear=dear)
        terms[step.variable].clear()
        done += sum(len(front) for front in reduced.table.values())
        if done > work:
            return None
        if step.scope:
            keep(reduced)
        else:
            whole = _front([Part(step.variable, 1, (whole, reduced.table[()]))], dear=dear)
    return whole


def ideal(front: ParetoFront, point: int, *, groups: int) -> int:
    """Return an ideal that has the numbers of a point, or nearly so where points were thinned."""
    found, waiting = 0, [(front, point)]
    while waiting:
        current, at = waiting.pop()
        if current.part is None or current.index is None:
            continue
        part, rest = current.parts[int(current.part[at])], int(current.index[at])
        if part.label == 0 and part.variable < groups:
            found |= 1 << part.variable
        for each in reversed(part.fronts):
            rest, position = divmod(rest, len(each))
            waiting.append((each, position))
    return found


def _point(ends: float, starts: float) -> ParetoFront:
    return ParetoFront(np.array([ends]), np.array([starts]))


def _eliminate(step: Step, terms: Sequence[_Term], *, dear: float) -> _Term:
    """Return the sum of the terms, for each labelling of ``step.scope``, with the variable chosen freely."""
    parts: dict[tuple[int, ...], list[Part]] = {}
    for known, fronts in _joint(sorted(terms, key=lambda term: -len(term.table))):
        key = tuple(known[variable] for variable in step.scope)
        parts.setdefault(key, []).append(Part(step.variable, known[step.variable], _thinner(fronts)))
    fronts_of = {key: _front(choices, dear=dear) for key, choices in parts.items()}
    return _Term(step.scope, {key: front for key, front in fronts_of.items() if len(front)})


def _joint(terms: Sequence[_Term]) -> Iterator[tuple[dict[int, int], list[ParetoFront]]]:
    """Yield the labellings on which all terms agree, with each term's front."""
    rows: list[tuple[dict[int, int], list[ParetoFront]]] = [({}, [])]
    seen: set[int] = set()
    for term in terms:
        shared = [axis for axis, variable in enumerate(term.scope) if variable in seen]
        entries: dict[tuple[int, ...], list[tuple[tuple[int, ...], ParetoFront]]] = {}
        for key, front in term.table.items():
            entries.setdefault(tuple(key[axis] for axis in shared), []).append((key, front))
        following = []
        for known, fronts in rows:
            for key, front in entries.get(tuple(known[term.scope[axis]] for axis in shared), ()):
                following.append(({**known, **dict(zip(term.scope, key, strict=True))}, [*fronts, front]))
        rows = following
        seen |= set(term.scope)
    yield from rows


def _front(parts: Sequence[Part], *, dear: float) -> ParetoFront:
    """Return what is left of all sums of a point from each front of one of the parts."""
    sums = [_sums(part) for part in parts]
    ends, starts = np.concatenate([each[0] for each in sums]), np.concatenate([each[1] for each in sums])
    lengths = [len(each[0]) for each in sums]
    order = np.flatnonzero(ends - starts <= 2 * dear)
    if len(order) > _MANY:
        order = order[_unbeaten(ends[order], starts[order])]
    order = order[np.argsort(ends[order], kind="stable")]
    best = np.maximum.accumulate(starts[order])
    left = np.ones(len(order), dtype=np.bool_)
    left[1:] = best[1:] > best[:-1]
    order = order[left]
    part = np.repeat(np.arange(len(parts)), lengths)[order]
    first = np.cumsum([0, *lengths[:-1]])[part]
    return _thin(ParetoFront(ends[order], starts[order], tuple(parts), part, order - first), points=_POINTS)


def _unbeaten(ends: Floats, starts: Floats) -> NDArray[np.bool_]:
    """Tell which points no other, with ``ends`` in a lower cell of a coarse grid, beats in ``starts``."""
    low, high = ends.min(), ends.max()
    if low == high:
        return np.ones(len(ends), dtype=np.bool_)
    cell = ((ends - low) * ((_MANY - 1) / (high - low))).astype(np.int64) + 1
    best = np.full(_MANY + 1, -np.inf)
    np.maximum.at(best, cell, starts)
    below: NDArray[np.bool_] = starts > np.maximum.accumulate(best)[cell - 1]
    return below


def _sums(part: Part) -> tuple[Floats, Floats]:
    ends, starts = np.zeros(1), np.zeros(1)
    for front in part.fronts:
        ends, starts = np.add.outer(ends, front.ends).ravel(), np.add.outer(starts, front.starts).ravel()
    return ends, starts


def _thinner(fronts: Sequence[ParetoFront]) -> tuple[ParetoFront, ...]:
    """Thin the largest fronts until there are not too many sums."""
    fronts = list(fronts)
    while np.prod([float(len(front)) for front in fronts]) > _SUMS:
        largest = max(range(len(fronts)), key=lambda index: len(fronts[index]))
        fronts[largest] = _thin(fronts[largest], points=len(fronts[largest]) // 2)
    return tuple(fronts)


def _thin(front: ParetoFront, *, points: int) -> ParetoFront:
    """Join neighbours: the least ``ends`` with the most ``starts`` of them stand for all."""
    if len(front) <= points or front.part is None or front.index is None:
        return front
    width = (front.ends[-1] - front.ends[0]) / points
    cell = np.minimum(np.floor((front.ends - front.ends[0]) / width), points - 1)
    first = np.flatnonzero(np.diff(cell, prepend=-1.0))
    last = np.append(first[1:], len(front)) - 1
    return ParetoFront(front.ends[first], front.starts[last], front.parts, front.part[last], front.index[last])


_CROSSING_LIMITS = (0.2, 0.8)
"""Boundaries that cost more than this part of the known load are not told apart; the second if the first matters."""

_WORK = 2**22
_TABLES = 2**17
"""Limits for points of fronts and for entries of tables: graphs that need more have no such bound."""

_HALVINGS = 60


@dataclass(frozen=True)
class Bound:
    """No cut has a largest load below ``lower_s``; ``ideals``, from the empty set to everything, may come near it."""

    lower_s: float
    ideals: tuple[int, ...]


def bound(graph: Graph, *, stages: int, upper_s: float, clock: Clock = FOREVER) -> Bound | None:
    """Bound the largest load over all cuts into at most ``stages`` stages on equal devices, given that of one cut.

    Bytes are not looked at. None where the graph is too wide for this method; OutOfTime when the clock has run down.
    """
    labels = labelling(graph)
    if sum(3.0 ** (len(step.scope) + 1) for step in labels.steps) > _TABLES:
        return None
    ahead = leads(labels, limit=upper_s / labels.quantum_s) > sum(labels.times) / stages
    loose = {each for far, tensors in zip(ahead, labels.spanned.values(), strict=True) if far for each in tensors}
    if loose:
        left = tuple(each for at, each in enumerate(graph.tensors) if at not in loose)
        labels = labelling(replace(graph, tensors=left))
    upper, total = upper_s / labels.quantum_s, sum(labels.times)
    skipping = skips(labels, clock=clock)
    for part in _CROSSING_LIMITS:
        front = profile(labels, dear=part * upper, work=_WORK, clock=clock)
        if front is None:
            return None
        race = _Race(front, skipping, total=total, stages=stages, dear=part * upper)
        lower = race.lower(least=max(total / stages, *labels.times), upper=upper)
        if not race.dear_matters:
            break
    chains = race.chains(lower=lower, upper=upper, groups=graph.size)
    return Bound(min(lower * labels.quantum_s, upper_s), min(chains, key=lambda chain: _largest_load(graph, chain)))


def _largest_load(graph: Graph, chain: tuple[int, ...]) -> float:
    stage = [next(at for at, inside in enumerate(chain) if inside >> group & 1) for group in range(graph.size)]
    loads = [0.0] * len(chain)
    for group, time_s in enumerate(graph.times_s):
        loads[stage[group]] += time_s
    for tensor in graph.tensors:
        paying = {stage[pin] for pin in (tensor.producer, *tensor.consumers)}
        for each in paying if len(paying) > 1 else ():
            loads[each] += tensor.cost_s
    return max(loads)


class _Race:
    """How far stages get under a load limit."""

    def __init__(self, front: ParetoFront, skipping: Skips, *, total: float, stages: int, dear: float) -> None:
        self.front = front
        self.skipping = skipping
        self.total = total
        self.stages = stages
        self.dear = dear
        self.dear_matters = False

    def lower(self, *, least: float, upper: float) -> float:
        """Return the largest limit under which the stages do not get to the end, or ``least``, known to be one."""
        return self._halve(least, upper, skipping=True)[0]

    def chains(self, *, lower: float, upper: float, groups: int) -> list[tuple[int, ...]]:
        """Return the ideals that get furthest with no tensor skipping a stage, and those that lag most; both nest."""
        front = self.front
        limit = self._halve(lower, upper, skipping=False)[1]
        first, last = [0], [(1 << groups) - 1]
        for point in self._points(limit, skipping=False) or ():
            first.append(first[-1] | ideal(front, point, groups=groups))
        ends = self.total
        for _ in range(self.stages - 1):
            point = min(int(np.searchsorted(front.starts, ends - limit)), len(front) - 1)
            last.append(last[-1] & ideal(front, point, groups=groups))
            ends = float(front.ends[point])
        first += [last[0]] * (self.stages + 1 - len(first))
        return [tuple(first), (0, *last[::-1])]

    def _halve(self, low: float, high: float, *, skipping: bool) -> tuple[float, float]:
        """Return neighbouring limits: only with the second do the stages get to the end, unless ``high`` is too low."""
        if self._points(high, skipping=skipping) is None:
            return high, high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._points(middle, skipping=skipping) is None:
                low = middle
            else:
                high = middle
        return low, high

    def _points(self, limit: float, *, skipping: bool) -> list[int] | None:
        """Return the points of the profile that get furthest, None when the last stage has too much left."""
        front = self.front
        gains = _gains(self.skipping, limit) if skipping else None
        ends = starts = 0.0
        points = []
        self.dear_matters = False
        for stage in range(1, self.stages):
            reach = limit + starts
            points.append(int(np.searchsorted(front.ends, reach, side="right")) - 1)
            most = float(front.starts[points[-1]])
            if most < reach - 2 * self.dear:
                most, self.dear_matters = reach - 2 * self.dear, True
            able = self.skipping.least_ends <= ends
            if gains is not None and able.any():
                base = np.array([[share * ends + (1 - share) * starts] for share in SHARES])
                after = (base[:, None] + gains)[:, :, able].min(axis=0)
                most = max(most, float(np.minimum(after[0], self.skipping.most_starts[able]).max()))
                reach = max(reach, min(stage * limit, float(after[1].max())))
            ends, starts = reach, most
        return points if self.total <= limit + starts else None


def _gains(skipping: Skips, limit: float) -> Floats:
    """Return by ``SHARES``, starts or ends, and pair what a stage that a tensor skips adds at most."""
    least: Floats = (skipping.gains + limit * np.array(PRICES)[:, None]).min(axis=2)
    return least
