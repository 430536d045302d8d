"""The solver against an unpruned search and HiGHS: capacities, colours, gradients."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.problem import RECOMPUTE, Problem
from tests.partition.oracle_brute import assignments, brute_force, ideal_dp, most_stages
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_milp import solve_milp
from tests.partition.oracle_problems import Mix, limited, random_problem, with_devices, with_ties
from tests.partition.oracle_repeat import cuts
from tests.partition.oracle_verdict import solved


def small(seed: int, *, largest: int) -> tuple[Problem, int, bool]:
    """Return a problem with room for brute force, how many stages to cut it into, and whether some may be empty."""
    chance = random.Random(f"small {seed}")
    mix = Mix(
        chance.randint(1, largest),
        colours=chance.choice((0.0, 0.2, 0.4)),
        unordered=chance.choice((0.0, 0.3)),
        zero=chance.choice((0.0, 0.3, 0.7)),
        whole=chance.random() < 0.5,
        static=True,
    )
    problem, empty = random_problem(seed, mix), chance.random() < 0.4
    stages = chance.randint(1, 5)
    stages = stages if empty else most_stages(problem, stages=stages)
    if chance.random() < 0.7:
        basis = next(assignments(problem, stages=stages, empty=empty))
        for candidate in assignments(problem, stages=stages, empty=empty):
            if chance.random() < 0.1:
                basis = candidate
                break
        problem = limited(problem, seed, assignment=basis, stages=stages)
    return problem, stages, empty


def test_the_oracles_agree() -> None:
    feasible = 0
    for seed in range(60):
        problem, stages, empty = small(seed, largest=7)
        value = brute_force(problem, stages=stages, empty=empty).value
        assert ideal_dp(problem, stages=stages, empty=empty) == pytest.approx(value), seed
        answer = solve_milp(problem, stages=stages, empty=empty)
        assert answer.proven
        assert answer.value == pytest.approx(value), seed
        feasible += value < math.inf
    assert 20 < feasible < 55


def test_solve_against_an_unpruned_search() -> None:
    feasible = 0
    for seed in range(400):
        problem, stages, empty = small(seed, largest=10)
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        feasible += solved(problem, stages=stages, optimum=optimum, empty=empty) is not None
    assert 160 < feasible < 390


@pytest.mark.parametrize("limits", [{"ideal_limit": 3}, {"time_limit_s": 0.0}], ids=["ideals", "time"])
def test_a_search_cut_short_keeps_its_promises(limits: dict[str, float]) -> None:
    feasible = proven = missed = impossible = 0
    for seed in range(400, 550):
        problem, stages, empty = small(seed, largest=10)
        optimum = ideal_dp(problem, stages=stages, empty=empty)
        try:
            partition = solved(problem, stages=stages, optimum=optimum, empty=empty, slack=1e9, **limits)
        except InfeasibleError as error:
            # What was cut short may miss what fits, but must not call it impossible.
            missed += "no partition was found that fits" in str(error)
            impossible += "no partition fits" in str(error)
        else:
            feasible += partition is not None
            proven += partition is not None and partition.status == "optimal"
    assert missed <= 10
    assert impossible == 0
    assert feasible > 70
    assert 0 < proven < feasible


def large(seed: int) -> tuple[Problem, int, bool]:
    """Return a problem with up to 40 works, how many stages to cut it into, and whether some may be empty."""
    chance = random.Random(f"large {seed}")
    mix = Mix(
        chance.randint(20, 40),
        colours=chance.choice((0.0, 0.1)),
        unordered=chance.choice((0.0, 0.1)),
        zero=chance.choice((0.0, 0.3)),
        whole=chance.random() < 0.5,
        static=True,
    )
    problem, empty = random_problem(seed, mix), chance.random() < 0.4
    stages = chance.randint(2, 4)
    stages = stages if empty else most_stages(problem, stages=stages)
    even = tuple(index * stages // len(problem.works) for index in range(len(problem.works)))
    return limited(problem, seed, assignment=even, stages=stages), stages, empty


@pytest.mark.slow
def test_solve_against_a_mixed_integer_program() -> None:
    proven = feasible = certain = near = seed = 0
    while proven < 24:
        problem, stages, empty = large(seed)
        answer = solve_milp(problem, stages=stages, empty=empty, time_limit_s=30.0)
        seed += 1
        if answer.proven:
            proven += 1
            partition = solved(problem, stages=stages, optimum=answer.value, empty=empty, slack=0.1)
            feasible += partition is not None
            certain += partition is not None and partition.status == "optimal"
            near += partition is not None and partition.value_s <= answer.value * 1.03
    assert seed <= 40, "HiGHS leaves too much unproven for this to be a test"
    assert 8 <= feasible <= 22
    assert certain >= 0.7 * feasible
    assert near >= 0.8 * feasible


SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2), ("looped_bfs", 2), ("zb_v", 2))


def featured(seed: int) -> tuple[Problem, int]:
    """Return a problem with all features, and how many stages to cut it into."""
    chance = random.Random(f"featured {seed}")
    schedule, each = SCHEDULES[seed % len(SCHEDULES)]
    devices = chance.randint(1, 3) if each == 1 else 2
    mix = Mix(chance.randint(4, 8), colours=0.1, unordered=0.2, whole=False)
    problem = replace(random_problem(seed, mix), schedule=schedule, virtual_stages=each, microbatches=2 * devices)
    capacities = tuple(chance.choice((None, 60, 150, 400)) for _ in range(devices))
    problem = with_devices(problem, seed, stages=devices, capacities=capacities)
    return with_ties(problem, seed), devices * each


def test_the_checker_counts_what_the_definitions_say() -> None:
    fitting = 0
    for seed in range(180):
        problem, stages = featured(seed)
        rules, chance = Rules(problem, stages), random.Random(f"order {seed}")
        cuts = [cut for cut in assignments(problem, stages=stages, empty=True) if max(cut) == stages - 1]
        for assignment in chance.sample(cuts, min(4, len(cuts))):
            recompute = tuple(chance.choice(RECOMPUTE) for _ in range(stages))
            costs = check(problem, assignment, recompute=recompute)
            bottleneck_s = rules.bottleneck_s(assignment, recompute)
            pairs = zip(costs.device_bytes, problem.capacity_bytes or (), strict=False)
            fits = all(limit is None or needed <= limit for needed, limit in pairs)
            assert fits == (bottleneck_s < math.inf)
            if fits:
                fitting += 1
                assert costs.bottleneck_s == pytest.approx(bottleneck_s)
                assert costs.step_s == pytest.approx(rules.step_s(assignment, recompute))
            for stage, inside in enumerate(rules.stage_masks(assignment)):
                before = sum(rules.stage_masks(assignment)[:stage])
                option = rules.option(recompute[stage], inside, before=before, stage=stage)
                assert costs.loads_s[stage] == pytest.approx(option.load_s)
                assert costs.stage_bytes[stage] == option.peak_bytes
    assert fitting > 200


ROOT = Path(__file__).resolve().parents[2]


def cuts_of_a_process(hash_seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.partition.oracle_repeat"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_the_same_problem_gives_the_same_cut_in_every_process() -> None:
    first = cuts_of_a_process(1)
    assert len(first) == 20
    assert sum(line.startswith("(") for line in first) > 12
    assert cuts_of_a_process(2) == first
    assert list(cuts()) == first
