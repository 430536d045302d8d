"""The simulated step of many cuts at once: `autosplit.schedule.simulate` with an axis more, for the search.

The actions of a schedule are sorted by clock tick, so that those of one tick depend on earlier ticks only:

    ends[actions of a tick, cuts] = max(ends[lane before], ends[stage before] + delay, ...) + duration

An action's needs on its own lane end before its lane is free; what is left is the neighbouring stage's action, and
those of other stages that values travel from. Every number is added and compared as there, so the results are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.schedule.action import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CELLS = 2**18
"""Numbers in the table of ends that fit a processor's cache."""


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


class FastSimulator:
    """The actions of one schedule as index arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages, ticks = schedule.stages, schedule.clocks()
        cells = sorted(ticks, key=lambda cell: (ticks[cell], cell.lane))
        actions = [schedule.lanes[cell.lane][cell.position] for cell in cells]
        self.count, self.stages = len(actions), stages
        row = {action: index for index, action in enumerate(actions)}
        of_tick = np.zeros(max(ticks.values(), default=-1) + 2, dtype=np.int64)
        for tick in ticks.values():
            of_tick[tick + 1] += 1
        self.starts = np.cumsum(of_tick)
        self.previous: Ints = np.full(self.count, self.count, dtype=np.int64)
        for lane in schedule.lanes:
            for before, action in pairwise(lane):
                self.previous[row[action]] = row[before]
        self.stage = np.array([action.stage for action in actions], dtype=np.int64)
        self.duration = np.array(["FBIW".index(action.kind) for action in actions], dtype=np.int64)
        self.microbatch = np.array([action.microbatch for action in actions], dtype=np.int64)
        shape = (stages + 1, schedule.microbatches)
        self.forward_row: Ints = np.full(shape, self.count, dtype=np.int64)
        self.gradient_row: Ints = np.full(shape, self.count, dtype=np.int64)
        for action, index in row.items():
            if action.kind == "F":
                self.forward_row[action.stage, action.microbatch] = index
            elif action.kind in "BI":
                self.gradient_row[action.stage, action.microbatch] = index
        lane_of = np.array(schedule.stage_lane)
        self.travels: NDArray[np.bool_] = np.triu(lane_of[:, None] != lane_of[None, :])
        self.last = np.array([row[lane[-1]] for lane in schedule.lanes if lane], dtype=np.int64)

    def steps(self, times: StepTimes) -> Floats:
        """Return the length of each cut's step."""
        far = ((times.ahead_s > 0) | (times.back_s > 0)).any(axis=0) & self.travels
        sources, pairs = self._arrivals(np.triu(far, 2))
        width = max(32, _CELLS // max(self.count, 1))
        found = [
            self._some(times, slice(low, low + width), sources, pairs) for low in range(0, len(times.forward_s), width)
        ]
        return np.concatenate(found) if found else np.zeros(0)

    def neighbours(self) -> Ints:
        """Return for each action the row of the neighbouring stage's that it waits for; ``count`` stands for none."""
        sources, _ = self._arrivals(np.zeros((self.stages, self.stages), dtype=np.bool_))
        first: Ints = sources[:, 0]
        return first

    def _some(self, times: StepTimes, cuts: slice, sources: Ints, pairs: Ints) -> Floats:
        forward, backward, weight = times.forward_s[cuts], times.backward_s[cuts], times.weight_s[cuts]
        duration = np.concatenate([forward, backward, backward - weight, weight], axis=1).T.copy()
        size = len(forward)
        silent = np.zeros((size, 1))
        delays = [np.where(self.travels, each[cuts], 0.0).reshape(size, -1) for each in (times.ahead_s, times.back_s)]
        delay = np.concatenate([*delays, silent], axis=1).T.copy()
        kind = self.duration * self.stages + self.stage
        ends = np.zeros((self.count + 1, size))
        for low, high in pairwise(self.starts):
            start = ends[self.previous[low:high]]
            for rank in range(sources.shape[1]):
                np.maximum(start, ends[sources[low:high, rank]] + delay[pairs[low:high, rank]], out=start)
            np.add(start, duration[kind[low:high]], out=ends[low:high])
        step: Floats = ends[self.last].max(axis=0) if len(self.last) else np.zeros(size)
        return step

    def _arrivals(self, far: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Return for each action the rows that it waits for on other stages, and which delay that has.

        The first column is the neighbouring stage; the others are the stages that ``far[a, b]`` names.
        """
        stages = self.stages
        ranks = 1 + max(int(far.sum(axis=0).max(initial=0)), int(far.sum(axis=1).max(initial=0)))
        before: Ints = np.full((stages, ranks), stages, dtype=np.int64)
        after: Ints = np.full((stages, ranks), stages, dtype=np.int64)
        for stage in range(stages):
            if stage:
                before[stage, 0] = stage - 1
            if stage < stages - 1:
                after[stage, 0] = stage + 1
            tails, heads = np.flatnonzero(far[:, stage]), np.flatnonzero(far[stage])
            before[stage, 1 : 1 + len(tails)] = tails
            after[stage, 1 : 1 + len(heads)] = heads
        own, microbatch = self.stage[:, None], self.microbatch[:, None]
        tail, head = before[self.stage], after[self.stage]
        none = 2 * stages * stages
        ahead = np.where(tail < stages, tail * stages + own, none)
        back = np.where(head < stages, stages * stages + own * stages + head, none)
        is_forward, is_weight = (self.duration == 0)[:, None], (self.duration == 3)[:, None]
        sources = np.where(is_forward, self.forward_row[tail, microbatch], self.gradient_row[head, microbatch])
        return np.where(is_weight, self.count, sources), np.where(is_weight, none, np.where(is_forward, ahead, back))
