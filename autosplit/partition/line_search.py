"""The best cut of a line of units into stages: dynamic programs over the line, the step of what they find simulated.

A step is about ``(microbatches - 1) x the longest stage + all stages once``. So for several limits on the longest the
cut with the least sum is a candidate, under the recompute option that each stage needs to fit; the shortest simulated
step is taken, and its boundaries move while that gets shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Graph
from autosplit.partition.line import Line, StageTable
from autosplit.partition.problem import Problem, again_share
from autosplit.partition.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LONGEST = 3.0
"""Stages of so many times the average seconds are looked at, longer ones only where nothing else fits."""
_SHARES = ((0.0, (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)), (1.0, (1.0, 1.05)))
"""Shares of the transfers in a stage's length, and how far above the shortest possible the longest may be."""
_SLACK = (1.0, 1.15, 1.4)
"""Of a device with several stages each is given its share of the room, or so much more: the others may need less."""
_TIES = 1e-9
_ROUNDS = 8
_PAIRED = 16
"""Of at most so many stages two boundaries move at a time."""
_MOVED = 2_000_000
"""Actions that are simulated in moving boundaries, about: chains times the schedule's actions."""


@dataclass(frozen=True)
class LineCut:
    """Stage ``k`` has the units from ``bounds[k]`` to ``bounds[k + 1]``; what its step takes and its devices hold."""

    bounds: tuple[int, ...]
    recompute: tuple[str, ...]
    step_s: float
    device_bytes: tuple[int, ...]


class LineSearch:
    """Cuts of one line into ``stages`` stages under one schedule."""

    def __init__(self, line: Line, problem: Problem, *, stages: int) -> None:
        self.line, self.problem, self.stages = line, problem, stages
        self.model = StepModel(problem, _chain(line), stages=stages)
        self.lane = self.model.lane
        self.in_flight = problem.in_flight(stages)
        self.stages_on = [
            [stage for stage in range(stages) if self.lane[stage] == lane] for lane in range(max(self.lane) + 1)
        ]
        self.each = max(map(len, self.stages_on))
        self.tables: dict[str, StageTable] = {}

    def fastest(
        self, options: Sequence[str], room: Sequence[float] | None = None, *, near: LineCut | None = None
    ) -> LineCut | None:
        """Return the cut with the shortest step whose devices hold no more than ``room``, None where none is found.

        Every stage takes of ``options`` the fastest with which its device has room. The neighbours of ``near`` are
        looked at too.
        """
        return self._fastest(self._ranked(options), room, near)

    def listed(
        self, recompute: Sequence[str], room: Sequence[float] | None = None, *, near: LineCut | None = None
    ) -> LineCut | None:
        """Return the like cut whose stages recompute as listed, one entry per stage."""
        return self._fastest(tuple(recompute), room, near)

    def _fastest(
        self, ranked: Sequence[str], room: Sequence[float] | None, near: LineCut | None = None
    ) -> LineCut | None:
        """``ranked`` is a list of what every stage may take, or a tuple of what each takes."""
        best = None if near is None else self._scored(_near(near.bounds), ranked, room)
        for slack in _SLACK if self.each > 1 and room is not None else (1.0,):
            bands = _Bands(self, ranked, None if room is None else [own * slack / self.each for own in room])
            found = self._scored(bands.chains(), ranked, room)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
            if found is not None:
                break
        return None if best is None else self._moved(best, ranked, room)

    def leanest(self, options: Sequence[str], room: Sequence[float]) -> LineCut:
        """Return the cut whose fullest device is fullest by least, relative to its room.

        Every stage takes the leanest of a list of options, or what a tuple lists for it.
        """
        bands = _Bands(self, options, list(room), least_bytes=True)
        chain = bands.highest()
        assert chain is not None, "without a limit every line of enough units can be cut"
        if isinstance(options, tuple):
            return self._cut(chain, options)
        held, transient = self._bytes(chain, options, with_step=False)
        return self._cut(chain, [options[least] for least in (held + transient).argmin(axis=1)])

    def cut(self, bounds: Sequence[int], recompute: Sequence[str]) -> LineCut:
        """Return what a cut costs whose stages recompute as listed."""
        return self._cut(tuple(bounds), list(recompute))

    def table(self, option: str) -> StageTable:
        """Return the bytes of all runs of units under an option."""
        if option not in self.tables:
            self.tables[option] = self.line.table(option)
        return self.tables[option]

    def share(self, option: str) -> float:
        """Return which part of its forwards a stage does again."""
        return again_share(option, microbatches=self.problem.microbatches)

    def _ranked(self, options: Sequence[str]) -> list[str]:
        return sorted(options, key=self.share)

    def device_bytes(self, chain: Sequence[int], recompute: Sequence[str]) -> tuple[int, ...]:
        """Return what each device holds: of its stages' transients the largest."""
        held, transient = self._bytes(chain, sorted(set(recompute)))
        options = sorted(set(recompute))
        own = [options.index(option) for option in recompute]
        return tuple(
            round(_sum(held, transient, [(stage, own[stage]) for stage in stages])) for stages in self.stages_on
        )

    def _bytes(self, chain: Sequence[int], options: Sequence[str], *, with_step: bool = True) -> tuple[Floats, Floats]:
        """Return what each stage holds under each option, and the transient that comes on top: [stage, option].

        The optimizer's step, which is the same under all options, counts as a transient too, or does not.
        """
        tables, runs = [self.table(option) for option in options], (list(chain[:-1]), list(chain[1:]))
        transient = np.array([table.transient[runs] for table in tables]).T
        fixed = np.array([table.fixed[runs] for table in tables]).T
        each = np.array([table.each[runs] for table in tables]).T
        held = fixed - transient + np.array(self.in_flight)[:, None] * each
        if with_step:
            transient = np.maximum(transient, np.array([table.least[runs] for table in tables]).T - held)
        return held, transient

    def _options(self, chain: Sequence[int], ranked: Sequence[str], room: Sequence[float] | None) -> list[str] | None:
        """Return what each stage does again: nothing more than it must for its device to have room."""
        if isinstance(ranked, tuple):
            fits = room is None or all(
                held <= limit for held, limit in zip(self.device_bytes(chain, ranked), room, strict=False)
            )
            return list(ranked) if fits else None
        if room is None:
            return [ranked[0]] * self.stages
        held, transient = self._bytes(chain, ranked)
        again = [self.share(option) for option in ranked]
        chosen = [0] * self.stages
        for stages, limit in zip(self.stages_on, room, strict=False):
            own = dict.fromkeys(stages, 0)
            while (needed := _sum(held, transient, own.items())) > limit:
                moves = []
                for stage in stages:
                    for option in range(own[stage] + 1, len(ranked)):
                        saved = needed - _sum(held, transient, (own | {stage: option}).items())
                        moves.append(
                            (needed - saved > limit, again[option] * (needed - saved <= limit), -saved, stage, option)
                        )
                if not moves or (best := min(moves))[2] >= 0:
                    return None
                own[best[3]] = best[4]
            for stage, option in own.items():
                chosen[stage] = option
        return [ranked[option] for option in chosen]

    def _steps(self, chains: Sequence[Sequence[int]], chosen: Sequence[Sequence[str]]) -> Floats:
        units = np.arange(self.line.size)
        stage_of = np.array([np.searchsorted(chain[1:-1], units, side="right") for chain in chains], dtype=np.int64)
        again = np.array([[self.share(option) for option in own] for own in chosen])
        return self.model.steps(stage_of, again)

    def _scored(
        self, chains: Iterator[tuple[int, ...]], ranked: Sequence[str], room: Sequence[float] | None
    ) -> LineCut | None:
        options = {chain: self._options(chain, ranked, room) for chain in chains}
        fitting = {chain: own for chain, own in options.items() if own is not None}
        if not fitting:
            return None
        steps = self._steps(list(fitting), list(fitting.values()))
        best = int(np.argmin(steps))
        chain = list(fitting)[best]
        return LineCut(chain, tuple(fitting[chain]), float(steps[best]), self.device_bytes(chain, fitting[chain]))

    def _cut(self, chain: tuple[int, ...], chosen: Sequence[str]) -> LineCut:
        step_s = float(self._steps([chain], [chosen])[0])
        return LineCut(chain, tuple(chosen), step_s, self.device_bytes(chain, chosen))

    def _moved(self, cut: LineCut, ranked: Sequence[str], room: Sequence[float] | None) -> LineCut:
        """Move boundaries while the step gets shorter."""
        left = _MOVED // max(self.model.simulator.count, 1)
        for _ in range(_ROUNDS):
            near = list(_near(cut.bounds))
            left -= len(near)
            if left < 0:
                break
            found = self._scored(iter(near), ranked, room)
            if found is None or found.step_s >= cut.step_s * (1 - 1e-9):
                break
            cut = found
        return cut


class _Bands:
    """Lengths of the stages at each place, by how many units they have and where they end."""

    def __init__(
        self, search: LineSearch, ranked: Sequence[str], room: Sequence[float] | None, *, least_bytes: bool = False
    ) -> None:
        self.search, line = search, search.line
        widest = line.size if least_bytes else _widest(search)
        ends, lengths = np.arange(line.size + 1), np.arange(1, widest + 1)[:, None]
        self.tail: Ints = ends - lengths
        self.none = self.tail < 0
        self.tail = np.where(self.none, 0, self.tail)
        self.ends = np.broadcast_to(ends, self.tail.shape)
        self.by_kind: dict[tuple[float, float, int, str], Floats] = {}
        self.cost = [self._of(place, ranked, room, least_bytes=least_bytes) for place in range(search.stages)]
        crossing = line.cut_s[self.tail] + line.cut_s[self.ends]
        self.crossing_s: Floats = crossing

    def _of(self, place: int, ranked: Sequence[str], room: Sequence[float] | None, *, least_bytes: bool) -> Floats:
        search, line = self.search, self.search.line
        if isinstance(ranked, tuple):
            ranked = [ranked[place]]
        limit = math.inf if room is None else room[search.lane[place]]
        kind = float(search.model.scale[place]), limit, search.in_flight[place], ranked[0]
        if kind in self.by_kind:
            return self.by_kind[kind]
        forward = line.forward_s[self.ends] - line.forward_s[self.tail]
        works = forward + line.backward_s[self.ends] - line.backward_s[self.tail]
        cost = np.full(self.tail.shape, np.inf)
        for option in reversed(ranked):
            if room is None:
                cost = kind[0] * (works + search.share(option) * forward)
                continue
            table = search.table(option)
            needed = table.fixed[self.tail, self.ends] + kind[2] * table.each[self.tail, self.ends]
            needed = np.maximum(needed, table.least[self.tail, self.ends])
            if least_bytes:
                cost = np.minimum(cost, needed / limit)
            else:
                cost = np.where(needed <= limit, kind[0] * (works + search.share(option) * forward), cost)
        cost[self.none] = np.inf
        self.by_kind[kind] = cost
        return cost

    def chains(self) -> Iterator[tuple[int, ...]]:
        """Yield the cuts that come into question."""
        known = set()
        for share, more in _SHARES:
            costs = self.cost if not share else [own + share * self.crossing_s for own in self.cost]
            shortest = self._program(costs, highest=True)
            if shortest is None:
                return
            value, chain = shortest
            found = [chain]
            for limit in more:
                within = [np.where(own <= value * limit * (1 + 1e-12), own, np.inf) for own in costs]
                least = self._program([own + _TIES * own * own / (value or 1.0) for own in within], highest=False)
                if least is not None:
                    found.append(least[1])
            for each in found:
                if each not in known:
                    known.add(each)
                    yield each

    def highest(self) -> tuple[int, ...] | None:
        """Return the cut whose highest stage is lowest."""
        found = self._program(self.cost, highest=True)
        return None if found is None else found[1]

    def _program(self, costs: Sequence[Floats], *, highest: bool) -> tuple[float, tuple[int, ...]] | None:
        best = np.full(self.search.line.size + 1, np.inf)
        best[0] = 0.0
        columns, back = np.arange(len(best)), []
        for cost in costs:
            before = best[self.tail]
            value = np.maximum(before, cost) if highest else before + cost
            chosen = value.argmin(axis=0)
            best = value[chosen, columns]
            back.append(self.tail[chosen, columns])
        if not math.isfinite(best[-1]):
            return None
        chain = [len(best) - 1]
        for tails in reversed(back):
            chain.append(int(tails[chain[-1]]))
        return float(best[-1]), tuple(chain[::-1])


def _widest(search: LineSearch) -> int:
    """Return the most units of a stage that is not much longer than the average."""
    line = search.line
    works = line.forward_s + line.backward_s
    longest = _LONGEST * float(works[-1]) / search.stages
    widest = int((np.searchsorted(works, works + longest, side="right") - 1 - np.arange(len(works))).max())
    return max(min(line.size, widest), 1, -(-line.size // search.stages))


def _near(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one boundary a unit or two elsewhere, or all from one on or up to one, or two apart."""
    last = len(bounds) - 1
    for place in range(1, last):
        for by in (-2, -1, 1, 2):
            runs = {(place, place + 1), (1, place + 1), (place, last)} if abs(by) == 1 else {(place, place + 1)}
            for start, stop in sorted(runs):
                moved = tuple(own + by * (start <= index < stop) for index, own in enumerate(bounds))
                if all(left < right for left, right in pairwise(moved)):
                    yield moved
    for first, second in combinations(range(1, last), 2) if last <= _PAIRED else ():
        for by in (-1, 1):
            moved = tuple(own + by * (index == first) - by * (index == second) for index, own in enumerate(bounds))
            if all(left < right for left, right in pairwise(moved)):
                yield moved


def _chain(line: Line) -> Graph:
    """Return the line's units as a graph: each is a group."""
    works = line.problem.works
    count = len(works)
    return Graph(
        times_s=tuple(work.forward_s + work.backward_s for work in works),
        static_bytes=tuple(work.static_bytes for work in works),
        resident_bytes=(0,) * count,
        transient_bytes=tuple(work.transient_bytes for work in works),
        edges=frozenset((unit, unit + 1) for unit in range(count - 1)),
        tensors=(),
        storages=(),
        group_of=tuple(range(count)),
    )


def _sum(held: Floats, transient: Floats, chosen: Iterable[tuple[int, int]]) -> float:
    """Return what a device holds whose stages have these options."""
    pairs = list(chosen)
    return float(sum(held[pair] for pair in pairs) + max(transient[pair] for pair in pairs))
