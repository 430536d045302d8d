"""What a step takes beside its operations: fitted by the calibration, kept in the device's file, part of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.cli.calibrate import cases, step_costs, with_step
from autosplit.planning.profiled import specs
from autosplit.profile.calibrate import default_path
from autosplit.report.prediction import prediction
from cost_models import registry
from cost_models.calibration import Calibrated, Stamp, robust_costs
from cost_models.roofline import Roofline
from cost_models.specs import StepAmounts

COSTS = {"step_s": 1e-3, "action_s": 1e-4, "gradient_byte_s": 1e-9, "fresh_byte_s": 1e-10, "overlap": 0.1}


def _calibrated(costs: dict[str, float]) -> Calibrated:
    lane = registry.device("cpu-lane")
    return with_step(Calibrated({}, Roofline(lane), Stamp(device=lane.name, date="2026-11-23")), costs)


@pytest.fixture
def calibration() -> Iterator[Path]:
    """A calibration where the user's cache has it, read anew before and after."""
    path = default_path()
    _calibrated(COSTS).save(path)
    specs.spec_of.cache_clear()
    yield path
    path.unlink()
    specs.spec_of.cache_clear()


def _pipe(lanes: str = "threads") -> object:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return autosplit(model, ["cpu"] * 2, 4, sample=torch.randn(8, 8), lanes=lanes, schedule="1f1b")


def test_a_step_has_its_overhead_by_the_calibration(calibration: Path) -> None:
    plan = _pipe().plan
    # 4 microbatches: 8 actions on each lane, and gradients added 3 times
    own = [1e-3 + 8e-4 + 3 * 288 * 1e-9 + stage.memory.activation_bytes * 1e-10 for stage in plan.stages]
    assert plan.overhead_s >= max(own)
    assert plan.overhead_s <= max(own) + 0.1 * plan.step_s
    assert plan.step_s > plan.overhead_s
    assert plan.lower_bound_s <= plan.step_s - plan.overhead_s
    assert "the runtime's" in dict(prediction(plan).facts)["step"]


def test_figures_are_found_again_where_steps_follow_them() -> None:
    amounts = [StepAmounts(1, a, g, h, o) for a in (8, 64) for g in (0, 10**8) for h in (0, 10**8) for o in (0.01, 0.3)]
    extra = [sum(cost * amount for cost, amount in zip(COSTS.values(), own, strict=True)) for own in amounts]
    found = robust_costs(
        amounts, extra, parts_of_s=[own.overlapped_s + e for own, e in zip(amounts, extra, strict=True)]
    )
    assert found == pytest.approx(list(COSTS.values()), rel=1e-3)


def test_the_calibration_times_steps_of_layers() -> None:
    small = next(cases())
    found = step_costs([replace(small, chunks=chunks) for chunks in (2, 8)], steps=1)
    assert list(found) == list(COSTS)
    assert all(cost >= 0 for cost in found.values())
    assert sum(found.values()) > 0
