"""The simulator of many cuts against the plain one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.partition.step_model import FastSimulator, StepTimes
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.simulate import TransferTime, simulate


def drawn_times(seed: int, *, cuts: int, stages: int, dense: float) -> StepTimes:
    chance = np.random.default_rng(seed)
    backward_s = chance.uniform(0, 2, (cuts, stages)) * (chance.random((cuts, stages)) < 0.9)
    pair = np.triu(chance.random((cuts, stages, stages)) < dense, 1)
    return StepTimes(
        forward_s=chance.uniform(0, 1, (cuts, stages)) * (chance.random((cuts, stages)) < 0.9),
        backward_s=backward_s,
        weight_s=backward_s * chance.random((cuts, stages)),
        ahead_s=pair * chance.uniform(0, 3, pair.shape),
        back_s=pair * chance.uniform(0, 3, pair.shape),
    )


def plain_step_s(name: str, times: StepTimes, cut: int, *, microbatches: int, virtual_stages: int) -> float:
    stages = times.forward_s.shape[1]
    transfers = tuple(
        TransferTime(a, b, times.ahead_s[cut, a, b], times.back_s[cut, a, b])
        for a in range(stages)
        for b in range(a + 1, stages)
    )
    return simulate(
        build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages),
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
