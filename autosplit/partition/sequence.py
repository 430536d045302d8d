"""The best cut of one topological order into consecutive pieces, for orders of any length.

The cut of a line is chosen by dynamic programming over (stages used, prefix), as in ``chains``, but what a piece pays
needs no table of tensors by prefixes. A piece is a point ``(i, j)``: it holds positions ``i .. j - 1``. A tensor with
pins at ``a < p < b`` is paid for everywhere but in a few rectangles of that plane, those of the pieces that hold no pin
and those that hold all:

    no pin inside: j <= a, or a < i and j <= p, or p < i and j <= b, or b < i        all inside: i <= a and b < j

A rectangle is four corners. Swept by rows, the corners add up to what each piece of a row pays:

    paid[i, j] = sum of the values at the corners (row, last) with row <= i and j <= last

Only pieces within the limits are looked at, so the work is positions times the length of the longest piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.chains import Chain
from autosplit.partition.goal import PLAIN, Goal, Terms
from autosplit.partition.graph import Graph, Storage, Tensor
from autosplit.partition.table import Floats

Corner = tuple[int, int, float]
"""Row, last column and value."""

_STEP = 0.02
"""The first limit that is tried is this far above what the stages hold on average."""


def best_prefixes(graph: Graph, order: Sequence[int], *, goal: Goal) -> Chain | None:
    """Return the best chain among the prefixes of ``order`` within the goal's limits, or None when there is none.

    A low limit makes the search quick, and what it finds is the best of all: so limits are tried from the bottom up.
    The stages have their places in order, and a goal with extras has no answer here.
    """
    assert goal.extras is None, "only works, tensors and storages are looked at"
    assert not goal.free_order, "stage i has slot i"
    line = _Line(graph, order, goal)
    terms = goal.terms if goal.terms is not None and goal.least == "load" else (PLAIN,) * goal.stages
    most = goal.load_limit_s if goal.least == "load" else max(goal.capacity_bytes or (math.inf,))
    fastest = min(term.work for term in terms)
    average, step = float(line.weight[-1]) / sum(1 / term.work for term in terms), _STEP
    dearest = line.dearest * max(max(term.work, term.net) for term in terms)
    while True:
        limit = (max(average, line.heaviest * fastest) or dearest) * (1 + step)
        last = limit >= most or limit >= dearest
        cuts = _Sweep(line, goal, terms, limit=most if last else limit).run()
        if cuts is not None:
            return Chain(cuts.value, tuple(_masks(order, cuts.positions)))
        if last:
            return None
        step *= 2


@dataclass(frozen=True)
class _Cuts:
    value: float
    positions: tuple[int, ...]


class _Line:
    """The costs of the pieces of one order."""

    def __init__(self, graph: Graph, order: Sequence[int], goal: Goal) -> None:
        self.size = len(order)
        place = [0] * self.size
        for position, group in enumerate(order):
            place[group] = position
        self.times_s = _running(graph.times_s, order)
        self.static = _running(graph.static_bytes, order)
        self.resident = _running(graph.resident_bytes, order)
        self.transients: Floats = np.array(graph.transient_bytes, dtype=np.float64)[list(order)]
        self.tensors = [corner for item in graph.tensors for corner in _tensor_corners(item, place)]
        self.storages = [corner for item in graph.storages for corner in _storage_corners(item, place)]
        self.weight = self.static if goal.least == "bytes" else self.times_s
        self.heaviest = float(np.diff(self.weight).max())
        kept = float(self.resident[-1]) + sum(item.bytes for item in graph.storages)
        most_bytes = float(self.static[-1]) + max(goal.in_flight) * kept + float(self.transients.max())
        most_s = float(self.times_s[-1]) + sum(item.cost_s for item in graph.tensors)
        self.dearest = most_bytes if goal.least == "bytes" else most_s


class _Sweep:
    """One pass over the rows of the plane, with nothing above ``limit``."""

    def __init__(self, line: _Line, goal: Goal, terms: Sequence[Terms], *, limit: float) -> None:
        self.line, self.goal, self.limit = line, goal, limit
        self.work: Floats = np.array([term.work for term in terms])
        self.net: Floats = np.array([term.net for term in terms])
        self.best: Floats = np.full((goal.stages + 1, line.size + 1), np.inf)
        self.back = np.full((goal.stages + 1, line.size + 1), -1, dtype=np.int32)
        self.best[0, 0] = 0.0
        reach = limit * (1 + 1e-9) / self.work
        self.stops = np.searchsorted(line.weight, line.weight + reach.max(), side="right") - 1
        if goal.capacity_bytes is not None:
            full = line.static + max(goal.capacity_bytes) * (1 + 1e-9)
            self.stops = np.minimum(self.stops, np.searchsorted(line.static, full, side="right") - 1)
        # What is left must fit in the stages left: the first prefix that is long enough, by stages used.
        left = np.append(reach[::-1].cumsum()[::-1], 0.0)
        self.starts = np.searchsorted(line.weight, line.weight[-1] - left, side="left")

    def run(self) -> _Cuts | None:
        """Return the best cuts, or None when there are none."""
        goal, size = self.goal, self.line.size
        loads = _Rows(self.line.tensors, size)
        kept = _Rows(self.line.storages, size) if goal.needs_bytes else None
        for row in range(size):
            used = np.flatnonzero((self.best[:-1, row] < np.inf) & (self.starts[:-1] <= row))
            stop = int(self.stops[row])
            paid = loads.advance(row, stop)
            held = kept.advance(row, stop) if kept is not None else None
            if goal.empty:
                self._pass_empty(row)
                used = np.flatnonzero((self.best[:-1, row] < np.inf) & (self.starts[:-1] <= row))
            if len(used):
                self._extend(row, stop, paid=paid, held=held, first=int(used[0]), last=int(used[-1]))
        if goal.empty:
            self._pass_empty(size)
        return self._cuts()

    def _pass_empty(self, row: int) -> None:
        for used in range(self.goal.stages):
            if self.best[used, row] < self.best[used + 1, row]:
                self.best[used + 1, row], self.back[used + 1, row] = self.best[used, row], row

    def _extend(
        self,
        row: int,
        stop: int,
        *,
        paid: Callable[[int], Floats],
        held: Callable[[int], Floats] | None,
        first: int,
        last: int,
    ) -> None:
        """Try the pieces from ``row`` to at most ``stop`` as the next after ``first`` to ``last`` stages."""
        line, goal = self.line, self.goal
        start = max(row + 1, int(self.starts[first + 1]))
        if start > stop:
            return
        span = slice(start, stop + 1)
        slots = slice(first, last + 1)
        time_s = line.times_s[span] - line.times_s[row]
        cost = self.work[slots, None] * time_s + self.net[slots, None] * paid(start)
        fits = cost <= goal.load_limit_s
        if held is not None:
            flight = np.array(goal.in_flight[slots], dtype=np.float64)[:, None]
            resident = line.resident[span] - line.resident[row] + held(start)
            transient = np.maximum.accumulate(line.transients[row:stop])[start - row - 1 :]
            needed = line.static[span] - line.static[row] + transient + flight * resident
            if goal.capacity_bytes is not None:
                fits = fits & (needed <= np.array(goal.capacity_bytes[slots])[:, None])
            cost = needed if goal.least == "bytes" else cost
        value = np.maximum(self.best[slots, row, None], cost)
        target = self.best[first + 1 : last + 2, span]
        better = (value < target) & (value <= self.limit) & fits
        np.copyto(target, value, where=better)
        np.copyto(self.back[first + 1 : last + 2, span], row, where=better)

    def _cuts(self) -> _Cuts | None:
        position = self.line.size
        value = float(self.best[-1, position])
        if not math.isfinite(value):
            return None
        positions = [position]
        for used in range(self.goal.stages, 0, -1):
            position = int(self.back[used, position])
            positions.append(position)
        return _Cuts(value, tuple(positions[::-1]))


class _Rows:
    """What the pieces of one row pay after another, from the corners of the rectangles."""

    def __init__(self, corners: Iterable[Corner], size: int) -> None:
        ordered = sorted(corners)
        self.rows = [row for row, _, _ in ordered]
        self.columns = np.array([last for _, last, _ in ordered], dtype=np.int64)
        self.values: Floats = np.array([value for _, _, value in ordered], dtype=np.float64)
        self.standing: Floats = np.zeros(size + 1)
        self.beyond = 0.0
        self.stop = self.next = 0

    def advance(self, row: int, stop: int) -> Callable[[int], Floats]:
        """Go on to ``row``, whose longest piece ends at ``stop``; return what its pieces from a given end on pay."""
        first = self.next
        while self.next < len(self.rows) and self.rows[self.next] <= row:
            self.next += 1
        columns, values = self.columns[first : self.next], self.values[first : self.next]
        np.add.at(self.standing, columns, values)
        self.beyond += float(values[columns > self.stop].sum()) - float(self.standing[self.stop + 1 : stop + 1].sum())
        self.stop = stop
        return lambda start: self.beyond + self.standing[start : stop + 1][::-1].cumsum()[::-1]


def _tensor_corners(tensor: Tensor, place: Sequence[int]) -> list[Corner]:
    pins = sorted({place[tensor.producer], *(place[consumer] for consumer in tensor.consumers)})
    return _gaps(pins, tensor.cost_s, size=len(place)) + _whole(pins, (), tensor.cost_s, size=len(place))


def _storage_corners(storage: Storage, place: Sequence[int]) -> list[Corner]:
    value, size = float(storage.bytes), len(place)
    corners = _gaps(sorted(place[pin] for pin in storage.pins), value, size=size)
    if storage.producer is not None:
        pins = sorted({place[storage.producer], *(place[consumer] for consumer in storage.consumers)})
        corners += _whole(pins, [place[saver] for saver in storage.savers], value, size=size)
    return corners


def _gaps(pins: Sequence[int], value: float, *, size: int) -> list[Corner]:
    """Pay everywhere but where no pin is inside."""
    bounds = zip((-1, *pins), (*pins, size), strict=True)
    return [(0, size, value), *((before + 1, after, -value) for before, after in bounds)]


def _whole(pins: Sequence[int], savers: Sequence[int], value: float, *, size: int) -> list[Corner]:
    """Pay back where all pins are inside and no saver is."""
    first, last = pins[0], pins[-1]
    if any(first <= saver <= last for saver in savers):
        return []
    low = max((saver for saver in savers if saver < first), default=-1) + 1
    high = min((saver for saver in savers if saver > last), default=size)
    rectangle = (low, high, -value), (low, last, value), (first + 1, high, value), (first + 1, last, -value)
    return list(rectangle)


def _running(numbers: Sequence[float], order: Sequence[int]) -> NDArray[np.float64]:
    """Return the sums over the prefixes of the order."""
    return np.concatenate([[0.0], np.cumsum(np.array(numbers, dtype=np.float64)[list(order)])])


def _masks(order: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return the prefixes that end at the positions as ideals."""
    masks, mask, before = [], 0, 0
    for position in positions:
        mask |= sum(1 << group for group in order[before:position])
        masks.append(mask)
        before = position
    return masks
