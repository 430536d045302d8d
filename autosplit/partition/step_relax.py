"""A lower bound of the step where the ideals are too many: by the long works alone.

An ideal of the graph, restricted to some of its groups, is an ideal of the order that they have among each other. So a
cut of the graph is a cut of that smaller order, with empty stages perhaps, whose stages take no longer; what the groups
left out take lies on every path and is added to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autosplit.partition.clock import Clock
from autosplit.partition.fast_simulate import Floats, Ints
from autosplit.partition.graph import base_graph
from autosplit.partition.ideals import all_ideals
from autosplit.partition.problem import Device, Problem, Work, again_share
from autosplit.partition.step_bound import Boxes, Sums, limited_chains
from autosplit.partition.step_model import StepModel
from autosplit.partition.step_pool import StagePool
from autosplit.partition.table import Table

_GROUPS = (400, 280, 200, 140, 100, 70, 50, 35, 24, 16)
"""How many of the longest groups are tried to be kept, the most first."""
_IDEALS, _STAGES, _ROUNDS, _FAMILIES = 1_000, 150_000, 40, 3


def relaxed_bound(model: StepModel, *, upper: float, clock: Clock) -> float:
    """Return what no step on the model's devices in their order can be below; 0 where no relaxation is small enough.

    ``upper`` is a step that some cut takes.
    """
    graph = model.graph
    by_length = sorted(range(graph.size), key=lambda group: (-graph.times_s[group], group))
    for count in _GROUPS:
        if clock.over:
            break
        if count > graph.size:
            continue
        small = _reduced(model, sorted(by_length[:count]))
        base = base_graph(small)
        ideals = all_ideals(base, limit=_IDEALS)
        if ideals is None:
            continue
        own = StepModel(small, base, stages=model.stages)
        pool = _pool(own, ideals, upper=upper)
        if pool.complete:
            left_s = (_through_s(model) - _through_s(own)) * float(model.scale.min()) * (1 - 1e-9)
            return _bound(pool, left_s=left_s, upper=upper, clock=clock)
    return 0.0


def _reduced(model: StepModel, kept: list[int]) -> Problem:
    """Return the problem of some groups, given in topological order, with the order that they have among each other."""
    graph, place = model.graph, {group: index for index, group in enumerate(kept)}
    before = graph.predecessors()
    ancestors = [0] * graph.size
    order = []
    for group in range(graph.size):
        for tail in sorted(before[group]):
            ancestors[group] |= ancestors[tail] | (1 << place[tail] if tail in place else 0)
        if group in place:
            tails = [index for index in range(place[group]) if ancestors[group] >> index & 1]
            covered = 0
            for index in tails:
                covered |= ancestors[kept[index]]
            order += [(index, place[group]) for index in tails if not covered >> index & 1]
    works = tuple(
        Work(
            str(group),
            float(model.forward_s[group]),
            float(model.backward_s[group]) if model.schedule.has_backward else 0.0,
            weight_s=float(model.weight_s[group]),
        )
        for group in kept
    )
    devices: tuple[Device, ...] | None = model.problem.devices
    if devices is not None:
        devices = tuple(replace(device, capacity_bytes=None) for device in devices)
    return replace(
        model.problem, works=works, nets=(), holds=(), ties=(), order=tuple(order), devices=devices, free_order=False
    )


def _pool(model: StepModel, ideals: list[int], *, upper: float) -> StagePool:
    problem = model.problem
    fewest = min(again_share(option, microbatches=problem.microbatches) for option in problem.recompute)

    def choose(ideal: int, larger: Ints, place: int) -> Floats:
        return np.full(len(larger), fewest)

    limit_s = upper * (1 + 1e-9) / problem.microbatches
    return StagePool(model, Table(model.graph, ideals), limit_s=limit_s, choose=choose, most=_STAGES, empty=True)


def _through_s(model: StepModel) -> float:
    """Return the seconds of all works that lie on every path: F once, and B or I once."""
    seconds = float(model.forward_s.sum())
    if model.schedule.has_backward:
        split = any(action.kind == "W" for action in model.schedule)
        seconds += float(model.backward_s.sum()) - (float(model.weight_s.sum()) if split else 0.0)
    return seconds


def _bound(pool: StagePool, *, left_s: float, upper: float, clock: Clock) -> float:
    """Return the best bound of some families, ``left_s`` being what is left out."""
    sums, lower = Sums(pool), 0.0
    chains = limited_chains(sums, rounds=1, clock=clock)
    for family in sums.ranked(chains[0])[:_FAMILIES] if chains else ():
        found = Boxes(sums, family, upper=upper).run(rounds=_ROUNDS, clock=clock)
        lower = max(lower, found.lower + left_s)
    return lower
