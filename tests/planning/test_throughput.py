"""What a plan says of its model and its speed: precision, sequence, parameters, tokens or rows per second, MFU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autosplit import Plan, plan
from autosplit.report.page import page
from autosplit.report.sections import render
from cost_models import registry

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
