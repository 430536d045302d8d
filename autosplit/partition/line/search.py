"""The best cut of a line of units into stages: dynamic programs over the line, the step of what they find simulated.

A step is about ``(microbatches - 1) x the longest stage + all stages once``. So for several limits on the longest the
cut with the least sum is a candidate, under the recompute option that each stage needs to fit (`IntervalDP`); the
shortest simulated step is taken, and its boundaries move while that gets shorter, alone or in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Graph
from autosplit.partition.line.interval_dp import IntervalDP, Place
from autosplit.partition.line.line import Line, LineBytes
from autosplit.partition.problem import Problem, recompute_fraction
from autosplit.partition.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LONGEST = 3.0
"""Stages of so many times the average seconds are looked at, longer ones only where nothing else fits."""
_SLACK = (1.0, 1.15, 1.4)
"""Of a device with several stages each is given its share of the room, or so much more: the others may need less."""
_PAIRED, _RANGED = 16, 32
"""Of at most so many stages two boundaries move apart or towards each other; any row of boundaries moves."""
_BY = (-2, -1, 1, 2)
_ROUNDS = 8
_MOVED = 20_000_000
"""Actions that are simulated in moving boundaries, about: chains times the schedule's actions."""
_GAIN = 1e-9
"""What a move must gain, as a part of the step."""


@dataclass(frozen=True)
class LineCut:
    """Stage ``k`` has the units from ``bounds[k]`` to ``bounds[k + 1]``; what its step takes and its devices hold."""

    bounds: tuple[int, ...]
    recompute: tuple[str, ...]
    step_s: float
    device_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Chosen:
    """Cuts that fit: their bounds, and which of the options each stage takes."""

    chains: Ints
    options: Ints


class LineSearch:
    """Cuts of one line into ``stages`` stages under one schedule."""

    def __init__(self, line: Line, problem: Problem, *, stages: int) -> None:
        self.line, self.problem, self.stages = line, problem, stages
        self.model = StepModel(problem, _chain(line), stages=stages)
        self.lane = self.model.lane
        self.in_flight = problem.in_flight(stages)
        schedule = self.model.schedule
        self.stages_on = [list(schedule.stages_on(lane)) for lane in range(len(schedule.lanes))]
        self.replicas = [len(schedule.lanes_of(stage)) for stage in range(stages)]
        self.each = max(map(len, self.stages_on))

    def fastest(
        self,
        options: Sequence[str],
        room: Sequence[float] | None = None,
        *,
        near: LineCut | None = None,
    ) -> LineCut | None:
        """Return the cut with the shortest step whose devices hold no more than ``room``, None where none is found.

        Every stage takes of ``options`` the fastest with which its device has room. The neighbours of ``near`` are
        looked at too.
        """
        return self._fastest(sorted(options, key=self.share), room, near)

    def listed(
        self,
        recompute: Sequence[str],
        room: Sequence[float] | None = None,
        *,
        near: LineCut | None = None,
    ) -> LineCut | None:
        """Return the like cut whose stages recompute as listed, one entry per stage."""
        return self._fastest(tuple(recompute), room, near)

    def _fastest(self, ranked: Sequence[str], room: Sequence[float] | None, near: LineCut | None) -> LineCut | None:
        """``ranked`` is a list of what every stage may take, or a tuple of what each takes."""
        best = None if near is None else self._best(self._fitting(self._beside(near), ranked, room), ranked)
        for slack in _SLACK if self.each > 1 and room is not None else (1.0,):
            bands = self._bands(ranked, None if room is None else [own * slack / self.each for own in room])
            chains = np.array(list(bands.chains()), dtype=np.int64).reshape(-1, self.stages + 1)
            found = self._best(self._fitting(chains, ranked, room), ranked)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
            if found is not None:
                break
        return None if best is None else self._moved(best, ranked, room)

    def _beside(self, cut: LineCut) -> Ints:
        """Return the cut, for other options may fit it, and those with one boundary elsewhere, or two."""
        own = np.array([cut.bounds], dtype=np.int64)
        return np.concatenate([own, moved(cut.bounds, further=False), paired(cut.bounds)])

    def _bands(self, ranked: Sequence[str], room: Sequence[float] | None, *, least_bytes: bool = False) -> IntervalDP:
        places = []
        for place in range(self.stages):
            options = [ranked[place]] if isinstance(ranked, tuple) else ranked
            limit = None if room is None else room[self.lane[place]]
            each = tuple((option, self.share(option)) for option in options)
            scale = float(self.model.scale[place]) / self.replicas[place]
            places.append(Place(scale, self.in_flight[place], each, limit))
        widest = self.line.size if least_bytes else _widest(self)
        return IntervalDP(self.line, places, widest=widest, least_bytes=least_bytes)

    def min_memory_cut(self, options: Sequence[str], room: Sequence[float]) -> LineCut:
        """Return the cut whose fullest device is fullest by least, relative to its room.

        Every stage takes the one with the least bytes of a list of options, or what a tuple lists for it.
        """
        chain = self._bands(options, list(room), least_bytes=True).highest()
        assert chain is not None, "without a limit every line of enough units can be cut"
        if isinstance(options, tuple):
            return self.cut(chain, options)
        own = self._bytes(chain, options)
        return self.cut(chain, [options[least] for least in (own.held + own.transient).argmin(axis=1)])

    def cut(self, bounds: Sequence[int], recompute: Sequence[str]) -> LineCut:
        """Return what a cut costs whose stages recompute as listed."""
        chain = np.array(bounds, dtype=np.int64)
        step_s = float(self._steps(chain[None], self._again(recompute)[None])[0])
        return LineCut(tuple(bounds), tuple(recompute), step_s, self.device_bytes(bounds, recompute))

    def share(self, option: str) -> float:
        """Return which part of its forwards a stage does again."""
        return recompute_fraction(option, microbatches=self.problem.microbatches)

    def _again(self, recompute: Sequence[str]) -> Floats:
        return np.array([self.share(option) for option in recompute])

    def device_bytes(self, chain: Sequence[int], recompute: Sequence[str]) -> tuple[int, ...]:
        """Return what each device holds: of its stages' transients the largest."""
        options = sorted(set(recompute))
        each, own = self._bytes(chain, options), np.array([options.index(option) for option in recompute])
        return tuple(round(float(each.needed(own[stages], stages=stages))) for stages in self.stages_on)

    def _bytes(
        self, chains: Sequence[int] | Ints, options: Sequence[str], *, stages: Sequence[int] | None = None
    ) -> LineBytes:
        """Return what some stages hold under each option."""
        own = range(self.stages) if stages is None else stages
        bounds = np.asarray(chains, dtype=np.int64)
        return LineBytes.of(self.line, bounds, options, stages=own, in_flight=self.in_flight)

    def _fitting(
        self, chains: Ints, ranked: Sequence[str], room: Sequence[float] | None, *, beside: LineCut | None = None
    ) -> _Chosen:
        """Return the cuts that fit, and what each stage does again: nothing more than it must for its device's room.

        ``beside``: a cut that fits, most of whose stages the others share.
        """
        options = _names(ranked)
        asked = ranked if isinstance(ranked, tuple) else [ranked[0]] * self.stages
        asked = asked if beside is None else beside.recompute
        chosen = np.tile(np.array([options.index(option) for option in asked], dtype=np.int64), (len(chains), 1))
        if room is None or not len(chains):
            return _Chosen(chains, chosen)
        changed = np.ones((len(chains), self.stages), dtype=np.bool_)
        if beside is not None:
            other = chains != np.array(beside.bounds)
            changed = other[:, :-1] | other[:, 1:]
        fits = np.ones(len(chains), dtype=np.bool_)
        for stages, limit in zip(self.stages_on, room, strict=False):
            some = np.flatnonzero(changed[:, stages].any(axis=1) & fits)
            if len(some):
                chosen[some[:, None], stages], fits[some] = self._on_device(chains[some], stages, ranked, limit)
        kept = np.flatnonzero(fits)
        return _Chosen(chains[kept], chosen[kept])

    def _on_device(
        self, chains: Ints, stages: Sequence[int], ranked: Sequence[str], limit: float
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Return what the stages of one device take of the options in each cut, and whether they have room so."""
        options = _names(ranked)
        listed = isinstance(ranked, tuple)
        own = np.array([options.index(ranked[stage]) if listed else 0 for stage in stages])
        each = self._bytes(chains, options, stages=stages)
        chosen, fits = np.tile(own, (len(chains), 1)), each.needed(own) <= limit
        for row in () if listed else np.flatnonzero(~fits).tolist():
            one = LineBytes(each.held[row], each.transient[row], each.step[row])
            found = self._leaner(one, options, limit)
            if found is not None:
                fits[row], chosen[row] = True, found
        return chosen, fits

    def _leaner(self, each: LineBytes, ranked: Sequence[str], limit: float) -> list[int] | None:
        """Return what the stages of one device do again so that it has room; None where they cannot."""
        again = [self.share(option) for option in ranked]
        held, transient, step = each.held.tolist(), each.transient.tolist(), float(each.step.sum())
        own = [0] * len(held)
        if step > limit:
            return None

        def needed(option_of: Sequence[int]) -> float:
            pairs = list(enumerate(option_of))
            moving = sum(held[stage][option] for stage, option in pairs) + max(transient[s][o] for s, o in pairs)
            return float(max(moving, step))

        while (now := needed(own)) > limit:
            moves = []
            for stage in range(len(own)):
                for option in range(own[stage] + 1, len(ranked)):
                    then = needed([*own[:stage], option, *own[stage + 1 :]])
                    moves.append((then > limit, again[option] * (then <= limit), then - now, stage, option))
            # Nothing may come of one stage alone: what one does again is there beside what another keeps.
            if not moves or (best := min(moves))[2] > 0:
                return None
            own[best[3]] = best[4]
        return own

    def _steps(self, chains: Ints, again: Floats) -> Floats:
        """Return what a step takes in each cut."""
        return self.model.steps(stages_of(chains, self.line.size), again)

    def _best(self, chosen: _Chosen, ranked: Sequence[str]) -> LineCut | None:
        """Return the cut with the shortest step."""
        again = self._redone(chosen, ranked)
        if not len(again):
            return None
        steps = self._steps(chosen.chains, again)
        best = int(np.argmin(steps))
        return self._written(chosen, best, float(steps[best]), ranked)

    def _redone(self, chosen: _Chosen, ranked: Sequence[str]) -> Floats:
        """Return which part of its forwards each stage of each cut does again."""
        redone: Floats = self._again(_names(ranked))[chosen.options]
        return redone

    def _written(self, chosen: _Chosen, row: int, step_s: float, ranked: Sequence[str]) -> LineCut:
        bounds, options = tuple(chosen.chains[row].tolist()), _names(ranked)
        recompute = tuple(options[option] for option in chosen.options[row])
        return LineCut(bounds, recompute, step_s, self.device_bytes(bounds, recompute))

    def _moved(self, cut: LineCut, ranked: Sequence[str], room: Sequence[float] | None) -> LineCut:
        """Move boundaries while the step gets shorter: a few at a time, at last any row of them."""
        left = _MOVED // max(self.model.simulator.count, 1)
        for further in (False, True) if self.stages <= _RANGED else (False,):
            for _ in range(_ROUNDS):
                found, simulated = self._nearby(cut, ranked, room, left, further=further)
                left -= simulated
                if found is None:
                    break
                cut = found
        return cut

    def _nearby(
        self, cut: LineCut, ranked: Sequence[str], room: Sequence[float] | None, most: int, *, further: bool
    ) -> tuple[LineCut | None, int]:
        """Return the best of the cuts with moved boundaries if it gains something, and how many were simulated."""
        chains = np.concatenate([paired(cut.bounds), moved(cut.bounds, further=further)])
        if not len(chains) or most < 1:
            return None, 0
        chosen = self._fitting(chains[:: -(-len(chains) // most)], ranked, room, beside=cut)
        found = self._best(chosen, ranked)
        gains = found is not None and found.step_s < cut.step_s * (1 - _GAIN)
        return found if gains else None, len(chosen.chains)


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


def _names(ranked: Sequence[str]) -> list[str]:
    """Return the options that stages choose among, or that a tuple lists."""
    return list(dict.fromkeys(ranked))


def _widest(search: LineSearch) -> int:
    """Return the most units of a stage that is not much longer than the average."""
    line = search.line
    works = line.forward_s + line.backward_s
    longest = _LONGEST * float(works[-1]) * max(search.replicas) / sum(search.replicas)
    widest = int((np.searchsorted(works, works + longest, side="right") - 1 - np.arange(len(works))).max())
    return max(min(line.size, widest), 1, -(-line.size // search.stages))


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
