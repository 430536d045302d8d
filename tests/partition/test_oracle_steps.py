"""The shortest simulated step against every assignment, every order of the devices and every recompute option."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autosplit.partition.problem import Problem
from autosplit.partition.solve import solve
from tests.partition.oracle_brute import brute_force_step, most_stages
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_problems import Mix, random_problem, with_devices, with_extras


def stepped(seed: int, *, devices: bool) -> tuple[Problem, int]:
    """Return a small problem, plain or on uneven devices with ties and replicas, and how many stages to cut it into."""
    chance = random.Random(f"steps {seed} {devices}")
    mix = Mix(chance.randint(4, 7), unordered=0.1, zero=0.1, whole=False, schedules=("1f1b", "gpipe", "zb_h1"))
    problem = random_problem(seed, mix)
    stages = most_stages(problem, stages=chance.randint(2, 4))
    problem = replace(problem, microbatches=stages * chance.choice((1, 2, 8)))
    if devices:
        problem = with_devices(problem, seed, stages=stages)
        problem = with_extras(problem, seed, ties=True, recompute=False, replicas=True)
        if problem.links is None:
            problem = replace(problem, free_order=True)
    return problem, stages


@pytest.mark.parametrize("devices", [False, True])
def test_the_step_is_within_a_percent_of_the_shortest(devices: bool) -> None:
    equal = 0
    for seed in range(20):
        problem, stages = stepped(seed, devices=devices)
        best = brute_force_step(problem, stages=stages)
        found = solve(problem, stages=stages, objective="step_time")
        rules = Rules(problem, stages)
        assert rules.legal(found.assignment)
        assert len(set(found.assignment)) == stages
        assert rules.step_s(found.assignment, order=found.order) == pytest.approx(found.value_s)
        assert found.value_s <= best.value * 1.01, seed
        assert found.value_s >= best.value * (1 - 1e-9)
        assert found.lower_bound_s <= best.value * (1 + 1e-9)
        equal += found.value_s <= best.value * (1 + 1e-9)
    assert equal >= 18
