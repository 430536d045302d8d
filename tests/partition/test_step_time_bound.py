"""The lower bounds of a step, before they are limited by the best step found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autosplit.partition.checker import check
from autosplit.partition.problem import Problem, TensorEdge, Work
from autosplit.partition.solve import step_lower_bound
from autosplit.partition.step_bound import families, simple_bound
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.simulate import simulate

ONE_EACH = tuple(name for name, entry in SCHEDULES.items() if entry.virtual_stages == 1)


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
