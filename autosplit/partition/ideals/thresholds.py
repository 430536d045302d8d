"""Proofs by threshold for graphs with very many ideals: is there a chain of stages none of which is above T?

A search over (stages used, ideal) that keeps every ideal within reach is as dear as the dynamic program of ``chains``.
Most of them need not be looked at. Let ``I`` be inside ``J``, both reached with as many stages. Let

    head start(J) = time of J - cost of the tensors across J's end,

and let no ideal between ``I`` and ``J`` have a larger one than ``J``. Then from ``J`` on no more stages are needed than
from ``I`` on. For take any chain from ``I``, and add ``J`` to each of its ideals:

* Stages that end inside ``J`` become empty.
* A stage ``P .. K`` with all of ``J`` inside ``K`` begins at ``P + J`` instead. Its load shrinks by at least
  ``head start(P + J) - head start(P)``: it loses that time, loses the tensors that were across ``P`` only, and gains at
  most those that are across ``P + J`` only. Tensors across a cut are submodular, so this is at least
  ``head start(J) - head start(P and J)``, which is not negative as ``P and J`` lies between ``I`` and ``J``.
* A stage that ends elsewhere keeps only groups that do not depend on all of ``J``. These are few: where all of them
  with all of their tensors together are not above T, no such stage is.

So of the ideals reached only a frontier is extended. A threshold that cannot be kept is a lower bound.

The ideals of a long and narrow graph are sorted by time in a `Lattice`. Neighbours differ little, so they are kept in
blocks, each with the few groups that some of its ideals hold and others do not:

    block 7:   groups 0..214 in all of its ideals | 215..260 in some: one bit per ideal | the rest in none

and for each tensor that lies across some of them how many of its pins each ideal holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_, or_

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.goal import FOREVER, OutOfTime, Timer
from autosplit.partition.graph import Graph, reach
from autosplit.partition.ideals.chains import IdealChain
from autosplit.partition.ideals.enumerate import list_ideals
from autosplit.partition.ideals.table import Floats, Ints

Flags = NDArray[np.bool_]

_BLOCK = 2048
_QUANTA = 2**52
"""Times are whole numbers of about this many parts of the total: sums are exact, so subsets come first."""
_NONE, _ALL = -1, -2
"""In place of a row, for a group that is in none, or in all, of a block's ideals."""


@dataclass(frozen=True)
class _LatticeBlock:
    """Neighbouring ideals: ``row[group]`` is its row in ``member``, ``_NONE`` or ``_ALL``.

    ``tensors`` are those across at least one of the ideals, ``inside`` the number of pins that each ideal holds.
    """

    start: int
    stop: int
    row: NDArray[np.int32]
    groups: Ints
    member: Flags
    tensors: Ints
    inside: NDArray[np.int32]


class Lattice:
    """The ideals by position, in an order in which subsets come first."""

    def __init__(self, graph: Graph, ideals: Mapping[int, int]) -> None:
        """``ideals`` have their times, in quanta."""
        self.graph = graph
        self.ideals = sorted(ideals, key=ideals.__getitem__)
        self.time_s: Floats = np.array([ideals[ideal] for ideal in self.ideals], dtype=np.float64) * _quantum(graph)
        self._cost: Floats = np.array([tensor.cost_s for tensor in graph.tensors], dtype=np.float64)
        self._pins = [np.array(sorted(tensor.ends), dtype=np.int64) for tensor in graph.tensors]
        self._pin_counts = np.array([len(pins) for pins in self._pins], dtype=np.int32)
        self._first = np.array([pins[0] for pins in self._pins], dtype=np.int64)
        self._last = np.array([pins[-1] for pins in self._pins], dtype=np.int64)
        self.cut_s: Floats = np.zeros(len(self.ideals))
        self._blocks = [self._block(start) for start in range(0, len(self.ideals), _BLOCK)]

    def __len__(self) -> int:
        return len(self.time_s)

    def holds(self, position: int) -> Flags:
        """Return for each group whether the ideal holds it."""
        block = self._blocks[position // _BLOCK]
        held: Flags = block.row == _ALL
        held[block.groups] = block.member[:, position - block.start]
        return held

    def supersets(self, position: int, *, start: int, stop: int) -> Flags:
        """Return which of the positions ``start..stop-1`` hold all of the ideal."""
        held = self.holds(position)
        return np.concatenate(
            [
                np.full(span.stop - span.start, not np.any(held & (block.row == _NONE)))
                & block.member[held[block.groups], span].all(axis=0)
                for block, span in self._spans(start, stop)
            ]
        )

    def subsets(self, position: int, *, start: int, stop: int) -> Flags:
        """Return which of the positions ``start..stop-1`` hold nothing but what the ideal holds."""
        free = ~self.holds(position)
        return np.concatenate(
            [
                np.full(span.stop - span.start, not np.any(free & (block.row == _ALL)))
                & ~block.member[free[block.groups], span].any(axis=0)
                for block, span in self._spans(start, stop)
            ]
        )

    def loads(self, position: int, *, start: int, stop: int) -> Floats:
        """Return the loads of the stages from the ideal to its supersets among ``start..stop-1``, else infinity.

        A tensor across both ends is counted twice by these: once too often, and twice where the stage has no pin of it.
        """
        source = self._blocks[position // _BLOCK]
        column = source.inside[:, position - source.start]
        across = (column > 0) & (column < self._pin_counts[source.tensors])
        tensors, pins = source.tensors[across], column[across]
        loads = self.time_s[start:stop] + self.cut_s[start:stop] + (self.cut_s[position] - self.time_s[position])
        for block, span in self._spans(start, stop):
            _, mine, theirs = np.intersect1d(tensors, block.tensors, assume_unique=True, return_indices=True)
            inside = block.inside[theirs, span]
            still = inside < self._pin_counts[block.tensors[theirs], None]
            twice = still.astype(np.int8) + (still & (inside == pins[mine, None]))
            where = slice(block.start + span.start - start, block.start + span.stop - start)
            loads[where] -= self._cost[block.tensors[theirs]] @ twice
        return np.where(self.supersets(position, start=start, stop=stop), loads, np.inf)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[_LatticeBlock, slice]]:
        for block in self._blocks[start // _BLOCK : (stop - 1) // _BLOCK + 1]:
            yield block, slice(max(start, block.start) - block.start, min(stop, block.stop) - block.start)

    def _block(self, start: int) -> _LatticeBlock:
        stop = min(start + _BLOCK, len(self))
        ideals = self.ideals[start:stop]
        every, some_of = reduce(and_, ideals), reduce(or_, ideals)
        base = (~every & every + 1).bit_length() - 1
        width = some_of.bit_length() - base
        size = width // 8 + 1
        packed = b"".join((ideal >> base).to_bytes(size, "little") for ideal in ideals)
        table = np.frombuffer(packed, dtype=np.uint8).reshape(stop - start, size)
        member = np.unpackbits(table, axis=1, count=width, bitorder="little").T.astype(np.bool_)
        full, some = member.all(axis=1), member.any(axis=1)
        groups = np.flatnonzero(some & ~full)
        row = np.full(self.graph.size, _NONE, dtype=np.int32)
        row[:base] = _ALL
        row[base + np.flatnonzero(full)] = _ALL
        row[base + groups] = np.arange(len(groups))
        member = np.ascontiguousarray(member[groups])
        tensors, inside = self._inside(row, member, base=base, end=base + width)
        self.cut_s[start:stop] = self._cost[tensors] @ ((inside > 0) & (inside < self._pin_counts[tensors, None]))
        return _LatticeBlock(start, stop, row, base + groups, member, tensors, inside)

    def _inside(self, row: NDArray[np.int32], member: Flags, *, base: int, end: int) -> tuple[Ints, NDArray[np.int32]]:
        """Return the tensors that are across some ideal of a block, and the pins that each ideal holds."""
        near = np.flatnonzero((self._first < end) & (self._last >= base))
        inside = np.zeros((len(near), member.shape[1]), dtype=np.int32)
        for index, tensor in enumerate(near):
            rows = row[self._pins[tensor]]
            inside[index] = np.count_nonzero(rows == _ALL) + member[rows[rows >= 0]].sum(axis=0, dtype=np.int32)
        kept = ((inside > 0) & (inside < self._pin_counts[near, None])).any(axis=1)
        return near[kept], inside[kept]


def lattice(graph: Graph, *, limit: int, clock: Timer = FOREVER) -> Lattice | None:
    """Return the lattice of all ideals of the graph, or None when there are more than ``limit``.

    Raises OutOfTime when the ``clock`` is over.
    """
    ideals = list_ideals(graph, limit=limit, quantum=_quantum(graph), clock=clock)
    return None if ideals is None else Lattice(graph, ideals)


def _quantum(graph: Graph) -> float:
    return sum(graph.times_s) / _QUANTA or 1.0


_CLOSE = 1e-9
"""Values that differ by less, relatively, are the same."""
_ROUNDS = 60
_RULERS = 32
"""At most so many ideals of a frontier are tried as the one that makes others needless."""


@dataclass(frozen=True)
class Improved:
    """A valid lower bound over all cuts, and the best chain below the upper bound that was given, if any was found.

    The chain may have empty stages.
    """

    lower_bound: float
    chain: IdealChain | None


def threshold_search(lattice: Lattice, *, stages: int, lower: float, upper: float, clock: Timer = FOREVER) -> Improved:
    """Return how far the bounds ``lower`` and ``upper`` of the largest load can be brought together.

    First it is asked whether anything is better than ``upper`` at all, which settles most cases; then by bisection.
    """
    search = _Thresholds(lattice, stages=stages, clock=clock)
    chain, certify = None, True
    for _ in range(_ROUNDS):
        if upper <= lower * (1 + _CLOSE):
            break
        threshold = upper * (1 - _CLOSE) if certify else (lower + upper) / 2
        try:
            better = search.chain(threshold)
        except OutOfTime:
            break
        if better is None:
            lower = threshold if not certify else upper
        else:
            chain, upper = better, better.value
        certify = better is None or upper <= lower * (1 + 1e-4)
    return Improved(lower, chain)


class _Thresholds:
    """The search for one threshold after another in one lattice."""

    def __init__(self, lattice: Lattice, *, stages: int, clock: Timer) -> None:
        self.lattice, self.stages, self.clock = lattice, stages, clock
        self.head_start = lattice.time_s - lattice.cut_s
        self.aside = _Aside(lattice.graph)
        self.rules: dict[int, float] = {}

    def chain(self, threshold: float) -> IdealChain | None:
        """Return a chain whose loads are at most the threshold, or None."""
        lattice, last = self.lattice, len(self.lattice) - 1
        frontier = np.zeros(1, dtype=np.int64)
        parents: list[dict[int, int]] = []
        for used in range(self.stages):
            reached, parent = self._reached(frontier, threshold, left=self.stages - used - 1)
            parents.append(dict(zip(reached.tolist(), parent.tolist(), strict=True)))
            if not len(reached):
                return None
            if reached[-1] == last:
                break
            frontier = self._frontier(reached, threshold)
        if last not in parents[-1]:
            return None
        positions = [last]
        for parent_of in reversed(parents):
            positions.append(parent_of[positions[-1]])
        positions = positions[::-1] + [last] * (self.stages - len(parents))
        stages = ((a, b) for a, b in pairwise(positions) if a != b)
        value = max((float(lattice.loads(a, start=b, stop=b + 1)[0]) for a, b in stages), default=0.0)
        return IdealChain(value, tuple(lattice.ideals[position] for position in positions))

    def _reached(self, frontier: Ints, threshold: float, *, left: int) -> tuple[Ints, Ints]:
        """Return the ideals that one more stage reaches, and from where, if ``left`` more can do the rest."""
        time_s, slack = self.lattice.time_s, threshold * _CLOSE
        low = int(np.searchsorted(time_s, time_s[-1] - left * threshold - slack, side="left"))
        high = int(np.searchsorted(time_s, time_s[frontier[-1]] + threshold + slack, side="right"))
        if high <= low:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        parent = np.full(high - low, -1, dtype=np.int64)
        kept = frontier[frontier >= low]
        parent[kept - low] = kept
        for position in frontier[::-1].tolist():
            self.clock.check()
            start = max(position + 1, low)
            stop = int(np.searchsorted(time_s, time_s[position] + threshold + slack, side="right"))
            if start < stop:
                fits = self.lattice.loads(position, start=start, stop=stop) <= threshold
                window = parent[start - low : stop - low]
                window[fits & (window < 0)] = position
        reached = np.flatnonzero(parent >= 0)
        return reached + low, parent[reached]

    def _frontier(self, reached: Ints, threshold: float) -> Ints:
        """Leave out the ideals from which no more can be done than from another."""
        start, stop = int(reached[0]), int(reached[-1]) + 1
        alive = np.zeros(stop - start, dtype=np.bool_)
        alive[reached - start] = True
        by_head_start = reached[np.argsort(-self.head_start[reached], kind="stable")]
        tried = 0
        for ruler in by_head_start.tolist():
            if tried == _RULERS:
                break
            if ruler > start and alive[ruler - start] and self._rules_from(ruler) <= threshold:
                tried += 1
                ruled = self.lattice.subsets(ruler, start=start, stop=ruler)
                alive[: ruler - start] &= ~ruled
        return start + np.flatnonzero(alive)

    def _rules_from(self, ruler: int) -> float:
        """Return from which threshold on all ideals inside the ruler are needless, infinity for none."""
        if ruler not in self.rules:
            self.rules[ruler] = self.aside.load_s(self.lattice.ideals[ruler]) if self._is_ahead(ruler) else np.inf
        return self.rules[ruler]

    def _is_ahead(self, ruler: int) -> bool:
        """Tell whether no ideal inside this one has a larger head start: those with less time cannot."""
        least = self.head_start[ruler]
        start = int(np.searchsorted(self.lattice.time_s, least, side="right"))
        if start >= ruler:
            return True
        higher: Flags = self.head_start[start:ruler] > least
        return not bool(np.any(higher & self.lattice.subsets(ruler, start=start, stop=ruler)))


class _Aside:
    """What could be put beside an ideal: the groups outside that do not depend on all of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.everything = (1 << graph.size) - 1
        with_itself = reach(graph.successors(), reversed(range(graph.size)))
        self.after = [mask ^ 1 << group for group, mask in enumerate(with_itself)]
        self.tensors: list[list[int]] = [[] for _ in range(graph.size)]
        for index, tensor in enumerate(graph.tensors):
            for pin in sorted(tensor.ends):
                self.tensors[pin].append(index)

    def load_s(self, ideal: int) -> float:
        """Return the most that a stage of such groups can cost."""
        dependent = reduce(and_, (self.after[group] for group in _groups(ideal)), self.everything)
        groups = _groups(self.everything & ~ideal & ~dependent)
        tensors = {index for group in groups for index in self.tensors[group]}
        tensors_s = sum(self.graph.tensors[index].cost_s for index in sorted(tensors))
        return sum(self.graph.times_s[group] for group in groups) + tensors_s


def _groups(bits: int) -> list[int]:
    """Return the groups whose bit is set."""
    return [group for group in range(bits.bit_length()) if bits >> group & 1]
