"""Between which bytes a peak may come out: every part of the rule, and what it makes of a verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cost_models
from autosplit import autosplit, plan
from autosplit.planning.memory import ESTIMATED_SHARE, peak_range

GIB, MIB = 2**30, 2**20
WIDTH, ROWS = 512, 8


def test_every_part_of_the_rule() -> None:
    known: dict[str, Any] = {"states_bytes": 600, "workspace_bytes": 8}
    plain = peak_range(1000, **known)
    assert (plain.low_bytes, plain.high_bytes) == (1000, 1016)
    guessed = peak_range(1000, guessed_bytes=30, **known)
    assert (guessed.low_bytes, guessed.high_bytes) == (970, 1046)
    fused = peak_range(1000, lists_bytes=100, **known)
    assert (fused.low_bytes, fused.high_bytes) == (900, 1016)
    assert peak_range(1000, fragments=0.05, **known).high_bytes == 1016 + 20
    assert peak_range(1000, estimated=True, **known).high_bytes == 1016 + round(400 * ESTIMATED_SHARE)
    assert peak_range(1000, guessed_bytes=10**6, **known).low_bytes == 600, "what is there before the step is certain"


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**9), st.booleans(), st.floats(0, 1, width=32))
def test_a_range_is_one(peak: int, states: int, guessed: int, estimated: bool, fragments: float) -> None:
    found = peak_range(
        max(peak, states),
        states_bytes=states,
        workspace_bytes=MIB,
        guessed_bytes=guessed,
        estimated=estimated,
        fragments=fragments,
    )
    assert states <= found.low_bytes <= max(peak, states) < found.high_bytes, "the peak lies in its range"


class Net(nn.Module):
    """Wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


def planned(*, devices: int = 2, capacity_bytes: int | None = None, **options: Any) -> Any:
    spec = cost_models.device("H100-SXM5-80GB")
    assert spec.usable_bytes is not None
    assert spec.memory_bytes is not None
    with torch.device("meta"):
        model, x = Net(), torch.empty(ROWS, WIDTH)
    if capacity_bytes is not None:
        spec = spec.model_copy(update={"memory_bytes": spec.memory_bytes - spec.usable_bytes + capacity_bytes})
    options = {"reserve": 0, "schedule": "1f1b", "recompute": "never"} | options
    return plan(model, [spec] * devices, 2, sample=x, **options)


@pytest.mark.slow
def test_a_capacity_in_the_range_is_borderline() -> None:
    found = planned(devices=1)  # two devices with less room would be cut elsewhere
    stage = max(found.stages, key=lambda stage: stage.memory.peak_bytes)
    low, high = stage.memory.low_bytes, stage.memory.high_bytes
    *actions, update = zip(*found.curves[stage.lane].model_dump().values(), strict=True)
    assert sum(update) == stage.memory.peak_bytes, "AdamW's step is the fullest moment: it has a list of roots"
    assert low == max(*map(sum, actions), sum(update) - stage.memory.parameter_bytes)
    assert low < stage.memory.peak_bytes < high
    assert high >= stage.memory.peak_bytes + 2 * 32 * MIB
    assert found.verdict == "fits"
    assert planned(devices=1, capacity_bytes=high).verdict == "fits"
    assert planned(devices=1, capacity_bytes=high - 1).verdict == "borderline"
    assert planned(devices=1, capacity_bytes=low).verdict == "borderline"
    assert planned(devices=1, capacity_bytes=low - 1).verdict == "no"


def test_a_peak_in_the_reserve_is_borderline() -> None:
    stage = max(planned(devices=1).stages, key=lambda stage: stage.memory.peak_bytes)
    low, high = stage.memory.low_bytes, stage.memory.high_bytes
    assert planned(devices=1, capacity_bytes=high + GIB, reserve=GIB).verdict == "fits"
    found = planned(devices=1, capacity_bytes=high + GIB, reserve=GIB + 1)
    assert (found.verdict, found.fits) == ("borderline", None)
    assert planned(devices=1, capacity_bytes=low, reserve=MIB).verdict == "borderline"
    assert planned(devices=1, capacity_bytes=low - 1, reserve=0).verdict == "no"


def test_a_limit_that_was_given_is_held_by_the_peak_alone() -> None:
    peak = max(stage.memory.peak_bytes for stage in planned().stages)
    found = planned(memory_limit=peak)
    assert found.verdict == "fits"
    assert {stage.memory.high_bytes for stage in found.stages} == {None}


@pytest.mark.parametrize("limit", [None, 10**9])
def test_lanes_of_the_cpu_have_no_range(limit: int | None) -> None:
    found = autosplit(Net(), devices=2, chunks=2, sample=torch.zeros(ROWS, WIDTH), memory_limit=limit).plan
    assert found is not None
    assert [stage.memory.low_bytes for stage in found.stages] == [None] * 2
    assert found.verdict == ("borderline" if limit is None else "fits")
