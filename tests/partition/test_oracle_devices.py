"""The solver against the oracles where devices, links, ties, replicas and recompute options count."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autosplit.partition.problem import Problem
from tests.partition.oracle_brute import assignments, brute_force, free_order_dp, ideal_dp, most_stages
from tests.partition.oracle_milp import solve_milp
from tests.partition.oracle_problems import Mix, limited, random_problem, with_devices, with_extras
from tests.partition.oracle_verdict import solved

FEATURES = ("devices", "ties", "recompute", "replicas", "all")


def featured(seed: int, *, feature: str, largest: int, most: int = 4) -> tuple[Problem, int, bool]:
    """Return a problem with a feature, how many stages to cut it into, and whether some may be empty."""
    chance = random.Random(f"{feature} {seed}")
    mix = Mix(
        chance.randint(2, largest),
        colours=chance.choice((0.0, 0.2)),
        unordered=chance.choice((0.0, 0.2)),
        whole=chance.random() < 0.5,
    )
    problem, empty = random_problem(seed, mix), chance.random() < 0.3
    stages = chance.randint(1, most)
    stages = stages if empty else most_stages(problem, stages=stages)
    if feature in ("devices", "replicas", "all"):
        problem = with_devices(problem, seed, stages=stages)
    problem = with_extras(
        problem,
        seed,
        ties=feature in ("ties", "all"),
        recompute=feature in ("recompute", "all"),
        replicas=feature in ("replicas", "all"),
    )
    if chance.random() < 0.7:
        basis = next(assignments(problem, stages=stages, empty=empty))
        for candidate in assignments(problem, stages=stages, empty=empty):
            if chance.random() < 0.05:
                basis = candidate
                break
        problem = limited(problem, seed, assignment=basis, stages=stages)
    return problem, stages, empty


@pytest.mark.parametrize("feature", FEATURES)
def test_solve_against_an_unpruned_search(feature: str) -> None:
    feasible = 0
    for seed in range(80):
        problem, stages, empty = featured(seed, feature=feature, largest=9)
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        feasible += solved(problem, stages=stages, optimum=optimum, empty=empty) is not None
    assert 30 < feasible < 78


@pytest.mark.parametrize("feature", FEATURES)
def test_a_search_cut_short_has_a_bound_below_the_optimum(feature: str) -> None:
    certain = 0
    for seed in range(200, 225):
        problem, stages, empty = featured(seed, feature=feature, largest=9)
        if problem.devices is not None:
            problem = replace(problem, devices=tuple(replace(own, capacity_bytes=None) for own in problem.devices))
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        partition = solved(problem, stages=stages, optimum=optimum, empty=empty, slack=1e9, ideal_limit=3)
        assert partition is not None
        certain += partition.status == "optimal"
    assert certain < 25


@pytest.mark.parametrize("feature", ["devices", "all"])
def test_devices_in_free_order_against_every_order(feature: str) -> None:
    reordered = feasible = 0
    for seed in range(36):
        problem, stages, empty = featured(seed, feature=feature, largest=7)
        links = None if not problem.links else problem.links[:1] * len(problem.links)
        problem = replace(problem, free_order=True, links=links)
        partition = solved(
            problem, stages=stages, optimum=free_order_dp(problem, stages=stages, empty=empty), empty=empty
        )
        if partition is not None:
            feasible += 1
            reordered += partition.costs.order != tuple(range(len(partition.costs.order)))
    assert 15 < feasible < 36
    assert reordered > 4


@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs", "zb_v"])
def test_devices_with_several_stages_against_every_assignment(schedule: str) -> None:
    feasible = 0
    for seed in range(12):
        problem, _, empty = featured(seed, feature="all", largest=6)
        problem = replace(problem, schedule=schedule, virtual_stages=2, microbatches=4, devices=None, links=None)
        if not empty and most_stages(problem, stages=4) < 4:
            empty = True
        problem = with_devices(problem, seed, stages=2, capacities=random.Random(seed).choice(((None, 150), (90, 200))))
        best = brute_force(problem, stages=4, empty=empty)
        feasible += solved(problem, stages=4, optimum=best.value, empty=empty, slack=0.03) is not None
    assert 4 < feasible <= 12


def test_solve_on_uneven_devices_against_a_mixed_integer_program() -> None:
    proven = feasible = seed = 0
    while proven < 6:
        chance = random.Random(f"uneven {seed}")
        problem = random_problem(seed, Mix(chance.randint(15, 28), colours=0.1, whole=False))
        problem = with_extras(problem, seed, ties=seed % 2 == 0, recompute=False, replicas=False)
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
