"""What no step can be shorter than, whatever the cut: paths through the schedule's actions that every cut has.

Any path through the actions of a schedule, along lanes and from stage to stage, bounds a step from below. These go once
forward through all stages and once back, and stay a while on the lane of one stage ``i`` on the way there and of one
stage ``j`` on the way back:

    F0 of stages 0..i, what i does until Fm, Fm of i+1..last, Bk of last..j, what j does until its last B, that B to 0

where Bk is the first backward of the last stage after its Fm. So every path of a family (one ``m``) takes

    sum of F + B + transfers  +  before(i): i's other actions until Fm  +  after(j): j's other actions after Bk

and the step takes the longest: ``sum + max over i of before(i) + max over j of after(j)``. Under GPipe with m the
last microbatch that is ``(M-1) max F + (M-1) max B + sum``. Transfers are left out.

A mixture of paths bounds the step as well (`spread_bound`). A path that passes stage ``i`` so many times forward and so
many times back takes ``sum over works of seconds x count of the work's stage``; so does, on average, a mixture:

    step  >=  sum over works of  min over stages i of  (F_w x forwards_i + B_w x backwards_i + W_w x weights_i)

whatever stage each work is in. The mixture is made of many paths that are critical when every device has its fair share
of every work, weighed so that no stage is much cheaper than another (multiplicative weights: Freund and Schapire 1999,
"Adaptive game playing using multiplicative weights"). Transfers are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autosplit.partition.problem import Device, Problem, Work
from autosplit.partition.step_model import FastSimulator, Floats, Ints
from autosplit.schedule.action import Action, Kind, Schedule, gradients_of

_ROUNDING = 1 - 4e-10
_PATHS, _ROUNDS = 200, 600
_STEPS = 400_000
"""Actions that are gone through in all to find paths, about."""
_STAYS = (1.0, 0.5, 0.95)
"""How likely a path stays on its lane rather than moves on to another, where it may do either."""
_TIE = 1e-9
_KINDS = 4


@dataclass(frozen=True)
class Family:
    """How often each stage's F, B or I, and W lie on a path besides once each: on the way there, and back.

    ``after`` and ``tail`` begin with the first stage that has a backward; ``tail`` counts what that does after its last
    B or I.
    """

    before: Ints
    after: Ints
    tail: Ints


def families(schedule: Schedule) -> list[Family]:
    """Return the families of a few microbatches ``m``, those of the ends and some between."""
    microbatches, stages = schedule.microbatches, schedule.stages
    lanes = _Lanes(schedule)
    some = {0, microbatches - 1, min(stages, microbatches) - 1, max(0, microbatches - stages)}
    some |= {microbatches * eighth // 8 for eighth in range(8)}
    return [lanes.family(microbatch) for microbatch in sorted(some)]


class _Lanes:
    """The actions of each stage in their order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions: list[list[Action]] = [[] for _ in range(schedule.stages)]
        for action in schedule:
            self.actions[action.stage].append(action)
        self.places = [{action: index for index, action in enumerate(actions)} for actions in self.actions]

    def family(self, microbatch: int) -> Family:
        """Return the family of paths that leave with microbatch ``microbatch``."""
        last, final = self.schedule.stages - 1, self.schedule.microbatches - 1
        before = np.array(
            [
                _counts(actions[self._place(stage, "F", 0) + 1 : self._place(stage, "F", microbatch) + 1])
                for stage, actions in enumerate(self.actions)
            ]
        )
        behind = self.actions[last][self._place(last, "F", microbatch) + 1 :]
        back = next((action.microbatch for action in behind if action.kind in "BI"), None)
        if back is None:
            return Family(before, np.zeros_like(before), np.zeros_like(before[0]))
        first = min(self.schedule.differentiated)
        ends = [self._gradient(stage, final) + 1 for stage in range(first, last + 1)]
        after = np.array(
            [
                _counts(self.actions[stage][self._gradient(stage, back) + 1 : end])
                for stage, end in enumerate(ends, start=first)
            ]
        )
        return Family(before, after, np.array(_counts(self.actions[first][ends[0] :])))

    def _place(self, stage: int, kind: Kind, microbatch: int) -> int:
        return self.places[stage][Action(stage, kind, microbatch)]

    def _gradient(self, stage: int, microbatch: int) -> int:
        return self.places[stage][self.schedule.input_gradient(stage, microbatch)]


def _counts(actions: list[Action]) -> list[int]:
    kinds = [action.kind for action in actions]
    return [kinds.count("F"), kinds.count("B") + kinds.count("I"), kinds.count("W")]


def step_bound(problem: Problem, *, stages: int, again: float = 0.0, longest_s: float = 0.0) -> float:
    """Return what no step of a cut into so many stages can be below, the devices in their order.

    Each stage with a backward does at least ``again`` of its forwards again. ``longest_s``: in every cut the works of
    some device take so long, per microbatch. Works without a backward may fill the first stages, which then have none:
    it is the least of the bounds by how many do.
    """
    bound = simple_bound(problem, stages=stages, longest_s=longest_s)
    bound = max(bound, spread_bound(problem, stages=stages, again=again))
    some = min(stages - 1, sum(not work.backward_s for work in problem.works))
    for first in range(1, some + 1) if problem.schedule_of(stages).has_backward else ():
        below = simple_bound(problem, stages=stages, longest_s=longest_s, first=first)
        if below >= bound:  # the later, the larger
            break
        bound = min(bound, max(below, spread_bound(problem, stages=stages, again=again, first=first)))
    return bound


def simple_bound(problem: Problem, *, stages: int, longest_s: float = 0.0, first: int = 0) -> float:
    """Return what no cut into so many stages can be below, whatever its ideals and the order of its devices.

    ``longest_s``: in every cut the works of some device take so long, per microbatch. ``first``: the stages before that
    one, and they alone, have no backward.

    As far as times go, the works could be spread at will: each family's longest stay is no shorter than what its least
    counts give when every stage that has a backward has its fair share of the works that have one.
    """
    schedule = problem.schedule_of(stages).needed(gradients_of(stages, flows=[first], trained=range(stages)))
    sums = _sums(problem.works, schedule)
    spread = _sums([work for work in problem.works if work.backward_s], schedule) if first else sums
    devices = problem.devices or (Device(),) * len(schedule.lanes)
    speeds = sorted((1.0 / device.slowdown for device in devices), reverse=True)
    each = max(schedule.stage_lane.count(lane) for lane in range(len(schedule.lanes)))
    lanes = sum(speeds[: len(schedule.lanes)])
    behind = sum(speeds[: len({lane for stage in range(first, stages) for lane in schedule.lanes_of(stage)})])
    shared = problem.microbatches * max(sums.sum() / lanes, spread.sum() / behind)
    once = sums[:2].sum() / speeds[0]
    if schedule.replicas:  # they share what a stage does: its actions are no path
        return float(max(shared, once)) * _ROUNDING
    alone = [
        once + (family.before[first:].min(axis=0) + family.after.min(axis=0)) @ spread / (each * behind)
        for family in families(schedule)
    ]
    each_s = problem.microbatches * longest_s
    if each == 1 and not sums[2] and not first:
        stays = ((family.before + family.after)[:, : 1 + schedule.has_backward].min() for family in families(schedule))
        each_s = max(each_s, sums.sum() / speeds[0] + longest_s * max(stays))
    return float(max(shared, each_s, *alone)) * _ROUNDING


def _sums(works: Sequence[Work], schedule: Schedule) -> Floats:
    """Return the seconds of all works, of F, B or I, and W."""
    seconds = np.array([(work.forward_s, work.backward_s, work.weight_s) for work in works]).reshape(-1, 3)
    forward_s, backward_s, weight_s = seconds.sum(axis=0)
    split_s = weight_s if "W" in schedule.kinds else 0.0
    return np.array([forward_s, backward_s - split_s if schedule.has_backward else 0.0, split_s])


def spread_bound(problem: Problem, *, stages: int, again: float = 0.0, first: int = 0) -> float:
    """Return what no step of a cut into so many stages can be below, the devices in their order.

    Each stage with a backward does at least ``again`` of its forwards again. The stages before ``first``, and they
    alone, have none.
    """
    schedule = problem.schedule_of(stages).needed(gradients_of(stages, flows=[first], trained=range(stages)))
    works = problem.works
    forward, backward, weight = (
        np.array([getattr(work, name) for work in works]) for name in ("forward_s", "backward_s", "weight_s")
    )
    flowing = backward > 0
    backward = backward + again * forward * (flowing | (not first))
    simulator = FastSimulator(schedule)
    split = bool((simulator.duration == 3).any())
    kinds = np.array([forward, backward if schedule.has_backward else 0 * forward, backward - weight, weight])
    devices = problem.devices or (Device(),) * (max(schedule.stage_lane) + 1)
    scale = np.array([devices[lane].slowdown for lane in schedule.stage_lane])
    speeds = np.array([len(schedule.lanes_of(stage)) for stage in range(stages)]) / scale
    totals = kinds.sum(axis=1)[:, None] * (speeds / speeds.sum())
    if first:  # the fair share where works that have a backward can only be behind
        there = kinds[:, flowing].sum(axis=1)[:, None] * (speeds * (np.arange(stages) >= first) / speeds[first:].sum())
        room = np.maximum(kinds[:2].sum() / speeds.sum() * speeds - there[:2].sum(axis=0), 0.0)
        totals = there + np.outer(kinds[:, ~flowing].sum(axis=1), room / (room.sum() or 1.0))
    counts = _paths(simulator, scale * totals)
    if not split:
        kinds[2:] = 0.0
    alike = _alike(kinds)
    costs = (counts * scale[None, :, None]) @ alike
    if first:  # there they cannot be
        costs[:, :first] = np.where(alike[1] > 0, costs[:, first : first + 1], costs[:, :first])
    return _mixed(costs) * (1 - 1e-6)


def _alike(kinds: Floats) -> Floats:
    """Return the seconds by kind of works, those added up whose kinds are in the same proportion."""
    whole = kinds.sum(axis=0)
    parts = np.round(kinds / np.where(whole > 0, whole, 1.0), 7)
    _, first = np.unique(parts, axis=1, return_inverse=True)
    first = first.ravel()
    return np.stack([np.bincount(first, row) for row in kinds])


def _paths(simulator: FastSimulator, totals: Floats) -> Floats:
    """Return how often critical paths pass each stage, by kind: [path, stage, kind]; ``totals`` is [kind, stage]."""
    seconds = totals[simulator.duration, simulator.stage]
    before, ends = _ends(simulator, seconds)
    chance = random.Random(0)
    tolerance = _TIE * float(ends.max())
    last = simulator.last[ends[simulator.last] >= ends[simulator.last].max() - tolerance].tolist()
    distinct: dict[bytes, Ints] = {}
    length = max(1, len(simulator.starts))
    stages, kinds = simulator.stage.tolist(), simulator.duration.tolist()
    lanes, none = max(simulator.schedule.stage_lane) + 1, simulator.count
    lane = [simulator.schedule.stage_lane[stage] for stage in stages]
    started = (ends[:none] - seconds).tolist()
    # What an action waits for that ends no earlier than it begins.
    late = np.where(ends[before] >= (ends[:none] - seconds)[:, None] - tolerance, before, none).tolist()
    for turn in range(max(2 * lanes, min(_PATHS, _STEPS // length))):
        # Some paths stay on one lane for as long as they can, some wander.
        target, stays = turn % lanes, _STAYS[turn // lanes % len(_STAYS)]
        passed = [0] * (simulator.stages * _KINDS)
        at = chance.choice(last)
        while at < none:
            passed[stages[at] * _KINDS + kinds[at]] += 1
            if started[at] <= tolerance:
                break
            previous, other = late[at]
            stay = chance.random() < (stays if lane[at] == target else 1 - stays)
            at = previous if other == none or (previous < none and stay) else other
        counts = np.array(passed, dtype=np.int64).reshape(simulator.stages, _KINDS)
        distinct[counts.tobytes()] = counts
    paths: Floats = np.array(list(distinct.values()), dtype=np.float64)
    return paths


def _ends(simulator: FastSimulator, seconds: Floats) -> tuple[Ints, Floats]:
    """Return for each action the two actions that it waits for, and its end."""
    before = np.stack([simulator.previous, simulator.near], axis=1)
    ends = np.zeros(simulator.count + 1)
    for low, high in zip(simulator.starts[:-1].tolist(), simulator.starts[1:].tolist(), strict=True):
        ends[low:high] = ends[before[low:high]].max(axis=1) + seconds[low:high]
    return before, ends


def _mixed(costs: Floats) -> float:
    """Return the best mixture's sum over works of the least over stages."""
    log = np.zeros(len(costs))
    largest = float(costs.sum(axis=2).max()) or 1.0
    best, average = 0.0, np.zeros((1, len(costs)))
    flat, shape, works = costs.reshape(len(costs), -1), costs.shape[1:], np.arange(costs.shape[2])
    for turn in range(_ROUNDS):
        weights = np.exp(log - log.max())
        weights /= weights.sum()
        average += weights
        mixed = np.dot(average / (turn + 1), flat).reshape(shape)
        best = max(best, float(mixed.min(axis=0).sum()))
        now = np.dot(weights[None], flat).reshape(shape)
        least = now.argmin(axis=0)
        # What each path gains where the works lie in their cheapest stages.
        gain = costs[:, least, works].sum(axis=1) / largest
        log += 4.0 / np.sqrt(turn + 1.0) * gain
    return best
