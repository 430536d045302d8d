"""The simulated step of many cuts at once: `autosplit.schedule.simulate` with an axis more, for the search.

The actions of a schedule are sorted by clock tick, so that those of one tick depend on earlier ticks only:

    ends[actions of a tick, cuts] = max(ends[lane before], ends[stage before] + delay, ...) + duration

An action's needs on its own lane end before its lane is free; what is left is the neighbouring stage's action, and
those of other stages that values travel from, which most actions have none of. Every number is added and compared as
there, so the results are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.schedule.action import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CELLS = 2**18
"""Numbers in the table of ends that fit a processor's cache."""
_TIE = 1e-12
"""What ends so near to something else, relative to it, ends with it."""


@dataclass(frozen=True)
class StepTimes:
    """What one microbatch takes, per cut (rows) and stage.

    ``forward_s``, ``backward_s`` (all of it) and ``weight_s`` (the part that only weights need) are (cuts, stages).
    ``ahead_s[cut, a, b]`` is how long values travel from stage a to the later stage b, ``back_s[cut, a, b]`` how long
    gradients travel from b to a.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    ahead_s: Floats
    back_s: Floats


@dataclass(frozen=True)
class Path:
    """A way through the actions, each behind one that it waits for: no step of any cut is shorter than it.

    ``counts[kind, stage]`` is how many actions of a stage it has, by kind (forward, backward, input, weight);
    ``hops`` how often it goes with values to each next stage, and then with gradients back from it. Values that go
    further take their time beside that.
    """

    counts: Floats
    hops: Floats


@dataclass(frozen=True)
class _Arrivals:
    """What waits for a stage that is no neighbour: the waits of each ``action``, in order, from ``begins`` on.

    ``source`` and ``pair`` say per wait for which action, and with which pair's delay; ``ticks`` the place of each
    tick's first action, one more at the end.
    """

    action: Ints
    begins: Ints
    source: Ints
    pair: Ints
    ticks: tuple[int, ...]
    place: Mapping[int, int]
    """Of each action its place."""

    def waits(self, place: int) -> tuple[int, int]:
        """Return the first wait of the action at a place, and the one behind its last."""
        low = int(self.begins[place])
        return low, int(self.begins[place + 1]) if place + 1 < len(self.begins) else len(self.source)


@dataclass(frozen=True)
class _Delays:
    """Delays of each cut (rows) between neighbours by hop, and between the pairs that are further apart."""

    near: Floats
    far: Floats
    arrivals: _Arrivals


class FastSimulator:
    """The actions of one schedule as index arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        rows, stages = schedule.rows, schedule.stages
        self.count, self.stages = len(rows.ticks), stages
        last_tick = rows.ticks[-1] if rows.ticks else -1
        self.starts: Ints = np.searchsorted(np.array(rows.ticks, dtype=np.int64), np.arange(last_tick + 2))
        self.stage, self.duration, self.microbatch, lane = (
            np.array(each, dtype=np.int64) for each in (rows.stages, rows.kinds, rows.microbatches, rows.lanes)
        )
        by_lane = np.argsort(lane, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(lane[by_lane])), self.count - 1) if self.count else by_lane
        self.last: Ints = by_lane[ends]
        self.previous: Ints = np.full(self.count, self.count, dtype=np.int64)
        self.previous[by_lane[1:]] = by_lane[:-1]
        self.previous[by_lane[ends[:-1] + 1]] = self.count
        none = np.full((1, schedule.microbatches), self.count, dtype=np.int64)
        self.forward_row: Ints = np.concatenate([np.array(rows.forward, dtype=np.int64), none])
        self.gradient_row: Ints = np.concatenate([np.array(rows.gradient, dtype=np.int64), none])
        lane_of = np.array(schedule.stage_lane)
        self.travels: NDArray[np.bool_] = np.triu(lane_of[:, None] != lane_of[None, :])
        self._near, self._near_hop = self._neighbours()
        behind = np.stack([self.previous, self._near, self._near_hop, self.duration, self.stage], axis=1)
        self._behind: list[list[int]] = behind.tolist()
        self._known: dict[bytes, _Arrivals] = {}

    @cached_property
    def _ticks(self) -> list[tuple[int, int, Ints, Ints, Ints, Ints]]:
        """Of each tick its first action and the one behind its last, and their rows that `_ends` needs."""
        rows = (self.previous, self._near, self._near_hop, self.duration * self.stages + self.stage)
        return [(low, high, *(row[low:high] for row in rows)) for low, high in pairwise(self.starts.tolist())]

    @property
    def hops(self) -> int:
        """How many neighbours there are, there and back; what stands behind the last of them is no delay."""
        return 2 * (self.stages - 1)

    def steps(self, times: StepTimes) -> Floats:
        """Return the length of each cut's step."""
        return self._steps(times)[0]

    def steps_and_paths(self, times: StepTimes) -> tuple[Floats, list[Path]]:
        """Return the length of each cut's step, and two longest paths of the shortest.

        Of what ends as late, one path stays on its lane and the other goes on to the next stage.
        """
        delays = self._delays(times)
        steps, best, ends = self._steps(times, delays)
        return steps, [self._path(ends, delays, best, leaves=leaves) for leaves in (False, True)]

    def _steps(self, times: StepTimes, delays: _Delays | None = None) -> tuple[Floats, int, Floats]:
        """Return the steps, which cut has the shortest, and when its actions end."""
        delays = delays or self._delays(times)
        width = max(32, _CELLS // max(self.count, 1))
        steps, best, shortest = np.zeros(len(times.forward_s)), 0, np.zeros(self.count + 1)
        for low in range(0, len(steps), width):
            ends = self._ends(times, slice(low, low + width), delays)
            steps[low : low + width] = ends[self.last].max(axis=0, initial=0.0)
            place = low + int(steps[low : low + width].argmin())
            if low == 0 or steps[place] < steps[best]:
                best, shortest = place, ends[:, place - low]
        return steps, best, shortest

    def neighbours(self) -> Ints:
        """Return for each action the row of the neighbouring stage's that it waits for; ``count`` stands for none."""
        return self._near

    def _path(self, all_ends: Floats, delays: _Delays, cut: int, *, leaves: bool) -> Path:
        """Return a longest path through the actions of one cut, which end then."""
        counts, hops = np.zeros((4, self.stages)), np.zeros(self.hops + 1)
        far = delays.arrivals
        arrive = all_ends[far.source] + delays.far[cut, far.pair]
        at = int(self.last[all_ends[self.last].argmax()]) if len(self.last) else self.count
        ends, near_s = all_ends.tolist(), delays.near[cut].tolist()
        late = 1 - _TIE if leaves else 1 + _TIE
        while at < self.count:
            before, near, hop, kind, stage = self._behind[at]
            counts[kind, stage] += 1
            other, own = ends[near] + near_s[hop], ends[before]
            low, high = far.waits(far.place[at]) if at in far.place else (0, 0)
            furthest = low + int(arrive[low:high].argmax()) if high > low else -1
            if furthest >= 0 and arrive[furthest] > max(other, own):
                at = int(far.source[furthest])
            elif other > own * late:
                hops[hop] += 1
                at = near
            else:
                at = before
        return Path(counts, hops[:-1])

    def _ends(self, times: StepTimes, cuts: slice, delays: _Delays) -> Floats:
        """Return when each action ends in some of the cuts."""
        forward, backward, weight = times.forward_s[cuts], times.backward_s[cuts], times.weight_s[cuts]
        duration = np.concatenate([forward, backward, backward - weight, weight], axis=1).T.copy()
        near, far = delays.near[cuts].T.copy(), delays.far[cuts].T
        ends = np.zeros((self.count + 1, len(forward)))
        arrivals = delays.arrivals
        for (low, high, previous, beside, hop, kind), (first, last) in zip(
            self._ticks, pairwise(arrivals.ticks), strict=True
        ):
            start, other = ends.take(previous, 0), ends.take(beside, 0)
            other += near.take(hop, 0)
            np.maximum(start, other, out=start)
            if last > first:
                begin, end = int(arrivals.begins[first]), arrivals.waits(last - 1)[1]
                arrive = ends[arrivals.source[begin:end]] + far[arrivals.pair[begin:end]]
                if end - begin > last - first:
                    arrive = np.maximum.reduceat(arrive, arrivals.begins[first:last] - begin)
                own = arrivals.action[first:last] - low
                start[own] = np.maximum(start[own], arrive)
            np.add(start, duration.take(kind, 0), out=ends[low:high])
        return ends

    def _neighbours(self) -> tuple[Ints, Ints]:
        """Return for each action the neighbouring stage's that it waits for, and which hop that is."""
        forward, weight = self.duration == 0, self.duration == 3
        stage, microbatch, last = self.stage, self.microbatch, self.stages - 1
        none = weight | np.where(forward, stage == 0, stage == last)
        source = np.where(forward, self.forward_row[stage - 1, microbatch], self.gradient_row[stage + 1, microbatch])
        hop = np.where(forward, stage - 1, last + stage)
        return np.where(none, self.count, source), np.where(none, self.hops, hop)

    def _delays(self, times: StepTimes) -> _Delays:
        """Return the delays of all cuts between neighbours, and those that reach further in any of them."""
        tail = np.arange(self.stages - 1)
        travels = self.travels[tail, tail + 1]
        near = np.zeros((len(times.forward_s), self.hops + 1))
        near[:, : len(tail)] = np.where(travels, times.ahead_s[:, tail, tail + 1], 0.0)
        near[:, len(tail) : -1] = np.where(travels, times.back_s[:, tail, tail + 1], 0.0)
        far = np.triu(((times.ahead_s > 0) | (times.back_s > 0)).any(axis=0) & self.travels, 2)
        tails, heads = np.nonzero(far)
        far_pairs = tails.tobytes() + heads.tobytes()
        if far_pairs not in self._known:
            self._known = {far_pairs: self._arrivals(tails, heads)}
        arrivals = self._known[far_pairs]
        each = np.concatenate([times.ahead_s[:, tails, heads], times.back_s[:, tails, heads]], axis=1)
        return _Delays(near, each, arrivals)

    def _arrivals(self, tails: Ints, heads: Ints) -> _Arrivals:
        """Return who waits for whom where values travel between pairs of stages that are no neighbours."""
        pair = np.arange(2 * len(tails))
        action = np.concatenate([self.forward_row[heads], self.gradient_row[tails]]).ravel()
        source = np.concatenate([self.forward_row[tails], self.gradient_row[heads]]).ravel()
        pair = np.repeat(pair, self.forward_row.shape[1])
        kept = np.flatnonzero(action < self.count)
        order = kept[np.argsort(action[kept], kind="stable")]
        each, begins = np.unique(action[order], return_index=True)
        ticks = tuple(np.searchsorted(each, self.starts).tolist())
        place = {own: index for index, own in enumerate(each.tolist())}
        return _Arrivals(each, begins, source[order], pair[order], ticks, place)
