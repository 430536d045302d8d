"""Figures of a plan beside its step: throughput, curves of memory, a step's overhead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autosplit import Plan, autosplit, plan
from autosplit.cli.calibrate import cases, step_costs, with_step
from autosplit.planning.profiled import specs
from autosplit.profile.calibrate import default_path
from autosplit.report.page import page
from autosplit.report.prediction import prediction
from autosplit.report.sections import render
from cost_models import registry
from cost_models.calibration import Calibrated, Stamp, robust_costs
from cost_models.roofline import Roofline
from cost_models.specs import StepAmounts

WORDS, WIDTH, ROWS, LENGTH = 100, 64, 16, 128


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(WORDS, WIDTH),
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(ids)))
        return out


def planned(**choices: object) -> Plan:
    with torch.device("meta"):
        ids = torch.empty(ROWS, LENGTH, dtype=torch.int64)
        return plan(Reader().bfloat16(), "2xH100-SXM5-80GB", 4, sample=ids, schedule="1f1b", **choices)


def test_tokens_per_second_and_the_share_of_the_peak() -> None:
    found = planned()
    assert (found.dtype, found.sequence) == ("bfloat16", LENGTH)
    assert found.parameters == sum(p.numel() for p in Reader().parameters())
    assert found.tokens_per_s == pytest.approx(ROWS * LENGTH / found.step_s)
    products = 6 * ROWS * LENGTH * (8 * WIDTH * WIDTH + WIDTH * WORDS)
    assert found.model_flops == pytest.approx(products, rel=0.02)
    peak = 2 * registry.device("H100-SXM5-80GB").peak("bf16")
    assert found.peak_flops_per_s == peak
    assert found.mfu == pytest.approx(found.model_flops / found.step_s / peak)


def test_what_is_recomputed_is_no_use_of_the_model() -> None:
    plain, again = planned(recompute="never"), planned(recompute="always")
    assert again.model_flops == plain.model_flops
    assert again.mfu < plain.mfu


def test_the_report_the_page_and_json_say_so(tmp_path: Path) -> None:
    found = planned()
    text = render(found)
    assert "parameters in bfloat16, as the model is, rows of 128 tokens" in text
    assert "tokens/s (" in text
    assert "model FLOPs utilisation" in text
    assert "precision fp32" in render(planned(precision="fp32"))
    shown = page(found)
    assert "tokens/s" in shown
    assert "rows of 128 tokens" in shown
    data = json.loads(found.to_json())
    assert {"precision", "sequence", "parameters", "tokens_per_s", "rows_per_s", "mfu"} <= data.keys()
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_a_host_that_binds_is_among_the_reasons() -> None:
    assert any(reason.startswith("host-bound") for reason in planned().reasons)


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
