"""The profile of a graph's boundaries: which times and crossing costs ideals have, without listing the ideals.

For stages, ideals with the same time + crossing and time - crossing are alike, as long as no tensor skips a stage: then

    load of the stage from I to J = (time(J) + crossing(J)) - (time(I) - crossing(I))

so of all ideals only those matter that no other beats in both numbers. Variables are eliminated one by one (see
``labelling``); a term holds for each labelling of its variables the pairs of numbers that are left ("front").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.bounds.labelling import Labelling, Step
from autosplit.partition.clock import FOREVER, Clock

Floats = NDArray[np.float64]
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
