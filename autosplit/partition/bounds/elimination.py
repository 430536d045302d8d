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

  over all pairs of ideals that the tensor crosses; likewise ends(J), with + c(J). See ``skipping``.

From ``starts = ends = 0`` of the empty set follow bounds for each ideal in turn. Where starts after the last stage but
one stay below all time - T, T is a lower bound. Everything grows with T, so the largest such T is found by halving.
Tensors that can skip a stage and let it get further than the average stage has to are left out: loads only shrink.
Ideals with c above ``dear`` are left out of the profile and stand for starts = ends - 2 c < ends - 2 dear.

Boundaries that attain the bounds of the first kind are returned as well. Nothing makes them nest, or keeps a tensor
from skipping a stage, so their loads may be above the bound: they are a place to start from, often optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autosplit.partition.bounds.labelling import labelling
from autosplit.partition.bounds.profile import ParetoFront, ideal, profile
from autosplit.partition.bounds.skipping import PRICES, SHARES, Floats, Skips, leads, skips
from autosplit.partition.clock import FOREVER, Clock
from autosplit.partition.graph import Graph

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
