"""Moves of a line's boundaries, and what no step after them can be below: most need not be simulated.

A schedule's actions wait for each other in one way, whatever they take. So a path that was the longest in one cut is a
way through the actions of every other, and takes there

    sum over stages and kinds of  how many actions of the stage it has x what they take,  and its hops to next stages

A move that leaves that as long as the step is now makes nothing shorter. The paths of cuts that were simulated are
kept. What a row of boundaries that moves together changes is a difference of running sums over the boundaries:

    | 0 | 1 | 2 | 3 | 4 |       boundaries 2 and 3 a unit to the right: stage 1 has one more, 3 one less, 2 another one
    | 0 |  1  | 2 | 3| 4 |      hops change at 1 and 4 too, whose values may now come from, or go to, another stage

`Hops` tells what values take from stage to stage from the boundaries next to each cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.line.line import Line
from autosplit.partition.step_model import Path, StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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

    def of(self, before: Ints, at: Ints, behind: Ints) -> tuple[Floats, Floats]:
        """Return what values take to the next stage, and gradients back, at least: [.., boundary] each.

        Boundaries lie at ``at``, the ones before and behind each of them where the others say.
        """
        crosses = (self.producer[at] >= before[..., None]) & (self.consumer[at] < behind[..., None])
        there_s, back_s = ((crosses * each[at]).sum(axis=-1) * self.link for each in (self.there_s, self.back_s))
        return there_s, back_s

    def moved(self, bounds: Ints, shifted: Ints) -> MovedHops:
        """Return the hops of a cut after moves of rows of its boundaries; ``shifted`` has the bounds by each step."""
        still, last = np.broadcast_to(bounds, shifted.shape), len(bounds) - 1
        sides: dict[str, tuple[Ints, Ints, Ints]] = {
            "none": (still, still, still),
            "all": (shifted, shifted, shifted),
            "at": (still, shifted, still),
            "first": (still, shifted, shifted),
            "last": (shifted, shifted, still),
            "before": (still, still, shifted),
            "behind": (shifted, still, still),
        }
        found = {}
        for name, (before, at, behind) in sides.items():
            found[name] = np.zeros((2, len(shifted), last + 1))
            found[name][:, :, 1:-1] = self.of(before[:, :-2], at[:, 1:-1], behind[:, 2:])
        return MovedHops(found)


@dataclass(frozen=True)
class MovedHops:
    """What goes over each boundary, there and back, by which of it and its neighbours moved: [way, step, boundary]."""

    taken: Mapping[str, Floats]

    def along(self, counts: Floats, start: Ints, stop: Ints, by: Ints) -> Floats:
        """Return what paths' hops take after moves from boundary ``start`` to before ``stop``, by the ``by``-th step.

        ``counts`` is per path how often it takes each hop, there and then back. The result is [path, move].
        """
        ways = np.zeros((len(counts), 2, 1, next(iter(self.taken.values())).shape[2]))
        ways[:, :, 0, 1:-1] = counts.reshape(len(counts), 2, -1)
        taken = {name: (own * ways).sum(axis=1) for name, own in self.taken.items()}
        none, every = (running_sums(taken[name]) for name in ("none", "all"))
        alone, end = stop == start + 1, none.shape[2] - 1
        found = none[:, by, start - 1] + none[:, by, -1] - none[:, by, np.minimum(stop + 1, end)]
        found += np.where(alone, 0.0, every[:, by, stop - 1] - every[:, by, start + 1])
        found += taken["before"][:, by, start - 1] + taken["behind"][:, by, stop]
        several = taken["first"][:, by, start] + taken["last"][:, by, stop - 1]
        found += np.where(alone, taken["at"][:, by, start], several)
        return found


def running_sums(each: Floats) -> Floats:
    """Return sums over the places before each: [.., places + 1]."""
    return np.concatenate([np.zeros((*each.shape[:-1], 1)), each.cumsum(axis=-1)], axis=-1)


_PAIRED = 16
"""Of at most so many stages two boundaries move apart or towards each other."""
RANGED = 64
"""Of at most so many stages any row of boundaries moves."""
_FIRST = 8
"""So many paths, the latest, are looked at before the others."""
_MOST = 512
"""Moves that are looked at closely."""
_BY = (-2, -1, 1, 2)
_PATHS = 48
"""Paths that are kept, the latest."""
_ENTRIES = 2**20
"""Numbers that are looked at together, about."""


@dataclass(frozen=True)
class Redone:
    """Which part of its forwards each stage of a cut does again, and what it may do at least once its device changes.

    ``mates`` says per stage which stages are on its device.
    """

    now: Floats
    least: Floats
    mates: NDArray[np.bool_]


def stages_of(chains: Ints, size: int) -> Ints:
    """Return the stage of each unit under each chain of bounds: [chain, unit]."""
    begins = np.zeros((len(chains), size), dtype=np.int64)
    begins[np.arange(len(chains))[:, None], chains[:, 1:-1]] = 1
    stages: Ints = begins.cumsum(axis=1)
    return stages


@dataclass(frozen=True)
class Rows:
    """Rows of boundaries that move together: from ``start`` to before ``stop``, ``_BY[by]`` units."""

    start: Ints
    stop: Ints
    by: Ints

    def of(self, places: Ints | NDArray[np.bool_]) -> Rows:
        """Return some of them."""
        return Rows(self.start[places], self.stop[places], self.by[places])

    def chains(self, bounds: Ints) -> Ints:
        """Return the cuts that they make of one: [row, bound]."""
        index = np.arange(len(bounds))
        inside = (index >= self.start[:, None]) & (index < self.stop[:, None])
        return bounds + inside * np.array(_BY)[self.by][:, None]

    def legal(self, bounds: Ints) -> Rows:
        """Return those that leave every stage a unit."""
        by, width = np.array(_BY)[self.by], np.diff(bounds)
        return self.of((width[self.start - 1] + by > 0) & (width[self.stop - 1] - by > 0))


@lru_cache(maxsize=16)
def rows(stages: int, *, further: bool) -> Rows:
    """Return the moves of one boundary a unit or two, or all from one on or up to one; ``further``: of any row."""
    found: list[tuple[int, int, int]] = []
    for start, stop in combinations(range(1, stages + 1), 2):
        end = start == 1 or stop == stages
        if further or stop == start + 1 or end:
            sizes = range(4) if further or stop == start + 1 else (1, 2)
            found += ((start, stop, by) for by in sizes)
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return Rows(table[:, 0], table[:, 1], table[:, 2])


def paired(bounds: Sequence[int]) -> Ints:
    """Return the cuts with two boundaries a unit apart or towards each other, where there are few."""
    moved = np.array(bounds, dtype=np.int64) + _pairs(len(bounds) - 1)
    legal: Ints = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
    return legal


@lru_cache(maxsize=16)
def _pairs(last: int) -> Ints:
    def offsets() -> Iterator[list[int]]:
        for first, second in combinations(range(1, last), 2) if last <= _PAIRED else ():
            for by in (-1, 1):
                yield [by * (index == first) - by * (index == second) for index in range(last + 1)]

    return np.array(list(offsets()), dtype=np.int64).reshape(-1, last + 1)


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

    def shorter(self, moved: Rows, bounds: Ints, redone: Redone, *, below: float) -> Rows:
        """Return the moves of a cut along which no known path is as long as ``below``, of very many the shortest."""
        own = moved.legal(bounds)
        shifted = np.clip(bounds + np.array(_BY)[:, None], 0, self.line.size)
        hops = self._hops.moved(bounds, shifted)
        once_s = np.where(self._keeps_once(own, bounds), self._once_s(bounds[None])[0], 0.0)
        lengths = np.zeros(len(own.by))
        for paths in (self.found[-_FIRST:], self.found[:-_FIRST]):
            if not paths or not len(own.by):
                break
            along = _Changes(self, paths, bounds, shifted, redone).lengths(own)
            along += hops.along(np.array([path.hops for path in paths]), own.start, own.stop, own.by)
            lengths = np.maximum(lengths, along.max(axis=0) + once_s)
            kept = np.flatnonzero(lengths < below)
            own, lengths, once_s = own.of(kept), lengths[kept], once_s[kept]
        if len(lengths) > _MOST:
            own = own.of(np.sort(np.argsort(lengths, kind="stable")[:_MOST]))
        return own

    def _terms(self, chains: Ints, again: Floats) -> Floats:
        """Return what each action of each stage takes, by kind, and each hop: [cut, term]."""
        line, scale = self.line, self.model.scale
        forward, backward, weight = (
            scale * np.diff(each[chains], axis=1) for each in (line.forward_s, line.backward_s, line.weight_s)
        )
        backward = backward + again * forward
        hops_s = self._hops.of(chains[:, :-2], chains[:, 1:-1], chains[:, 2:])
        return np.concatenate([forward, backward, backward - weight, weight, *hops_s], axis=1)

    def _once_s(self, chains: Ints) -> Floats:
        if not self.model.ties and not self.model.sync_s.any():
            return np.zeros(len(chains))
        return self.model.once_s(stages_of(chains, self.line.size))

    def _keeps_once(self, moved: Rows, bounds: Ints) -> NDArray[np.bool_]:
        """Tell which moves leave what happens once per step as it is: no boundary passes a user of a tie."""
        if self.model.sync_s.any():
            return np.zeros(len(moved.by), dtype=np.bool_)
        users = np.zeros(self.line.size + 1, dtype=np.int64)
        for _, own in self.model.ties:
            users[np.array(own) + 1] += 1
        before = users.cumsum()
        passed = np.stack([before[np.clip(bounds + by, 0, self.line.size)] != before[bounds] for by in _BY])
        running = np.concatenate([np.zeros((4, 1), dtype=np.int64), passed.cumsum(axis=1)], axis=1)
        kept: NDArray[np.bool_] = running[moved.by, moved.stop] == running[moved.by, moved.start]
        return kept


class _Changes:
    """What the actions of some paths take after each of many moves of one cut."""

    def __init__(self, paths: Paths, some: Sequence[Path], bounds: Ints, shifted: Ints, redone: Redone) -> None:
        line, scale = paths.line, paths.model.scale
        self.bounds, self.shifted, self.forward_s = bounds, shifted, line.forward_s
        ahead, back, inner, weight = np.moveaxis(np.array([path.counts for path in some]) * scale, 1, 0)
        each = ahead + redone.now * (back + inner)
        self.loose: Floats = (redone.now - redone.least) * (back + inner)
        costs = (line.forward_s, each), (line.backward_s, back + inner), (line.weight_s, weight - inner)
        # A boundary further right adds to the stage before it what it takes from the stage behind it.
        gained = np.zeros((len(some), *shifted.shape))
        self.length: Floats = np.zeros(len(some))
        for running, count in costs:
            turned = count[:, None, :-1] - count[:, None, 1:]
            gained[:, :, 1:-1] += turned * (running[shifted[:, 1:-1]] - running[bounds[1:-1]])
            self.length += count @ np.diff(running[bounds])
        self.gained = running_sums(gained)
        own = self.loose * np.diff(line.forward_s[bounds])
        self.mates = running_sums(own @ (redone.mates & ~np.eye(own.shape[1], dtype=np.bool_)))

    def lengths(self, moved: Rows) -> Floats:
        """Return how long the actions of each path are at least after each move: [path, move]."""
        start, stop, by = moved.start, moved.stop, moved.by
        lengths: Floats = self.length[:, None] + self.gained[:, by, stop] - self.gained[:, by, start]
        if self.loose.any():
            lengths -= self._loosened(start, stop, by)
        return lengths

    def _loosened(self, start: Ints, stop: Ints, by: Ints) -> Floats:
        """Return what each path gains at most where the devices of moved stages need not do as much again."""
        running, bounds, shifted = self.forward_s, self.bounds, self.shifted
        whole = running_sums(self.loose[:, None] * (running[shifted[:, 1:]] - running[shifted[:, :-1]]))
        found = whole[:, by, stop - 1] - whole[:, by, start]
        found += self.loose[:, start - 1] * (running[shifted[by, start]] - running[bounds[start - 1]])
        found += self.loose[:, stop - 1] * (running[bounds[stop]] - running[shifted[by, stop - 1]])
        loosened: Floats = found + self.mates[:, stop] - self.mates[:, start - 1]
        return loosened
