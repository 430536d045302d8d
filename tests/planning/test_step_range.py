"""Between what times a step may come out, and what it hangs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosplit import Plan, plan
from autosplit.report.prediction import prediction
from tests.planning.llama import Llama
from tests.planning.test_mesh_plan import _loss


def _planned(**choices: Any) -> Plan:
    with torch.device("meta"):
        model = Llama(width=2048, inner=4096, layers=4, heads=16, groups=16)
    sample = torch.zeros(64, 1024, dtype=torch.int64, device="meta")
    asked = {"precision": "bf16_fp32_master", "schedule": "1f1b", "chunks": 2, "recompute": "never", "loss_fn": _loss}
    return plan(model, sample=sample, **asked | choices)


def test_a_slow_network_is_what_sharded_replicas_hang_on() -> None:
    """With 50 Gbit a host the gathers decide; the line says so, and the file keeps it."""
    asked = {"devices": "4x8xA100-SXM4-80GB", "mesh": "dp=32", "zero": 3, "runtime": "torchtitan", "chunks": 1}
    slow, fast = _planned(network="50Gbit", **asked), _planned(**asked)
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
    known, unknown = (_planned(devices=f"2x{name}") for name in ("A100-SXM4-80GB", "MI250X-GCD-64GB"))
    widths = []
    for each in (known, unknown):
        (kernels,) = each.sensitivity
        assert 1.1 < kernels.ratio < 1.16
        assert each.step_high_s is not None
        widths.append((each.step_high_s / each.step_s - 1) / (kernels.ratio - 1))
    assert widths == [pytest.approx(1), pytest.approx(2)]
