"""Figures of a plan beside its step: throughput, curves of memory, a step's overhead and range, what tokens cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError, Plan, autosplit, plan
from autosplit.checks import check_price
from autosplit.cli.calibrate import cases, step_costs, with_step
from autosplit.planning.explain.price import price_of
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.planning.profiled import specs
from autosplit.profile.calibrate import default_path
from autosplit.report.page import page
from autosplit.report.prediction import prediction
from autosplit.report.sections import render
from cost_models import names, registry
from cost_models.calibration import Calibrated, Stamp, robust_costs
from cost_models.prices import list_prices
from cost_models.roofline import Roofline
from cost_models.specs import StepAmounts
from tests.planning.llama import Llama
from tests.planning.test_mesh_plan import _loss

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


def priced(**choices: object) -> Plan:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    sample = torch.zeros(4, 8, dtype=torch.int64)
    return plan(model, "2xL4-24GB", 2, sample=sample, schedule="1f1b", recompute="never", **choices)


@pytest.fixture(scope="module")
def listed() -> Plan:
    return priced()


def test_the_price_of_a_billion_tokens(listed: Plan) -> None:
    given = priced(price="2.10/h").price
    assert given is not None
    assert given.usd_per_hour == pytest.approx(4.2)
    assert given.source == "$2.10 per device and hour, as given"
    seconds = 1e9 / (4 * 8) * listed.step_s
    assert given.usd_per_billion_tokens == pytest.approx(4.2 * seconds / 3600, rel=1e-6)
    assert price_of(listed, 2.1) == given


def test_a_list_price_says_whose_it_is_and_of_which_day(listed: Plan) -> None:
    known = list_prices()["L4-24GB"]
    assert listed.price is not None
    assert listed.price.usd_per_hour == pytest.approx(2 * known.usd_per_hour)
    assert known.source in listed.price.source
    assert known.read_on in listed.price.source
    assert f"per 1B tokens, ${2 * known.usd_per_hour:.2f} per hour (list prices per hour: L4-24GB $" in render(
        listed, width=400
    )
    assert Plan.model_validate_json(listed.to_json()).price == listed.price


def test_all_ranks_of_a_mesh_are_paid_for_and_unknown_devices_have_no_list_price(listed: Plan) -> None:
    mesh = listed.model_copy(update={"mesh": MeshDegrees(dp=4, tp=2, pp=2)})
    found = price_of(mesh, 1.0)
    assert found is not None
    assert found.usd_per_hour == 16
    assert price_of(listed.model_copy(update={"devices": ("mine", "L4-24GB")}), None) is None
    assert price_of(listed.model_copy(update={"machine": None}), 1.0) is None


def test_every_list_price_is_a_known_devices_and_dated() -> None:
    assert set(list_prices()) <= set(names())
    for price in list_prices().values():
        assert date(2026, 1, 1) < date.fromisoformat(price.read_on) < date(2027, 1, 1)
        assert 0.05 < price.usd_per_hour < 20


@pytest.mark.parametrize("text", ["-1", "0", "two", "nan", "inf", "2.1/day"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(InputError, match="give US dollars per device and hour"):
        check_price(text)


def test_forms_of_a_price() -> None:
    assert [check_price(text) for text in ("2.10/h", "$2.10/h", " 2.1 ", 2.1, None)] == [2.1, 2.1, 2.1, 2.1, None]


def _of_llama(**choices: Any) -> Plan:
    with torch.device("meta"):
        model = Llama(width=2048, inner=4096, layers=4, heads=16, groups=16)
    sample = torch.zeros(64, 1024, dtype=torch.int64, device="meta")
    asked = {"precision": "bf16_fp32_master", "schedule": "1f1b", "chunks": 2, "recompute": "never", "loss_fn": _loss}
    return plan(model, sample=sample, **asked | choices)


def test_a_slow_network_is_what_sharded_replicas_hang_on() -> None:
    """With 50 Gbit a host the gathers decide; the line says so, and the file keeps it."""
    asked = {"devices": "4x8xA100-SXM4-80GB", "mesh": "dp=32", "zero": 3, "runtime": "torchtitan", "chunks": 1}
    slow, fast = _of_llama(network="50Gbit", **asked), _of_llama(**asked)
    kernels, network = slow.sensitivity
    assert (kernels.what, network.what) == ("kernels 15% slower", "half the network")
    assert network.ratio > 1.8
    assert 1.0 <= fast.sensitivity[1].ratio < network.ratio
    assert slow.step_s > 3 * fast.step_s
    assert slow.step_low_s is not None
    assert slow.step_high_s is not None
    assert slow.step_low_s < slow.step_s < slow.step_high_s
    line = dict(prediction(slow).facts)["range"]
    assert "with half the network" in line
    assert Plan.model_validate_json(slow.to_json()) == slow


def test_one_host_hangs_on_its_kernels() -> None:
    """There is no network; an architecture that nothing is known of has twice the range."""
    known, unknown = (_of_llama(devices=f"2x{name}") for name in ("A100-SXM4-80GB", "MI250X-GCD-64GB"))
    widths = []
    for each in (known, unknown):
        (kernels,) = each.sensitivity
        assert 1.1 < kernels.ratio < 1.16
        assert each.step_high_s is not None
        widths.append((each.step_high_s / each.step_s - 1) / (kernels.ratio - 1))
    assert widths == [pytest.approx(1), pytest.approx(2)]
