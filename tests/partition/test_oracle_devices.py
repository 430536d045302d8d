"""The solver against the oracles where devices and links differ."""

from __future__ import annotations

import random
from dataclasses import replace

from autosplit.partition.problem import Problem
from tests.partition.oracle_brute import assignments, ideal_dp, most_stages
from tests.partition.oracle_milp import solve_milp
from tests.partition.oracle_problems import Mix, limited, random_problem, with_devices
from tests.partition.oracle_verdict import solved


def uneven(seed: int, *, largest: int, most: int = 4) -> tuple[Problem, int, bool]:
    """Return a problem on uneven devices, how many stages to cut it into, and whether some may be empty."""
    chance = random.Random(f"devices {seed}")
    mix = Mix(
        chance.randint(2, largest),
        colours=chance.choice((0.0, 0.2)),
        unordered=chance.choice((0.0, 0.2)),
        whole=chance.random() < 0.5,
    )
    problem, empty = random_problem(seed, mix), chance.random() < 0.3
    stages = chance.randint(1, most)
    stages = stages if empty else most_stages(problem, stages=stages)
    problem = with_devices(problem, seed, stages=stages)
    if chance.random() < 0.7:
        basis = next(assignments(problem, stages=stages, empty=empty))
        for candidate in assignments(problem, stages=stages, empty=empty):
            if chance.random() < 0.05:
                basis = candidate
                break
        problem = limited(problem, seed, assignment=basis, stages=stages)
    return problem, stages, empty


def test_solve_against_an_unpruned_search() -> None:
    feasible = 0
    for seed in range(160):
        problem, stages, empty = uneven(seed, largest=9)
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        feasible += solved(problem, stages=stages, optimum=optimum, empty=empty) is not None
    assert 60 < feasible < 156


def test_a_search_cut_short_has_a_bound_below_the_optimum() -> None:
    certain = 0
    for seed in range(200, 225):
        problem, stages, empty = uneven(seed, largest=9)
        problem = replace(problem, devices=tuple(replace(own, capacity_bytes=None) for own in problem.devices or ()))
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        partition = solved(problem, stages=stages, optimum=optimum, empty=empty, slack=1e9, ideal_limit=3)
        assert partition is not None
        certain += partition.status == "optimal"
    assert certain < 25


def test_solve_on_uneven_devices_against_a_mixed_integer_program() -> None:
    proven = feasible = seed = 0
    while proven < 6:
        chance = random.Random(f"uneven {seed}")
        problem = random_problem(seed, Mix(chance.randint(15, 28), colours=0.1, whole=False))
        stages = most_stages(problem, stages=chance.randint(2, 4))
        problem = with_devices(problem, seed, stages=stages)
        even = tuple(index * stages // len(problem.works) for index in range(len(problem.works)))
        problem = limited(problem, seed, assignment=even, stages=stages)
        answer = solve_milp(problem, stages=stages, time_limit_s=30.0)
        seed += 1
        if answer.proven:
            proven += 1
            feasible += solved(problem, stages=stages, optimum=answer.value, slack=0.03) is not None
    assert seed <= 10, "HiGHS leaves too much unproven for this to be a test"
    assert feasible >= 2
