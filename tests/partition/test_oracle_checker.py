"""The solver's checker against the oracles' own count, on random cuts with every feature of the problem."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autosplit.partition.checker import check
from autosplit.partition.problem import Problem
from tests.partition.oracle_brute import assignments
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_problems import Mix, random_problem, with_devices, with_extras

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
    return with_extras(problem, seed, ties=True, recompute=True, replicas=True), devices * each


def test_the_checker_counts_what_the_definitions_say() -> None:
    fitting = several = 0
    for seed in range(180):
        problem, stages = featured(seed)
        rules, chance = Rules(problem, stages), random.Random(f"order {seed}")
        cuts = [cut for cut in assignments(problem, stages=stages, empty=True) if max(cut) == stages - 1]
        order = tuple(chance.sample(range(len(problem.devices)), len(problem.devices)))
        for assignment in chance.sample(cuts, min(4, len(cuts))):
            costs = check(problem, assignment, order=order)
            several += len(set(costs.recompute)) > 1
            bottleneck_s = rules.bottleneck_s(assignment, order=order)
            fits = all(
                problem.devices[device].capacity_bytes is None or needed <= problem.devices[device].capacity_bytes
                for device, needed in zip(order, costs.device_bytes, strict=True)
            )
            assert fits == (bottleneck_s < math.inf)
            if fits:
                fitting += 1
                assert costs.bottleneck_s == pytest.approx(bottleneck_s)
                assert costs.step_s == pytest.approx(rules.step_s(assignment, order=order))
            for stage, inside in enumerate(rules.stage_masks(assignment)):
                option = rules.option(
                    costs.recompute[stage],
                    inside,
                    before=sum(rules.stage_masks(assignment)[:stage]),
                    stage=stage,
                    device=order[rules.lane[stage]],
                )
                assert costs.loads_s[stage] == pytest.approx(option.load_s)
                assert costs.stage_bytes[stage] == option.peak_bytes
    assert fitting > 200
    assert several > 50
