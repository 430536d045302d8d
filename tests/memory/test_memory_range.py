"""Between which bytes a peak may come out: every part of the rule, and what it makes of a verdict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cost_models
from autosplit import autosplit, plan
from autosplit.planning.peaks import PeakRange
from autosplit.planning.plan.fields import MemoryItem
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.stage_memory import StageMemory
from autosplit.report.sections import render

GIB, MIB = 2**30, 2**20
WIDTH, ROWS = 8192, 8
NOTHING: dict[str, Any] = dict.fromkeys(
    (f"{name}_bytes" for name in "parameter buffer gradient optimizer activation transient peak".split()), 0
)


def item(low: int, high: int) -> MemoryItem:
    return MemoryItem(name="item", low_bytes=low, high_bytes=high, source="test")


def test_the_range_of_one_certain_item_is_itself() -> None:
    assert PeakRange.of([item(1000, 1000)]) == PeakRange(1000, 1000, (item(1000, 1000),))


@pytest.mark.parametrize("widths", [(10**9, 10**8), (3, 5, 9, 4, 7), (10**6,) * 12])
def test_nine_of_ten_sums_of_uniform_items_are_in_the_range(widths: tuple[int, ...]) -> None:
    random, items = Random(0), [item(10**10, 10**10), *(item(-width, 0) for width in widths)]
    found = PeakRange.of(items)
    sums = [sum(random.uniform(each.low_bytes, each.high_bytes) for each in items) for _ in range(1000)]
    inside = sum(found.low_bytes <= total <= found.high_bytes for total in sums) / len(sums)
    assert 0.87 <= inside <= 0.97


def test_a_choice_is_its_least_or_its_most() -> None:
    items = item(100, 100), item(0, 12), item(0, 50).model_copy(update={"choice": True})
    found, without = PeakRange.of(items), PeakRange.of(items[:2])
    assert (found.low_bytes, found.high_bytes) == (without.low_bytes, without.high_bytes + 50)
    memory = StageMemory(**NOTHING, **asdict(found), capacity_bytes=130)
    assert (memory.verdict, memory.odds) == ("borderline", 0.5)


@given(st.integers(0, 10**12), st.integers(10**4, 10**12), st.integers(0, 2 * 10**12))
def test_odds_agree_with_verdicts(low: int, width: int, capacity: int) -> None:
    memory = StageMemory(**NOTHING, low_bytes=low, high_bytes=low + width, capacity_bytes=capacity)
    assert memory.odds is not None
    if memory.verdict != "borderline":
        assert memory.odds > 0.94 if memory.verdict == "fits" else memory.odds < 0.06
    else:
        assert 0.04 < memory.odds < 0.96


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Tanh())


def planned(*, devices: int = 2, capacity_bytes: int | None = None, **options: Any) -> Any:
    spec = cost_models.device("H100-SXM5-80GB")
    assert spec.usable_bytes is not None
    assert spec.memory_bytes is not None
    with torch.device("meta"):
        model, x = net(), torch.empty(ROWS, WIDTH)
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
    items = {own.name: own for own in stage.memory.items}
    least = max(*map(sum, actions), sum(update) - stage.memory.parameter_bytes)
    assert items["optimizer's lists"].low_bytes == least - stage.memory.peak_bytes
    assert items["tensors"].low_bytes == items["tensors"].high_bytes == stage.memory.peak_bytes
    assert items["cuBLAS"].high_bytes == 2 * 32 * MIB
    assert low < high
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


def test_a_borderline_plan_says_its_odds(tmp_path: Path) -> None:
    found = max(planned(devices=1).stages, key=lambda stage: stage.memory.peak_bytes).memory
    assert found.low_bytes is not None
    assert found.high_bytes is not None
    plan = planned(devices=1, capacity_bytes=(found.low_bytes + found.high_bytes) // 2)
    assert plan.odds == pytest.approx(0.5, abs=0.01)
    assert "fits with a chance of about 50%" in " ".join(render(plan).split())
    assert "borderline, 50%" in render(plan)
    assert '"odds": 0.5' in render(plan, "json")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_expandable_segments_leave_fewer_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    default = planned(devices=1).stages[0].memory
    expandable = planned(devices=1, allocator="expandable").stages[0].memory
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    assert planned(devices=1).stages[0].memory == expandable
    assert expandable.high_bytes < default.high_bytes


def test_a_limit_that_was_given_is_held_by_the_peak_alone() -> None:
    peak = max(stage.memory.peak_bytes for stage in planned().stages)
    found = planned(memory_limit=peak)
    assert found.verdict == "fits"
    assert {stage.memory.high_bytes for stage in found.stages} == {None}


@pytest.mark.parametrize("limit", [None, 10**10])
def test_lanes_of_the_cpu_have_no_range(limit: int | None) -> None:
    found = autosplit(net(), devices=2, chunks=2, sample=torch.zeros(ROWS, WIDTH), memory_limit=limit).plan
    assert found is not None
    assert [stage.memory.low_bytes for stage in found.stages] == [None] * 2
    assert found.verdict == ("borderline" if limit is None else "fits")
