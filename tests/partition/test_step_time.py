"""The shortest simulated step: its model against the checker, the search and its bound against every assignment."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from autosplit.partition.checker import check
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import RECOMPUTE, Problem, TensorEdge, Work, recompute_fraction
from autosplit.partition.solve import solve, step_lower_bound
from autosplit.partition.step_model import StepModel
from autosplit.schedule.catalog import SCHEDULES
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
    again = [[recompute_fraction(name, microbatches=problem.microbatches) for name in own] for own in options]
    stage_of = np.zeros((len(cuts), graph.size), dtype=np.int64)
    stage_of[:, np.array(graph.group_of)] = np.array(cuts)
    steps = StepModel(problem, graph.group_of, stages=stages).steps(stage_of, np.array(again))
    assert steps == pytest.approx([each.step_s for each in costs], rel=1e-12)


def drawn(seed: int, *, feature: str) -> tuple[Problem, int, bool]:
    """Return a small problem, how many stages to cut it into, and whether some may be empty."""
    chance = random.Random(f"steps {seed} {feature}")
    mix = Mix(chance.randint(4, 7), colours=0.1, unordered=0.1, zero=0.1, whole=False)
    problem, empty = random_problem(seed, mix), feature == "empty"
    problem = replace(problem, schedule=ONE_EACH[seed % len(ONE_EACH)])
    stages = 3 if empty else most_stages(problem, stages=chance.randint(2, 4))
    if feature == "devices":
        problem = with_devices(problem, seed, stages=stages)
    if chance.random() < 0.4:
        cuts = list(assignments(problem, stages=stages, empty=empty))
        problem = limited(problem, seed, assignment=chance.choice(cuts), stages=stages)
    return problem, stages, empty


@pytest.mark.parametrize(
    ("feature", "most"),
    [
        ("plain", 0.0),
        pytest.param("empty", 0.0, marks=pytest.mark.slow),
        pytest.param("devices", 0.01, marks=pytest.mark.slow),
    ],
)
def test_the_step_is_the_shortest_of_all_or_near_it(feature: str, most: float) -> None:
    feasible = equal = 0
    for seed in range(33):
        problem, stages, empty = drawn(seed, feature=feature)
        best = brute_force_step(problem, stages=stages, empty=empty)
        if best.assignment is None:
            continue
        feasible += 1
        found = solve(problem, stages=stages, objective="step_time", empty=empty)
        rules = Rules(problem, stages)
        assert rules.legal(found.assignment)
        assert empty or len(set(found.assignment)) == stages
        assert rules.step_s(found.assignment) == pytest.approx(found.value_s)
        assert best.value * (1 - 1e-9) <= found.value_s <= best.value * (1 + most + 1e-9), seed
        assert step_lower_bound(problem, stages=stages) <= best.value * (1 + 1e-9)
        equal += found.value_s <= best.value * (1 + 1e-9)
    assert feasible >= 24
    assert equal >= (0.88 if most else 1) * feasible


def long_chain(count: int, *, microbatches: int, schedule: str = "1f1b") -> Problem:
    chance = random.Random(count)
    works = tuple(Work(f"w{index}", chance.uniform(1, 3), chance.uniform(1, 6)) for index in range(count))
    nets = tuple(
        TensorEdge(index, (index + 1,), chance.uniform(0, 2), chance.uniform(0, 2)) for index in range(count - 1)
    )
    return Problem(works, nets, microbatches=microbatches, schedule=schedule)


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_bound_comes_close_where_transfers_are_cheap(name: str) -> None:
    problem = long_chain(60, microbatches=64, schedule=name)
    problem = replace(problem, nets=tuple(replace(net, forward_s=0.0, backward_s=0.0) for net in problem.nets))
    assert solve(problem, stages=4, objective="step_time").gap <= 0.05
