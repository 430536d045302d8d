"""The shortest simulated step: its model against the checker, the search and its bound against every assignment."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.partition.checker import check
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import RECOMPUTE, Problem, TensorEdge, Work
from autosplit.partition.solve import solve, step_lower_bound
from autosplit.partition.step_bound import families, simple_bound
from autosplit.partition.step_model import FastSimulator, StepModel, StepTimes
from autosplit.schedule.action import gradients_of
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.simulate import TransferTime, simulate
from tests.partition.oracle_brute import assignments, brute_force_step, most_stages
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_problems import Mix, limited, random_problem, with_devices, with_ties

ONE_EACH = tuple(name for name, entry in SCHEDULES.items() if entry.virtual_stages == 1)


@pytest.mark.parametrize("seed", range(36))
def test_the_model_equals_the_checker(seed: int) -> None:
    stages = 2 + seed % 3
    problem = random_problem(seed, Mix(6, colours=0.1, unordered=0.2, whole=False, schedules=ONE_EACH))
    problem = with_devices(problem, seed, stages=stages)
    problem = with_ties(problem, seed) if seed % 2 else problem
    cuts = list(islice(assignments(problem, stages=stages), 40))
    if not cuts:
        return
    graph = base_graph(problem)
    chance = random.Random(seed)
    options = [[chance.choice(RECOMPUTE) for _ in range(stages)] for _ in cuts]
    costs = [check(problem, cut, recompute=own) for cut, own in zip(cuts, options, strict=True)]
    again = [list(map(problem.again, own)) for own in options]
    stage_of = np.zeros((len(cuts), graph.size), dtype=np.int64)
    stage_of[:, np.array(graph.group_of)] = np.array(cuts)
    steps = StepModel(problem, graph.group_of, stages=stages).steps(stage_of, np.array(again))
    assert steps == pytest.approx([each.step_s for each in costs], rel=1e-12)


def drawn(seed: int, *, empty: bool) -> tuple[Problem, int]:
    """Return a small problem, and how many stages to cut it into, of which some may be ``empty``."""
    chance = random.Random(f"steps {seed} {empty}")
    mix = Mix(chance.randint(4, 7), colours=0.1, unordered=0.1, zero=0.1, whole=False, static=True)
    problem = random_problem(seed, mix)
    problem = replace(problem, schedule=ONE_EACH[seed % len(ONE_EACH)])
    stages = 3 if empty else most_stages(problem, stages=chance.randint(2, 4))
    if chance.random() < 0.4:
        cuts = list(assignments(problem, stages=stages, empty=empty))
        problem = limited(problem, seed, assignment=chance.choice(cuts), stages=stages)
    return problem, stages


@pytest.mark.parametrize("empty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_step_is_the_shortest_of_all(empty: bool) -> None:
    feasible = 0
    for seed in range(33):
        problem, stages = drawn(seed, empty=empty)
        best = brute_force_step(problem, stages=stages, empty=empty)
        if best.assignment is None:
            continue
        feasible += 1
        found = solve(problem, stages=stages, objective="step_time", empty=empty)
        rules = Rules(problem, stages)
        assert rules.legal(found.assignment)
        assert empty or len(set(found.assignment)) == stages
        assert rules.step_s(found.assignment) == pytest.approx(found.value_s)
        assert best.value * (1 - 1e-9) <= found.value_s <= best.value * (1 + 1e-9), seed
        assert step_lower_bound(problem, stages=stages) <= best.value * (1 + 1e-9)
    assert feasible >= 24


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_bound_comes_close_where_transfers_are_cheap(name: str) -> None:
    chance = random.Random(60)
    works = tuple(Work(f"w{index}", chance.uniform(1, 3), chance.uniform(1, 6)) for index in range(60))
    nets = tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(59))
    problem = Problem(works, nets, microbatches=64, schedule=name)
    assert solve(problem, stages=4, objective="step_time").gap <= 0.05


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("slow", range(4))
def test_no_path_is_longer_than_the_step(name: str, slow: int) -> None:
    for seed in range(6):
        chance = np.random.default_rng(seed)
        schedule = build(name, stages=4, microbatches=1 + seed * 2)
        times = chance.uniform(0.5, 1, (4, 3))
        times[slow] *= 6
        forward, gradient, weight = times.T
        step_s = simulate(
            schedule,
            forward_s=forward,
            backward_s=gradient if name not in ("zb_h1", "zb_v") else gradient + weight,
            input_gradient_s=gradient,
            weight_gradient_s=weight,
        ).step_s
        passed = forward.sum() + (gradient.sum() if schedule.has_backward else 0.0)
        paths = [
            passed
            + (family.before * times).sum(axis=1).max()
            + (family.after * times).sum(axis=1).max()
            + family.tail @ times[0]
            for family in families(schedule)
        ]
        assert max(paths) <= step_s * (1 + 1e-12)
        if name in ("gpipe", "forward"):
            assert max(paths) == pytest.approx(step_s)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("seed", range(6))
def test_bounds_without_ideals_hold_for_every_cut(name: str, seed: int) -> None:
    chance = random.Random(seed)
    works = tuple(Work(f"w{index}", chance.uniform(0, 3), chance.uniform(0, 6), weight_s=0.0) for index in range(16))
    nets = tuple(TensorEdge(index, (index + 1,), 0.01, 0.01) for index in range(15))
    problem = Problem(works, nets, microbatches=chance.choice((2, 4, 12)), schedule=name)
    cuts = [sorted(chance.sample(range(1, 16), 2)) for _ in range(60)]
    steps = [check(problem, tuple(sum(index >= end for end in cut) for index in range(16))).step_s for cut in cuts]
    assert 0.5 * min(steps) < simple_bound(problem, stages=3) <= min(steps)
    assert simple_bound(problem, stages=3) <= step_lower_bound(problem, stages=3) <= min(steps)


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_long_work_that_cannot_be_cut_raises_the_bound(name: str) -> None:
    works = tuple(Work(f"w{index}", 9.0 if index == 2 else 1.0, 18.0 if index == 2 else 2.0) for index in range(6))
    problem = Problem(works, (), microbatches=8, schedule=name, order=tuple((i, i + 1) for i in range(5)))
    steps = [check(problem, cut).step_s for cut in ((0, 0, 1, 2, 2, 2), (0, 1, 1, 2, 2, 2), (0, 1, 2, 2, 2, 2))]
    longest_s = 9.0 if name == "forward" else 27.0
    assert 8 * longest_s * (1 - 1e-9) <= step_lower_bound(problem, stages=3) <= min(steps)


def drawn_times(seed: int, *, cuts: int, stages: int, dense: float) -> StepTimes:
    chance = np.random.default_rng(seed)
    backward_s = chance.uniform(0, 2, (cuts, stages)) * (chance.random((cuts, stages)) < 0.9)
    first = chance.integers(0, stages, cuts) * (chance.random(cuts) < 0.5)
    backward_s *= np.arange(stages) >= first[:, None]
    pair = np.triu(chance.random((cuts, stages, stages)) < dense, 1)
    return StepTimes(
        forward_s=chance.uniform(0, 1, (cuts, stages)) * (chance.random((cuts, stages)) < 0.9),
        backward_s=backward_s,
        weight_s=backward_s * chance.random((cuts, stages)),
        ahead_s=pair * chance.uniform(0, 3, pair.shape),
        back_s=pair * chance.uniform(0, 3, pair.shape),
        first=first,
    )


def plain_step_s(name: str, times: StepTimes, cut: int, *, microbatches: int, virtual_stages: int) -> float:
    stages = times.forward_s.shape[1]
    transfers = tuple(
        TransferTime(a, b, times.ahead_s[cut, a, b], times.back_s[cut, a, b])
        for a in range(stages)
        for b in range(a + 1, stages)
    )
    schedule = build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
    return simulate(
        schedule.needed(gradients_of(stages, flows=[times.first[cut]], trained=range(stages))),
        forward_s=times.forward_s[cut],
        backward_s=times.backward_s[cut],
        input_gradient_s=times.backward_s[cut] - times.weight_s[cut],
        weight_gradient_s=times.weight_s[cut],
        transfers=transfers,
    ).step_s


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    devices=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    more=st.integers(2, 3),
    dense=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_equals_the_plain_simulator(
    name: str, seed: int, devices: int, microbatches: int, more: int, dense: float
) -> None:
    virtual_stages = SCHEDULES[name].virtual_stages or more
    stages = devices * virtual_stages
    times = drawn_times(seed, cuts=3, stages=stages, dense=dense)
    fast = FastSimulator(build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages))
    steps = fast.steps(times)
    assert steps.shape == (3,)
    for cut, step_s in enumerate(steps):
        plain_s = plain_step_s(name, times, cut, microbatches=microbatches, virtual_stages=virtual_stages)
        assert step_s == pytest.approx(plain_s, rel=1e-12, abs=1e-300)
