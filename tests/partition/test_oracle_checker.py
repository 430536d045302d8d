"""The solver's checker against the oracles' own count, on random cuts with every feature of the problem."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autosplit.partition.checker import check
from autosplit.partition.problem import RECOMPUTE, Problem
from tests.partition.oracle_brute import assignments
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_problems import Mix, random_problem, with_devices, with_ties

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
