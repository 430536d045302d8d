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

from autosplit.partition.line.interval_dp import IntervalDP, StageSlot
from autosplit.partition.line.line import Line, LineBytes
from autosplit.partition.problem import Problem
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


Policy = Sequence[Sequence[str]]
"""What each stage may recompute, the fastest first; one entry per stage."""


@dataclass(frozen=True)
class LineCut:
    """Stage ``k`` has the units from ``bounds[k]`` to ``bounds[k + 1]``; what its step takes and its devices hold."""

    bounds: tuple[int, ...]
    recompute: tuple[str, ...]
    step_s: float
    device_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Chosen:
    """Cuts that fit: their bounds, and which of the options, by name, each stage takes."""

    chains: Ints
    options: Ints
    names: Sequence[str]

    def recompute(self, row: int) -> tuple[str, ...]:
        """Return what the stages of a cut recompute."""
        return tuple(self.names[option] for option in self.options[row])


class LineSearch:
    """Cuts of one line into ``stages`` stages under one schedule."""

    def __init__(self, line: Line, problem: Problem, *, stages: int) -> None:
        self.line, self.problem, self.stages = line, problem, stages
        self.model = StepModel(problem, range(line.size), stages=stages)
        self.lane = self.model.lane
        self.in_flight = problem.in_flight(stages)
        schedule = self.model.schedule
        self.stages_on = [list(schedule.stages_on(lane)) for lane in range(len(schedule.lanes))]
        self.replicas = [len(schedule.lanes_of(stage)) for stage in range(stages)]
        self.each = max(map(len, self.stages_on))

    def fastest(
        self, policy: Policy, room: Sequence[float] | None = None, *, near: LineCut | None = None, move: bool = True
    ) -> LineCut | None:
        """Return the cut with the shortest step whose devices hold no more than ``room``, None where none is found.

        Every stage takes of its options the fastest with which its device has room. The neighbours of ``near`` are
        looked at too: under tight limits the dynamic program, which divides a device's memory evenly among its stages,
        may miss all that fit. Without ``move`` its boundaries stay as they are (`moved_on`).
        """
        best = None if near is None else self._best(self._fitting(self._beside(near), policy, room))
        for slack in _SLACK if self.each > 1 and room is not None else (1.0,):
            bands = self._bands(policy, None if room is None else [limit * slack / self.each for limit in room])
            chains = np.array(list(bands.chains()), dtype=np.int64).reshape(-1, self.stages + 1)
            cut = self._best(self._fitting(chains, policy, room))
            if cut is not None and (best is None or cut.step_s < best.step_s):
                best = cut
            if cut is not None:
                break
        return best if best is None or not move else self.moved_on(best, policy, room)

    def _beside(self, cut: LineCut) -> Ints:
        """Return the cut, for other options may fit it, and those with one boundary elsewhere, or two."""
        bounds = np.array([cut.bounds], dtype=np.int64)
        return np.concatenate([bounds, moved(cut.bounds, further=False), paired(cut.bounds)])

    def _bands(self, policy: Policy, room: Sequence[float] | None, *, least_bytes: bool = False) -> IntervalDP:
        slots = []
        for stage, options in enumerate(policy):
            limit = None if room is None else room[self.lane[stage]]
            each = tuple((option, self.share(option)) for option in options)
            scale = float(self.model.scale[stage]) / self.replicas[stage]
            slots.append(StageSlot(scale, self.in_flight[stage], each, limit))
        widest = self.line.size if least_bytes else _widest(self)
        return IntervalDP(self.line, slots, widest=widest, least_bytes=least_bytes)

    def min_memory_cut(self, policy: Policy, room: Sequence[float]) -> LineCut:
        """Return the cut whose fullest device is fullest by least, relative to its room.

        Every stage takes the one of its options with the least bytes.
        """
        chain = self._bands(policy, list(room), least_bytes=True).highest()
        assert chain is not None, "without a limit every line of enough units can be cut"
        names = _names(policy)
        stage_bytes = self._bytes(chain, names)
        held = [dict(zip(names, each, strict=True)) for each in (stage_bytes.held + stage_bytes.transient).tolist()]
        return self.cut(chain, [min(options, key=each.__getitem__) for options, each in zip(policy, held, strict=True)])

    def cut(self, bounds: Sequence[int], recompute: Sequence[str]) -> LineCut:
        """Return what a cut costs whose stages recompute as listed."""
        chain = np.array(bounds, dtype=np.int64)
        step_s = float(self._steps(chain[None], self._again(recompute)[None])[0])
        return LineCut(tuple(bounds), tuple(recompute), step_s, self.device_bytes(bounds, recompute))

    def share(self, option: str) -> float:
        """Return which part of its forwards a stage does again."""
        return self.problem.again(option)

    def _again(self, recompute: Sequence[str]) -> Floats:
        return np.array([self.share(option) for option in recompute])

    def device_bytes(self, chain: Sequence[int], recompute: Sequence[str]) -> tuple[int, ...]:
        """Return what each device holds: of its stages' transients the largest."""
        options = sorted(set(recompute))
        each, chosen = self._bytes(chain, options), np.array([options.index(option) for option in recompute])
        return tuple(round(float(each.needed(chosen[stages], stages=stages))) for stages in self.stages_on)

    def _bytes(
        self, chains: Sequence[int] | Ints, options: Sequence[str], *, stages: Sequence[int] | None = None
    ) -> LineBytes:
        """Return what some stages hold under each option."""
        which = range(self.stages) if stages is None else stages
        bounds = np.asarray(chains, dtype=np.int64)
        return LineBytes.of(self.line, bounds, options, stages=which, in_flight=self.in_flight)

    def _fitting(
        self, chains: Ints, policy: Policy, room: Sequence[float] | None, *, beside: LineCut | None = None
    ) -> _Chosen:
        """Return the cuts that fit, and what each stage does again: nothing more than it must for its device's room.

        ``beside``: a cut that fits, most of whose stages the others share.
        """
        names = _names(policy)
        asked = [options[0] for options in policy] if beside is None else beside.recompute
        chosen = np.tile(np.array([names.index(option) for option in asked], dtype=np.int64), (len(chains), 1))
        if room is None or not len(chains):
            return _Chosen(chains, chosen, names)
        changed = np.ones((len(chains), self.stages), dtype=np.bool_)
        if beside is not None:
            other = chains != np.array(beside.bounds)
            changed = other[:, :-1] | other[:, 1:]
        fits = np.ones(len(chains), dtype=np.bool_)
        allowed = [[names.index(option) for option in options] for options in policy]
        for stages, limit in zip(self.stages_on, room, strict=False):
            some = np.flatnonzero(changed[:, stages].any(axis=1) & fits)
            if len(some):
                each, choices = self._bytes(chains[some], names, stages=stages), [allowed[stage] for stage in stages]
                chosen[some[:, None], stages], fits[some] = self._on_device(each, choices, self._again(names), limit)
        kept = np.flatnonzero(fits)
        return _Chosen(chains[kept], chosen[kept], names)

    def _on_device(
        self, each: LineBytes, allowed: Sequence[Sequence[int]], again: Floats, limit: float
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Return what the stages of one device take of their options in each cut, and whether they have room so."""
        first = np.array([options[0] for options in allowed])
        chosen, fits = np.tile(first, (len(each.held), 1)), each.needed(first) <= limit
        free = any(len(options) > 1 for options in allowed)
        for row in np.flatnonzero(~fits).tolist() if free else ():
            single = LineBytes(each.held[row], each.transient[row], each.step[row])
            leaner = self._leaner(single, allowed, again.tolist(), limit)
            if leaner is not None:
                fits[row], chosen[row] = True, leaner
        return chosen, fits

    def _leaner(
        self, each: LineBytes, allowed: Sequence[Sequence[int]], again: Sequence[float], limit: float
    ) -> list[int] | None:
        """Return what the stages of one device recompute so that it has room; None if nothing suffices."""
        held, transient, step = each.held.tolist(), each.transient.tolist(), float(each.step.sum())
        chosen = [options[0] for options in allowed]
        if step > limit:
            return None

        def needed(option_of: Sequence[int]) -> float:
            pairs = list(enumerate(option_of))
            moving = sum(held[stage][option] for stage, option in pairs) + max(transient[s][o] for s, o in pairs)
            return float(max(moving, step))

        while (now := needed(chosen)) > limit:
            moves = []
            for stage, options in enumerate(allowed):
                for option in options[options.index(chosen[stage]) + 1 :]:
                    then = needed([*chosen[:stage], option, *chosen[stage + 1 :]])
                    moves.append((then > limit, again[option] * (then <= limit), then - now, stage, option))
            # Nothing may come of one stage alone: what one does again is there beside what another keeps.
            if not moves or (best := min(moves))[2] > 0:
                return None
            chosen[best[3]] = best[4]
        return chosen

    def _steps(self, chains: Ints, again: Floats) -> Floats:
        """Return what a step takes in each cut."""
        return self.model.steps(stages_of(chains, self.line.size), again)

    def _best(self, chosen: _Chosen) -> LineCut | None:
        """Return the cut with the shortest step."""
        if not len(chosen.chains):
            return None
        steps = self._steps(chosen.chains, self._again(chosen.names)[chosen.options])
        best = int(np.argmin(steps))
        bounds, recompute = tuple(chosen.chains[best].tolist()), chosen.recompute(best)
        return LineCut(bounds, recompute, float(steps[best]), self.device_bytes(bounds, recompute))

    def moved_on(self, cut: LineCut, policy: Policy, room: Sequence[float] | None) -> LineCut:
        """Return the cut with its boundaries moved while the step gets shorter: a few at a time, at last any row."""
        left = _MOVED // max(self.model.simulator.count, 1)
        for further in (False, True) if self.stages <= _RANGED else (False,):
            for _ in range(_ROUNDS):
                better, simulated = self._nearby(cut, policy, room, left, further=further)
                left -= simulated
                if better is None:
                    break
                cut = better
        return cut

    def _nearby(
        self, cut: LineCut, policy: Policy, room: Sequence[float] | None, most: int, *, further: bool
    ) -> tuple[LineCut | None, int]:
        """Return the best of the cuts with moved boundaries if it gains something, and how many were simulated."""
        chains = np.concatenate([paired(cut.bounds), moved(cut.bounds, further=further)])
        if not len(chains) or most < 1:
            return None, 0
        chosen = self._fitting(chains[:: -(-len(chains) // most)], policy, room, beside=cut)
        best = self._best(chosen)
        gains = best is not None and best.step_s < cut.step_s * (1 - _GAIN)
        return best if gains else None, len(chosen.chains)


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


def listed(recompute: Sequence[str]) -> Policy:
    """Return the policy under which each stage recomputes what is listed for it."""
    return [(option,) for option in recompute]


def _names(policy: Policy) -> list[str]:
    """Return all options that some stage has."""
    return list(dict.fromkeys(option for options in policy for option in options))


def _widest(search: LineSearch) -> int:
    """Return the most units of a stage that is not much longer than the average."""
    line = search.line
    works = line.forward_s + line.backward_s
    longest = _LONGEST * float(works[-1]) * max(search.replicas) / sum(search.replicas)
    widest = int((np.searchsorted(works, works + longest, side="right") - 1 - np.arange(len(works))).max())
    return max(min(line.size, widest), 1, -(-line.size // search.stages))
