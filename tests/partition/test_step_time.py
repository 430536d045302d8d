"""The shortest simulated step: its model against the checker, the search and its bound against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autosplit.partition.checker import Costs, check
from autosplit.partition.goal import Clock
from autosplit.partition.graph import base_graph
from autosplit.partition.line.step_time import Step, least_step
from autosplit.partition.problem import Device, Problem, TensorEdge, Work, recompute_fraction
from autosplit.partition.solve import step_lower_bound
from autosplit.partition.step_model import StepModel
from autosplit.schedule.catalog import SCHEDULES
from tests.partition.oracle_problems import Mix, limited, random_problem, with_devices, with_extras

ONE_EACH = tuple(name for name, entry in SCHEDULES.items() if entry.virtual_stages == 1)
SHARED = tuple(name for name in SCHEDULES if name not in ONE_EACH)


def mixed_problem(seed: int, *, count: int, stages: int, features: bool = True) -> Problem:
    problem = random_problem(seed, Mix(count, colours=0.1, unordered=0.2 * features, whole=False, schedules=ONE_EACH))
    if not features:
        return problem
    problem = with_devices(problem, seed, stages=stages)
    return with_extras(problem, seed, ties=seed % 2 == 0, recompute=seed % 3 == 0, replicas=seed % 5 == 0)


def legal_cuts(problem: Problem, *, stages: int) -> list[tuple[int, ...]]:
    """Every legal cut into so many non-empty stages, fewer where there is none."""
    colours = [work.colocation_group for work in problem.works]
    for count in range(stages, 0, -1):
        found = []
        for cut in itertools.product(range(count), repeat=len(problem.works)):
            pairs = {(colour, stage) for colour, stage in zip(colours, cut, strict=True) if colour is not None}
            if (
                len(set(cut)) == count
                and len(pairs) == len({colour for colour, _ in pairs})
                and all(cut[tail] <= cut[head] for tail, head in problem.precedence)
            ):
                found.append(cut)
        if found:
            return found
    raise AssertionError("one stage is always legal")


def fits(problem: Problem, costs: Costs) -> bool:
    limits = problem.capacity_bytes or (None,) * len(costs.order)
    pairs = zip(costs.device_bytes, (limits[device] for device in costs.order), strict=True)
    return all(limit is None or needed <= limit for needed, limit in pairs)


def shortest(problem: Problem, cuts: Sequence[tuple[int, ...]], orders: Sequence[tuple[int, ...]]) -> float:
    costs = (check(problem, cut, order=order[: max(cut) + 1]) for cut in cuts for order in orders)
    return min((each.step_s for each in costs if fits(problem, each)), default=math.inf)


def found_step(
    problem: Problem, *, stages: int, start: tuple[int, ...], order: tuple[int, ...], empty: bool = False
) -> Step:
    step = least_step(problem, stages=stages, empty=empty, assignment=start, order=order)
    costs = check(problem, step.assignment, order=step.order, stages=stages if empty else None)
    assert costs.step_s == pytest.approx(step.step_s, rel=1e-9)
    assert fits(problem, costs)
    return step


@pytest.mark.parametrize("seed", range(36))
def test_the_model_equals_the_checker(seed: int) -> None:
    stages = 2 + seed % 3
    problem = mixed_problem(seed, count=6, stages=stages)
    cuts = [cut for cut in legal_cuts(problem, stages=stages) if max(cut) == stages - 1][:40]
    if not cuts:
        return
    graph = base_graph(problem)
    costs = [check(problem, cut) for cut in cuts]
    again = [[recompute_fraction(name, microbatches=problem.microbatches) for name in each.recompute] for each in costs]
    stage_of = np.zeros((len(cuts), graph.size), dtype=np.int64)
    stage_of[:, np.array(graph.group_of)] = np.array(cuts)
    steps = StepModel(problem, graph, stages=stages).steps(stage_of, np.array(again))
    assert steps == pytest.approx([each.step_s for each in costs], rel=1e-12)


@pytest.mark.parametrize("seed", range(36))
def test_the_search_equals_brute_force(seed: int) -> None:
    problem = mixed_problem(seed, count=7, stages=3, features=seed % 2 == 0)
    cuts = legal_cuts(problem, stages=3)
    order = (0, 1, 2)
    if seed % 4 < 2:
        problem = limited(problem, seed, assignment=random.Random(seed).choice(cuts), stages=3)
    fitting = [cut for cut in cuts if fits(problem, check(problem, cut))]
    if fitting:
        step = found_step(problem, stages=3, start=fitting[0], order=order)
        best = shortest(problem, cuts, (order,))
        assert step_lower_bound(problem, stages=3) <= best * (1 + 1e-9)
        assert step.step_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_devices_in_free_order(seed: int) -> None:
    devices = (Device(1.0), Device(2.0), Device(1.0))
    problem = random_problem(seed, Mix(6, whole=False, schedules=ONE_EACH))
    problem = replace(problem, devices=devices, free_order=True)
    cuts = legal_cuts(problem, stages=3)
    step = found_step(problem, stages=3, start=cuts[0], order=(0, 1, 2)[: max(cuts[0]) + 1])
    best = shortest(problem, cuts, tuple(itertools.permutations(range(3))))
    assert step_lower_bound(problem, stages=3) <= best * (1 + 1e-9)
    assert step.step_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("seed", range(5))
def test_devices_that_hold_several_stages(name: str, seed: int) -> None:
    problem = random_problem(seed, Mix(7, whole=False))
    problem = replace(problem, schedule=name, virtual_stages=2)
    if seed % 2:
        problem = replace(problem, devices=(Device(1.0), Device(1.5)), recompute=("never", "always"))
    cuts = legal_cuts(problem, stages=4)
    if max(cuts[0]) == 3:
        order = (0, 1)
        if seed % 2:
            room = check(problem, cuts[len(cuts) // 2]).device_bytes
            devices = (Device(1.0, room[0]), Device(1.5, room[1]))
            problem = replace(problem, devices=devices)
        start = cuts[len(cuts) // 2]
        step = found_step(problem, stages=4, start=start, order=order)
        best = shortest(problem, cuts, (order,))
        assert step_lower_bound(problem, stages=4) <= best * (1 + 1e-9)
        assert step.step_s <= best * 1.02


@pytest.mark.parametrize("seed", range(12))
def test_stages_may_be_empty(seed: int) -> None:
    problem = random_problem(seed, Mix(5, whole=False, schedules=ONE_EACH))
    cuts = [
        cut
        for cut in itertools.product(range(3), repeat=5)
        if all(cut[tail] <= cut[head] for tail, head in problem.precedence)
    ]
    step = found_step(problem, stages=3, start=(0,) * 5, order=(0,), empty=True)
    best = min(check(problem, cut, stages=3).step_s for cut in cuts)
    assert step_lower_bound(problem, stages=3) <= best * (1 + 1e-9)
    assert step.step_s == pytest.approx(best, rel=1e-9)


def long_chain(count: int, *, microbatches: int, schedule: str = "1f1b") -> Problem:
    chance = random.Random(count)
    works = tuple(Work(f"w{index}", chance.uniform(1, 3), chance.uniform(1, 6)) for index in range(count))
    nets = tuple(
        TensorEdge(index, (index + 1,), chance.uniform(0, 2), chance.uniform(0, 2)) for index in range(count - 1)
    )
    return Problem(works, nets, microbatches=microbatches, schedule=schedule)


def even_cut(count: int, stages: int) -> tuple[int, ...]:
    return tuple(index * stages // count for index in range(count))


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_bound_comes_close_where_transfers_are_cheap(name: str) -> None:
    problem = long_chain(60, microbatches=64, schedule=name)
    problem = replace(problem, nets=tuple(replace(net, forward_s=0.0, backward_s=0.0) for net in problem.nets))
    step = found_step(problem, stages=4, start=even_cut(60, 4), order=tuple(range(4)))
    lower_s = step_lower_bound(problem, stages=4)
    assert lower_s <= step.step_s <= lower_s * 1.05


def test_the_same_cut_every_time_whatever_the_start() -> None:
    problem = random_problem(5, Mix(40, whole=False, schedules=("1f1b",)))
    first = least_step(problem, stages=4, empty=False, assignment=(0,) * 40, order=(0,))
    again = least_step(problem, stages=4, empty=False, assignment=(0,) * 40, order=(0,))
    assert first == again


def test_no_time_at_all_gives_back_something_legal() -> None:
    problem = long_chain(60, microbatches=16)
    start = even_cut(60, 6)
    step = least_step(problem, stages=6, empty=False, assignment=start, order=tuple(range(6)), clock=Clock(0.0))
    assert step.step_s <= check(problem, start).step_s


def test_a_wide_graph_is_cut_better_than_evenly() -> None:
    problem = random_problem(7, Mix(90, whole=False, schedules=("gpipe",)))
    chance = random.Random(0)
    wide = replace(problem, nets=tuple(net for net in problem.nets if chance.random() < 0.5), order=())
    start = tuple(min(3, index // 23) for index in range(90))
    step = found_step(wide, stages=4, start=start, order=(0, 1, 2, 3))
    assert step_lower_bound(wide, stages=4) <= step.step_s < check(wide, start).step_s
