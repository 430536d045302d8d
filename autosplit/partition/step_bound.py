"""What no step can be shorter than, over every chain of a pool, and the chains that come close to it.

Any path through the actions of a schedule, along lanes and from stage to stage, bounds a step from below. These go once
forward through all stages and once back, and stay a while on the lane of one stage ``i`` on the way there and of one
stage ``j`` on the way back:

    F0 of stages 0..i, what i does until Fm, Fm of i+1..last, Bk of last..j, what j does until its last B, that B to 0

where Bk is the first backward of the last stage after its Fm. So every path of a family (one ``m``) takes

    sum of F + B + transfers  +  before(i): i's other actions until Fm  +  after(j): j's other actions after Bk

and the step takes the longest: ``sum + max over i of before(i) + max over j of after(j)``. Under GPipe with m the
last microbatch that is ``(M-1) max F + (M-1) max B + sum``, exact on a chain without skips. Of transfers only those
count that must lie between neighbours: from a maximal group of an ideal to a minimal one outside of it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import product

import numpy as np

from autosplit.partition.clock import Clock
from autosplit.partition.fast_simulate import Floats, Ints
from autosplit.partition.problem import Device, Problem
from autosplit.partition.step_model import StepModel
from autosplit.partition.step_pool import StagePool, cut_s
from autosplit.schedule.action import Action, Kind, Schedule

_SMALL = 1e-10
"""Weight, relative to the whole, by which evener stages are preferred among equal sums."""
_SHARES = (0.0, 0.5, 1.0, 2.0)
_MORE = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
"""Shares of transfers in a stage's length, and how far above the shortest possible the longest may be."""


@dataclass(frozen=True)
class Family:
    """How often each stage's F, B or I, and W lie on a path besides once each: on the way there, and back.

    ``tail`` counts what stage 0 does after its last B or I.
    """

    before: Ints
    after: Ints
    tail: Ints


def families(schedule: Schedule) -> list[Family]:
    """Return the families of a few microbatches ``m``, those of the ends and some between."""
    microbatches, stages = schedule.microbatches, schedule.stages
    lanes = _Lanes(schedule)
    some = {0, microbatches - 1, min(stages, microbatches) - 1, max(0, microbatches - stages)}
    some |= {microbatches * part // 8 for part in range(8)}
    return [lanes.family(microbatch) for microbatch in sorted(some)]


class _Lanes:
    """The actions of each stage in their order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.own: list[list[Action]] = [[] for _ in range(schedule.stages)]
        for action in schedule:
            self.own[action.stage].append(action)
        self.places = [{action: place for place, action in enumerate(actions)} for actions in self.own]

    def family(self, microbatch: int) -> Family:
        """Return the family of paths that leave with microbatch ``microbatch``."""
        last, final = self.schedule.stages - 1, self.schedule.microbatches - 1
        before = np.array(
            [
                _counts(actions[self._place(stage, "F", 0) + 1 : self._place(stage, "F", microbatch) + 1])
                for stage, actions in enumerate(self.own)
            ]
        )
        back = self._next_backward(last, self._place(last, "F", microbatch))
        if back is None:
            return Family(before, np.zeros_like(before), np.zeros_like(before[0]))
        ends = [self._gradient(stage, final) + 1 for stage in range(last + 1)]
        after = np.array(
            [_counts(actions[self._gradient(stage, back) + 1 : ends[stage]]) for stage, actions in enumerate(self.own)]
        )
        return Family(before, after, np.array(_counts(self.own[0][ends[0] :])))

    def _next_backward(self, stage: int, place: int) -> int | None:
        """Return the microbatch of the stage's first backward behind a place."""
        return next((action.microbatch for action in self.own[stage][place + 1 :] if action.kind in "BI"), None)

    def _place(self, stage: int, kind: Kind, microbatch: int) -> int:
        return self.places[stage][Action(stage, kind, microbatch)]

    def _gradient(self, stage: int, microbatch: int) -> int:
        return self.places[stage][self.schedule.input_gradient(stage, microbatch)]


def _counts(actions: list[Action]) -> list[int]:
    kinds = [action.kind for action in actions]
    return [kinds.count("F"), kinds.count("B") + kinds.count("I"), kinds.count("W")]


class Sums:
    """The three parts of the paths of a family, per position and stage of a pool."""

    def __init__(self, pool: StagePool) -> None:
        self.pool, model = pool, pool.model
        self.split = any(action.kind == "W" for action in model.schedule)
        self.has_backward = model.schedule.has_backward
        self.entry_s: Floats = crossing_s(model, pool)[pool.tail]
        self.crossed_s: Floats = cut_s(model, pool.table)

    def _parts(self, place: int) -> tuple[Floats, Floats, Floats]:
        pool, scale = self.pool, float(self.pool.model.scale[place])
        again = pool.at(pool.again, place)
        backward = pool.backward_s + np.where(np.isfinite(again), again, 0.0) * pool.forward_s
        weight = pool.weight_s if self.split else np.zeros(1)
        return scale * pool.forward_s, scale * (backward - weight), scale * weight

    def counted(self, counts: Ints, place: int) -> Floats:
        """Return the seconds of so many F, B or I, and W of each stage."""
        forward, backward, weight = self._parts(place)
        seconds: Floats = counts[0] * forward + counts[1] * backward + counts[2] * weight
        return seconds

    def length(self, place: int, share: float) -> Floats:
        """Return each stage's F and B and a share of what crosses the cuts on both its sides; infinite if unfit."""
        pool = self.pool
        forward, backward, weight = self._parts(place)
        seconds = forward + (backward + weight if self.has_backward else 0.0)
        seconds += share * (self.crossed_s[pool.tail] + self.crossed_s[pool.head])
        return np.where(np.isfinite(pool.at(pool.again, place)), seconds, np.inf)

    def ranked(self, chain: tuple[int, ...]) -> list[Family]:
        """Return the schedule's families, those first whose bound for one chain is the highest."""
        stages = range(len(chain) - 1)
        found = [self.pool.stage(chain[place], chain[place + 1]) for place in stages]
        parts = np.array([self._one(place, stage) for place, stage in zip(stages, found, strict=True)])
        kinds = parts[:, :3]

        def value(family: Family) -> float:
            stays = (family.before * kinds).sum(axis=1).max() + (family.after * kinds).sum(axis=1).max()
            passed = float(kinds[:, 0].sum() + self.has_backward * kinds[:, 1].sum() + parts[:, 3].sum())
            return float(stays) + passed + float(family.tail @ kinds[0])

        return sorted(families(self.pool.model.schedule), key=value, reverse=True)

    def _one(self, place: int, stage: int | None) -> list[float]:
        """Return the seconds of one stage's F, B or I, and W, and of the transfer that comes in."""
        if stage is None:
            return [0.0] * 4
        pool, model = self.pool, self.pool.model
        scale, again = float(model.scale[place]), float(pool.at(pool.again, place)[stage])
        weight = float(pool.weight_s[stage]) if self.split else 0.0
        forward = float(pool.forward_s[stage])
        entry = self._link(place) * float(self.entry_s[stage])
        backward = float(pool.backward_s[stage]) + again * forward - weight
        return [scale * forward, scale * backward, scale * weight, entry]

    def _link(self, place: int) -> float:
        """Return the link into a stage, 0 where the stage before it is on the same device."""
        model = self.pool.model
        if not place or model.lane[place - 1] == model.lane[place]:
            return 0.0
        return float(model.link[place - 1, place])

    def through(self, family: Family, place: int) -> Floats:
        """Return what a stage adds to every path: F and B once, and the transfer that comes in; infinite if unfit."""
        pool = self.pool
        forward, backward, _ = self._parts(place)
        seconds = forward + backward if self.has_backward else forward.copy()
        seconds = seconds + self._link(place) * self.entry_s
        if not place:
            seconds += self.counted(family.tail, 0)
        longest = float(pool.forward_s.max(initial=0.0) + pool.backward_s.max(initial=0.0)) or 1.0
        seconds += _SMALL * (pool.forward_s + pool.backward_s) ** 2 / longest
        return np.where(np.isfinite(pool.at(pool.again, place)), seconds, np.inf)


def crossing_s(model: StepModel, pool: StagePool) -> Floats:
    """Return for each ideal the transfer, there and back, that any cut along it pays between the stages next to it.

    The stage before it holds a maximal group of the ideal, the one behind it a minimal group of the rest: the least
    that any such pair exchanges.
    """
    has_backward = model.schedule.has_backward
    seconds: dict[tuple[int, int], float] = {}
    own = model.crossings
    for tail, head, forward_s, backward_s in zip(
        own.producer.tolist(), own.consumer.tolist(), own.forward_s, own.backward_s, strict=True
    ):
        pair = (min(tail, head), max(tail, head))
        seconds[pair] = seconds.get(pair, 0.0) + float(forward_s + (backward_s if has_backward else 0.0))
    member = pool.member.T
    inside, outside = member.copy(), ~member
    for tail, head in sorted(model.graph.edges):
        inside[tail] &= ~member[head]
        outside[head] &= member[tail]
    found = np.zeros(pool.size)
    few = (inside.sum(axis=0) * outside.sum(axis=0) <= 16) & (inside.sum(axis=0) > 0)
    for ideal in np.flatnonzero(few):
        tails, heads = np.flatnonzero(inside[:, ideal]).tolist(), np.flatnonzero(outside[:, ideal]).tolist()
        pairs = product(tails, heads)
        found[ideal] = min((seconds.get((min(pair), max(pair)), 0.0) for pair in pairs), default=0.0)
    return found


def limited_chains(sums: Sums, *, rounds: int, clock: Clock) -> list[tuple[int, ...]]:
    """Return, for some measures of a stage and limits on the longest, the chain with the least transfers.

    The measures are its F and B and a share of the transfers on both its sides.
    """
    pool, stages = sums.pool, range(sums.pool.model.stages)
    none = np.zeros((len(stages), 3), dtype=np.int64)
    through = [sums.through(Family(none, none, none[0]), place) for place in stages]
    chains: list[tuple[int, ...]] = []
    for share in _SHARES:
        lengths = [sums.length(place, share) for place in stages]
        shortest = pool.best(lengths, highest=True)
        if shortest is None:
            return chains
        chains.append(shortest.chain)
        for more in _MORE[: max(1, rounds // len(_SHARES))]:
            if clock.over:
                return chains
            limit = shortest.value * more
            found = pool.best(
                [np.where(own <= limit, sum_, np.inf) for own, sum_ in zip(lengths, through, strict=True)]
            )
            if found is not None:
                chains.append(found.chain)
    return chains


def simple_bound(problem: Problem, *, stages: int) -> float:
    """Return what no cut into so many stages can be below, whatever its ideals and the order of its devices.

    As far as times go, the works could be spread at will: each family's longest stay is no shorter than what its least
    counts give when every stage has its fair share.
    """
    schedule = problem.schedule_of(stages)
    kinds = {action.kind for action in schedule}
    forward_s, backward_s, weight_s = (
        sum(getattr(work, name) for work in problem.works) for name in ("forward_s", "backward_s", "weight_s")
    )
    split_s = weight_s if "W" in kinds else 0.0
    sums = np.array([forward_s, backward_s - split_s if schedule.has_backward else 0.0, split_s])
    devices = problem.devices or (Device(),) * stages
    speeds = sorted((device.replicas / device.slowdown for device in devices), reverse=True)
    each = max(schedule.stage_lane.count(lane) for lane in range(len(schedule.lanes)))
    lanes = speeds[: len(schedule.lanes)]
    shared = problem.microbatches * sums.sum() / sum(lanes)
    alone = [
        sums[:2].sum() / speeds[0] + (family.before.min(axis=0) + family.after.min(axis=0)) @ sums / (each * sum(lanes))
        for family in families(schedule)
    ]
    return float(max(shared, *alone)) * (1 - 4 * _SMALL)


@dataclass(frozen=True)
class Bounded:
    """A lower bound over all chains of a pool, and the chains met on the way, the last the closest."""

    lower: float
    chains: list[tuple[int, ...]]


@dataclass(order=True)
class _Box:
    """Chains whose longest stay on the way there lies in one interval and on the way back in another.

    ``least`` is the least sum of the chains that keep both upper ends.
    """

    lower: float
    number: int
    ends: tuple[tuple[float, float], tuple[float, float]]
    least: float


class Boxes:
    """The least over all chains of ``through + max before + max after``, or a bound on it.

    Boxes of (max before, max after) are halved, the most promising first: the lower corner and the least sum of chains
    within the upper corner bound a box. What cannot be below ``upper`` is given up.
    """

    def __init__(self, sums: Sums, family: Family, *, upper: float) -> None:
        self.pool, self.upper = sums.pool, upper
        stages = range(self.pool.model.stages)
        self.through = [sums.through(family, place) for place in stages]
        self.stays = tuple(
            [np.where(np.isfinite(self.through[place]), sums.counted(counts[place], place), np.inf) for place in stages]
            for counts in (family.before, family.after)
        )
        self.heap: list[_Box] = []
        self.chains: list[tuple[int, ...]] = []

    def run(self, *, rounds: int, clock: Clock) -> Bounded:
        """Return the bound after at most ``rounds`` halvings."""
        lows = [self.pool.best(each, highest=True) for each in self.stays]
        there, back = lows
        if there is None or back is None:
            return Bounded(np.inf, [])
        self.chains += [there.chain, back.chain]
        self._open(((there.value, np.inf), (back.value, np.inf)))
        for _ in range(rounds):
            if not self.heap or self.heap[0].lower >= self.upper or clock.over:
                break
            self._halve(heapq.heappop(self.heap))
        lower = min([self.upper, *(box.lower for box in self.heap)])
        return Bounded(lower * (1 - 4 * _SMALL), self.chains)

    def _halve(self, box: _Box) -> None:
        axis = 0 if box.ends[0][1] - box.ends[0][0] >= box.ends[1][1] - box.ends[1][0] else 1
        low, high = box.ends[axis]
        middle = (low + high) / 2
        other = box.ends[1 - axis]
        lower, upper = (low, middle), (middle, high)
        self._push(upper, other, axis=axis, least=box.least)
        self._open((lower, other) if axis == 0 else (other, lower))

    def _open(self, ends: tuple[tuple[float, float], tuple[float, float]]) -> None:
        """Ask for the least sum of chains within the box's upper corner and keep what may hold a better one."""
        found = self.pool.best([self._within(place, ends) for place in range(len(self.through))])
        if found is None:
            return
        self.chains.append(found.chain)
        stays = self._longest(found.chain)
        self.upper = min(self.upper, found.value + sum(stays))
        highs = [end[1] for end in ends]
        # A better chain has a shorter stay on one of the ways; where one way is at its end, on the other.
        for axis in (0, 1):
            if stays[1 - axis] <= ends[1 - axis][0]:
                highs[axis] = min(highs[axis], stays[axis] * (1 - 1e-12))
        self._push((ends[0][0], highs[0]), (ends[1][0], highs[1]), axis=0, least=found.value)

    def _push(self, own: tuple[float, float], other: tuple[float, float], *, axis: int, least: float) -> None:
        room = self.upper - least
        own, other = (own[0], min(own[1], room - other[0])), (other[0], min(other[1], room - own[0]))
        if own[0] <= own[1] and other[0] <= other[1]:
            ends = (own, other) if axis == 0 else (other, own)
            heapq.heappush(self.heap, _Box(own[0] + other[0] + least, len(self.chains), ends, least))

    def _within(self, place: int, ends: tuple[tuple[float, float], tuple[float, float]]) -> Floats:
        there, back = (stay[place] for stay in self.stays)
        return np.where((there <= ends[0][1]) & (back <= ends[1][1]), self.through[place], np.inf)

    def _longest(self, chain: tuple[int, ...]) -> tuple[float, float]:
        """Return the chain's longest stays on both ways."""
        longest = [0.0, 0.0]
        for place in range(len(chain) - 1):
            stage = self.pool.stage(chain[place], chain[place + 1])
            if stage is not None:
                own = (float(stay[place][stage]) for stay in self.stays)
                longest = [max(pair) for pair in zip(longest, own, strict=True)]
        return longest[0], longest[1]
