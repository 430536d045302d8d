"""The simulated steps of many cuts of a graph at once: `autosplit.schedule.simulate` with a dimension for the cuts.

The actions of a schedule are sorted by clock tick, so that those of one tick depend on earlier ticks only:

    ends[actions of a tick, cuts] = max(ends[lane before], ends[stage before] + delay, ...) + duration

What an action needs of its own lane has ended when the lane is free. So it waits for the lane, for the neighbouring
stage's action, and in few cases for actions of stages further away. Numbers are added and compared in the order of
`simulate`, so the results are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.problem import Problem
from autosplit.schedule.action import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CELLS = 2**18
"""Numbers in the table of ends that fit a processor's cache."""


@dataclass(frozen=True)
class StepTimes:
    """The times of one microbatch, per cut (rows) and stage.

    ``forward_s``, ``backward_s`` (all of it) and ``weight_s`` (the part that only weights need) are (cuts, stages).
    ``ahead_s[cut, a, b]`` is how long values travel from stage a to the later stage b, ``back_s[cut, a, b]`` how long
    gradients travel from b to a. ``first`` is each cut's first stage with a backward.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    ahead_s: Floats
    back_s: Floats
    first: Ints


@dataclass(frozen=True)
class _Arrivals:
    """The waits for actions of stages that are no neighbours, as compressed rows.

    The waits of ``action[i]`` are those from ``begins[i]`` to ``begins[i + 1]``: each for the action ``source``, with
    the delay of the stages ``pair``. The actions of tick ``t`` are those from ``ticks[t]`` to ``ticks[t + 1]``.
    """

    action: Ints
    begins: Ints
    source: Ints
    pair: Ints
    ticks: tuple[int, ...]

    def waits(self, index: int) -> tuple[int, int]:
        """Return the start and the end of the waits of ``action[index]``."""
        low = int(self.begins[index])
        return low, int(self.begins[index + 1]) if index + 1 < len(self.begins) else len(self.source)


@dataclass(frozen=True)
class _Delays:
    """The delays of each cut (rows): ``near`` of each hop between neighbours, ``far`` of each pair further apart."""

    near: Floats
    far: Floats
    arrivals: _Arrivals


class FastSimulator:
    """The actions of one schedule as index arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        rows, stages = schedule.rows, schedule.stages
        self.count, self.stages = len(rows.ticks), stages
        self.starts: Ints = np.searchsorted(rows.ticks, np.arange(rows.ticks.max(initial=-1) + 2))
        self.stage, self.duration, self.microbatch = rows.stages, rows.kinds, rows.microbatches
        by_lane = np.argsort(rows.lanes, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(rows.lanes[by_lane])), self.count - 1) if self.count else by_lane
        self.last: Ints = by_lane[ends]
        self.previous: Ints = np.full(self.count, self.count, dtype=np.int64)
        self.previous[by_lane[1:]] = by_lane[:-1]
        self.previous[by_lane[ends[:-1] + 1]] = self.count
        self.forward_row, self.gradient_row, self.near = rows.forward, rows.gradient, rows.near
        """For each action the neighbouring stage's that it waits for; ``count`` stands for none."""
        lane_of = np.array(schedule.stage_lane)
        self.travels: NDArray[np.bool_] = np.triu(lane_of[:, None] != lane_of[None, :])
        self._known: dict[bytes, _Arrivals] = {}

    @cached_property
    def _ticks(self) -> list[tuple[int, int, Ints, Ints, Ints, Ints]]:
        """For each tick the start and the end of its actions, and the indices that `_ends` needs for them."""
        hop = np.where(self.duration == 0, self.stage - 1, self.stages - 1 + self.stage)
        hop[self.near == self.count] = self.hops
        rows = (self.previous, self.near, hop, self.duration * self.stages + self.stage)
        return [(low, high, *(row[low:high] for row in rows)) for low, high in pairwise(self.starts.tolist())]

    @property
    def hops(self) -> int:
        """The number of hops between neighbours, in both directions; the index behind the last one means no delay."""
        return 2 * (self.stages - 1)

    def steps(self, times: StepTimes) -> Floats:
        """Return the length of each cut's step."""
        delays = self._delays(times)
        width = max(32, _CELLS // max(self.count, 1))
        steps = np.zeros(len(times.forward_s))
        for low in range(0, len(steps), width):
            ends = self._ends(times, slice(low, low + width), delays)
            steps[low : low + width] = ends[self.last].max(axis=0, initial=0.0)
        return steps

    def _ends(self, times: StepTimes, cuts: slice, delays: _Delays) -> Floats:
        """Return when each action ends in some of the cuts."""
        forward, backward, weight = times.forward_s[cuts], times.backward_s[cuts], times.weight_s[cuts]
        duration = np.concatenate([forward, backward, backward - weight, weight], axis=1).T.copy()
        near, far = delays.near[cuts].T.copy(), delays.far[cuts].T
        ends = np.zeros((self.count + 1, len(forward)))
        arrivals, left_out = delays.arrivals, self._left_out(times.first[cuts])
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
                rows = arrivals.action[first:last] - low
                start[rows] = np.maximum(start[rows], arrive)
            if left_out is not None:  # the lane goes on behind the action before
                np.copyto(start, ends.take(previous, 0), where=left_out[low:high])
            np.add(start, duration.take(kind, 0), out=ends[low:high])
        return ends

    def _left_out(self, first: Ints) -> NDArray[np.bool_] | None:
        """Return which actions are not there, [action, cut]: backwards of stages before the first that has one."""
        return (self.duration > 0)[:, None] & (self.stage[:, None] < first) if first.any() else None

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
        return _Arrivals(each, begins, source[order], pair[order], ticks)


_ENTRIES = 2**22
"""Pins of nets that are looked at together, times cuts."""


@dataclass(frozen=True)
class Crossings:
    """The nets between groups, one row per consumer; ``ordered`` ones travel ahead, with a gradient that comes back."""

    net: Ints
    producer: Ints
    consumer: Ints
    forward_s: Floats
    backward_s: Floats

    @classmethod
    def of(cls, problem: Problem, group_of: Sequence[int]) -> Crossings:
        """Return the problem's nets between groups of its works; nets with equal ends are one."""
        seconds: dict[tuple[int, frozenset[int]], list[float]] = {}
        for net in problem.nets:
            producer = group_of[net.producer]
            consumers = frozenset(group_of[consumer] for consumer in net.consumers) - {producer}
            pair = seconds.setdefault((producer, consumers), [0.0, 0.0])
            pair[0] += net.forward_s if net.ordered else 0.0
            pair[1] += net.backward_s if net.ordered else net.forward_s + net.backward_s
        rows = [
            (index, producer, consumer, *pair)
            for index, ((producer, consumers), pair) in enumerate(seconds.items())
            if any(pair)
            for consumer in sorted(consumers)
        ]
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        net, tail, head = table[:, :3].astype(np.int64).T
        return cls(net, tail, head, table[:, 3].copy(), table[:, 4].copy())


class StepModel:
    """Simulates steps of a problem whose works are in groups; ``steps`` returns what cuts of them take."""

    def __init__(self, problem: Problem, group_of: Sequence[int], *, stages: int) -> None:
        """``group_of`` says the group of each work; groups are numbered from 0."""
        self.problem, self.stages = problem, stages
        schedule = problem.schedule_of(stages)
        self.schedule = schedule
        self.simulator = FastSimulator(schedule)
        self.lane = problem.lanes(stages)
        devices = problem.devices
        self.scale: Floats = np.array([1.0 if devices is None else devices[lane].slowdown for lane in self.lane])
        self.link, self.near_link = _links(problem, self.lane)
        self.forward_s, self.backward_s, self.weight_s = (
            _by_group(group_of, [getattr(work, name) for work in problem.works])
            for name in ("forward_s", "backward_s", "weight_s")
        )
        self.crossings = Crossings.of(problem, group_of)
        self.ties = [(tie.transfer_s, sorted({group_of[user] for user in tie.users})) for tie in problem.ties]

    def steps(self, stage_of: NDArray[np.int64], again: Floats) -> Floats:
        """Return each cut's step in seconds; ``again[cut, stage]`` is the share of the forwards that is recomputed."""
        width = max(1, _ENTRIES // max(len(self.crossings.net) + self.stages**2, 1))
        parts = []
        for low in range(0, len(stage_of), width):
            chunk = stage_of[low : low + width]
            parts.append(self.simulator.steps(self._times_of(chunk, again[low : low + width])) + self.once_s(chunk))
        return np.concatenate(parts) if parts else np.zeros(0)

    def _times_of(self, stage_of: NDArray[np.int64], again: Floats) -> StepTimes:
        forward_s, backward_s, weight_s = (
            self._summed(stage_of, each) for each in (self.forward_s, self.backward_s, self.weight_s)
        )
        ahead_s, back_s = self._travels(stage_of)
        first = np.where((backward_s > 0).any(axis=1), (backward_s > 0).argmax(axis=1), self.stages - 1)
        first *= stage_of.min(axis=1) < first  # not where the stages before it are empty
        again = again * (np.arange(self.stages) >= first[:, None])
        return StepTimes(
            forward_s=self.scale * forward_s,
            backward_s=self.scale * (backward_s + again * forward_s),
            weight_s=self.scale * weight_s,
            ahead_s=ahead_s,
            back_s=back_s,
            first=first,
        )

    def _summed(self, stage_of: NDArray[np.int64], each: Floats) -> Floats:
        cuts, stages = len(stage_of), self.stages
        key = stage_of + np.arange(cuts)[:, None] * stages
        summed: Floats = np.bincount(key.ravel(), np.tile(each, cuts), minlength=cuts * stages).astype(np.float64)
        return summed.reshape(cuts, stages)

    def _travels(self, stage_of: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return how long values and gradients travel between each pair of stages: a net once per consumer stage."""
        crossings, stages, cuts = self.crossings, self.stages, len(stage_of)
        tail, head = stage_of[:, crossings.producer], stage_of[:, crossings.consumer]
        cut, row = np.nonzero(tail != head)
        tail, head = tail[cut, row], head[cut, row]
        nets = int(crossings.net.max(initial=0)) + 1
        _, first = np.unique((cut * nets + crossings.net[row]) * stages + head, return_index=True)
        cut, row, tail, head = cut[first], row[first], tail[first], head[first]
        key = (cut * stages + np.minimum(tail, head)) * stages + np.maximum(tail, head)
        size, shape = cuts * stages * stages, (cuts, stages, stages)
        ahead, back = (
            np.bincount(key, s[row], minlength=size).reshape(shape) for s in (crossings.forward_s, crossings.backward_s)
        )
        return ahead * self.link, back * self.link

    def once_s(self, stage_of: NDArray[np.int64]) -> Floats:
        """Return for each cut the longest time that a stage spends once per step, on tied parameters."""
        once = np.zeros((len(stage_of), self.stages))
        for transfer_s, users in self.ties:
            inside = (stage_of[:, users, None] == np.arange(self.stages)).any(axis=1)
            once += (inside & (inside.sum(axis=1) > 1)[:, None]) * (transfer_s * self.near_link)
        longest: Floats = once.max(axis=1)
        return longest


def _by_group(group_of: Sequence[int], each: Sequence[float]) -> Floats:
    summed: Floats = np.zeros(max(group_of) + 1)
    np.add.at(summed, np.array(group_of), np.array(each, dtype=np.float64))
    return summed


def _links(problem: Problem, lane: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the slowest link between each pair of stages, and the slower of those next to each stage."""
    links = problem.links or ()
    places = max(lane) + 1
    # The slowest of a row of links, from each place on.
    slowest = np.ones((places, places))
    for low in range(places - 1 if links else 0):
        slowest[low, low + 1 :] = np.maximum.accumulate(links[low : places - 1])
        slowest[low + 1 :, low] = slowest[low, low + 1 :]
    between = slowest[np.ix_(lane, lane)]
    near = np.array([max(links[max(position - 1, 0) : position + 1], default=1.0) for position in lane])
    return between, near
