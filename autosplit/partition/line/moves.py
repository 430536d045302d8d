"""Moves of a line's boundaries, and what no step after them can be below: most need not be simulated.

A schedule's actions wait for each other in one way, whatever they take. So a path that was the longest in one cut is a
way through the actions of every other, and takes there

    sum over stages and kinds of  how many actions of the stage it has x what they take,  and its hops to next stages

A move that leaves that as long as the step is now makes nothing shorter. The paths of cuts that were simulated are
kept. Boundaries move alone or in a row:

    | 0 | 1 | 2 | 3 | 4 |       boundaries 2 and 3 a unit to the right: stage 1 has one more, 3 one less, 2 another one
    | 0 |  1  | 2 | 3| 4 |

`Hops` tells what values take from stage to stage from the boundaries next to each cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.line.line import Line
from autosplit.partition.step_model import Path, StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PAIRED = 16
"""Of at most so many stages two boundaries move apart or towards each other."""
RANGED = 64
"""Of at most so many stages any row of boundaries moves."""
_MOST = 512
"""Moves that are looked at closely."""
_BY = (-2, -1, 1, 2)
_PATHS = 48
"""Paths that are kept, the latest."""
_ENTRIES = 2**20
"""Numbers that are looked at together, about."""
_NETS = 16
"""Nets of a boundary that are counted, the longest: without the others a bound is only lower."""


class Hops:
    """The nets that cross each boundary of a line: where they come from, and who takes them first behind it."""

    def __init__(self, line: Line, model: StepModel) -> None:
        rows: list[list[tuple[float, ...]]] = [[] for _ in range(line.size + 1)]
        own = model.crossings
        members: dict[int, list[int]] = {}
        for row, net in enumerate(own.net.tolist()):
            members.setdefault(net, []).append(row)
        for same in members.values():
            producer = int(own.producer[same[0]])
            there_s, back_s = float(own.forward_s[same[0]]), float(own.backward_s[same[0]])
            behind = producer + 1
            for consumer in sorted(own.consumer[same].tolist()):
                for bound in range(behind, consumer + 1):
                    rows[bound].append((there_s + back_s, producer, consumer, there_s, back_s))
                behind = max(behind, consumer + 1)
        kept = [sorted(each, reverse=True)[:_NETS] for each in rows]
        self.width = max(1, max(map(len, kept)))
        table = np.zeros((line.size + 1, self.width, 5))
        for bound, each in enumerate(kept):
            table[bound, : len(each)] = np.array(each).reshape(-1, 5)
        self.producer, self.consumer = table[:, :, 1].astype(np.int64), table[:, :, 2].astype(np.int64)
        self.there_s, self.back_s = table[:, :, 3].copy(), table[:, :, 4].copy()
        tail = np.arange(model.stages - 1)
        self.link: Floats = model.link[tail, tail + 1] * model.simulator.travels[tail, tail + 1]

    def of(self, chains: Ints) -> tuple[Floats, Floats]:
        """Return what values take over each inner boundary of cuts, and gradients back, at least: [cut, boundary]."""
        before, at, behind = chains[:, :-2, None], chains[:, 1:-1], chains[:, 2:, None]
        crosses = (self.producer[at] >= before) & (self.consumer[at] < behind)
        there_s, back_s = ((crosses * each[at]).sum(axis=-1) * self.link for each in (self.there_s, self.back_s))
        return there_s, back_s


def stages_of(chains: Ints, size: int) -> Ints:
    """Return the stage of each unit under each chain of bounds: [chain, unit]."""
    begins = np.zeros((len(chains), size), dtype=np.int64)
    begins[np.arange(len(chains))[:, None], chains[:, 1:-1]] = 1
    stages: Ints = begins.cumsum(axis=1)
    return stages


def moved(bounds: Sequence[int], *, further: bool) -> Ints:
    """Return the cuts with a row of boundaries elsewhere: one by a unit or two, or all from one on or up to one.

    ``further``: any row of them.
    """
    return _legal(bounds, _rows(len(bounds) - 1, further=further))


def paired(bounds: Sequence[int]) -> Ints:
    """Return the cuts with two boundaries a unit apart or towards each other, where there are few."""
    return _legal(bounds, _pairs(len(bounds) - 1))


def _legal(bounds: Sequence[int], offsets: Ints) -> Ints:
    """Return the cuts with boundaries moved so that leave every stage a unit."""
    chains = np.array(bounds, dtype=np.int64) + offsets
    legal: Ints = chains[(np.diff(chains, axis=1) > 0).all(axis=1)]
    return legal


@lru_cache(maxsize=16)
def _rows(last: int, *, further: bool) -> Ints:
    index, offsets = np.arange(last + 1), []
    for start, stop in combinations(range(1, last + 1), 2):
        alone, end = stop == start + 1, start == 1 or stop == last
        if further or alone or end:
            inside = (index >= start) & (index < stop)
            offsets += [inside * by for by in (_BY if further or alone else (-1, 1))]
    return np.array(offsets, dtype=np.int64).reshape(-1, last + 1)


@lru_cache(maxsize=16)
def _pairs(last: int) -> Ints:
    pairs = list(combinations(range(1, last), 2)) if last <= _PAIRED else []
    index = np.arange(last + 1)
    offsets = [by * ((index == first) * 1 - (index == second)) for first, second in pairs for by in (-1, 1)]
    return np.array(offsets, dtype=np.int64).reshape(-1, last + 1)


class Paths:
    """Ways through the actions of one schedule, and what they take at least in cuts of a line."""

    def __init__(self, line: Line, model: StepModel) -> None:
        self.line, self.model = line, model
        self.found: list[Path] = []
        """The paths that cuts are measured by, the latest last."""
        self._known: set[bytes] = set()
        self._hops = Hops(line, model)

    def add(self, path: Path) -> None:
        """Keep a path, unless it was found before."""
        key = path.counts.tobytes() + path.hops.tobytes()
        if key not in self._known:
            self._known.add(key)
            self.found = [*self.found[1 - _PATHS :], path]

    def bounds(self, chains: Ints, again: Floats) -> Floats:
        """Return what no step of each cut is below; ``again`` is which part of its forwards each stage redoes."""
        if not self.found or not len(chains):
            return np.zeros(len(chains))
        counts = np.array([np.concatenate([path.counts.ravel(), path.hops]) for path in self.found]).T
        width = max(1, _ENTRIES // max(len(counts), self._hops.width * chains.shape[1]))
        parts = [
            (self._terms(chains[low : low + width], again[low : low + width]) @ counts).max(axis=1)
            for low in range(0, len(chains), width)
        ]
        return np.concatenate(parts) + self._once_s(chains)

    def shorter(self, chains: Ints, again: Floats, *, below: float) -> Ints:
        """Return the cuts along which no known path is as long as ``below``, of very many the shortest."""
        lower = self.bounds(chains, again)
        kept = np.flatnonzero(lower < below)
        return chains[np.sort(kept[np.argsort(lower[kept], kind="stable")[:_MOST]])]

    def _terms(self, chains: Ints, again: Floats) -> Floats:
        """Return what each action of each stage takes, by kind, and each hop: [cut, term]."""
        line, scale = self.line, self.model.scale
        forward, backward, weight = (
            scale * np.diff(each[chains], axis=1) for each in (line.forward_s, line.backward_s, line.weight_s)
        )
        backward = backward + again * forward
        hops_s = self._hops.of(chains)
        return np.concatenate([forward, backward, backward - weight, weight, *hops_s], axis=1)

    def _once_s(self, chains: Ints) -> Floats:
        if not self.model.ties and not self.model.sync_s.any():
            return np.zeros(len(chains))
        return self.model.once_s(stages_of(chains, self.line.size))
