"""A lower bound of the step over all cuts, however the works are spread: from paths that are longest when all is even.

A step is no shorter than any path through its actions. A path that passes stage ``i`` so many times forward and so many
times back takes ``sum over works of seconds x count of the work's stage``; so does, on average, a mixture of paths:

    step  >=  sum over works of  min over stages i of  (F_w x forwards_i + B_w x backwards_i + W_w x weights_i)

whatever stage each work is in. The mixture is made of many paths that are critical when every device has its fair share
of every work, weighed so that no stage is much cheaper than another (multiplicative weights: Freund and Schapire 1999,
"Adaptive game playing using multiplicative weights"). Transfers are left out.
"""

from __future__ import annotations

import random

import numpy as np

from autosplit.partition.fast_simulate import FastSimulator, Floats, Ints
from autosplit.partition.problem import Device, Problem

_PATHS, _ROUNDS = 200, 600
_STEPS = 400_000
"""Actions that are gone through in all to find paths, about."""
_STAYS = (1.0, 0.5, 0.95)
"""How likely a path stays on its lane rather than moves on to another, where it may do either."""
_TIE = 1e-9
_KINDS = 4


def spread_bound(problem: Problem, *, stages: int, again: float = 0.0) -> float:
    """Return what no step of a cut into so many stages can be below, the devices in their order.

    Each stage does at least ``again`` of its forwards again.
    """
    schedule = problem.schedule_of(stages)
    works = problem.works
    forward, backward, weight = (
        np.array([getattr(work, name) for work in works]) for name in ("forward_s", "backward_s", "weight_s")
    )
    backward = backward + again * forward
    simulator = FastSimulator(schedule)
    split = bool((simulator.duration == 3).any())
    kinds = np.array([forward, backward if schedule.has_backward else 0 * forward, backward - weight, weight])
    devices = problem.devices or (Device(),) * (max(schedule.stage_lane) + 1)
    scale = np.array([devices[lane].slowdown / devices[lane].replicas for lane in schedule.stage_lane])
    counts = _paths(simulator, kinds.sum(axis=1), scale)
    if not split:
        kinds[2:] = 0.0
    return _mixed((counts * scale[None, :, None]) @ _alike(kinds)) * (1 - 1e-6)


def _alike(kinds: Floats) -> Floats:
    """Return the seconds by kind of works, those added up whose kinds are in the same proportion."""
    whole = kinds.sum(axis=0)
    parts = np.round(kinds / np.where(whole > 0, whole, 1.0), 7)
    _, first = np.unique(parts, axis=1, return_inverse=True)
    first = first.ravel()
    return np.stack([np.bincount(first, own) for own in kinds])


def _paths(simulator: FastSimulator, totals: Floats, scale: Floats) -> Floats:
    """Return how often paths that are critical at the even spread pass each stage, by kind: [path, stage, kind]."""
    share = (1.0 / scale) / (1.0 / scale).sum()
    seconds = (scale * share)[simulator.stage] * totals[simulator.duration]
    before, ends = _ends(simulator, seconds)
    chance = random.Random(0)
    tolerance = _TIE * float(ends.max())
    last = simulator.last[ends[simulator.last] >= ends[simulator.last].max() - tolerance].tolist()
    found: dict[bytes, Ints] = {}
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
            own, other = late[at]
            stay = chance.random() < (stays if lane[at] == target else 1 - stays)
            at = own if other == none or (own < none and stay) else other
        counts = np.array(passed, dtype=np.int64).reshape(simulator.stages, _KINDS)
        found[counts.tobytes()] = counts
    paths: Floats = np.array(list(found.values()), dtype=np.float64)
    return paths


def _ends(simulator: FastSimulator, seconds: Floats) -> tuple[Ints, Floats]:
    """Return for each action those that it waits for, and when it ends."""
    sources = simulator.neighbours()
    before = np.stack([simulator.previous, sources], axis=1)
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
