"""What a plan says of every device over the step: its highest point is the plan's peak, of the same parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.planning.plan import write
from autosplit.planning.plan.plan import Plan

WIDTH, ROWS = 8, 6


class Net(nn.Module):
    """Layers, and at their end one that mixes rows where ``mixed``."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.layers, self.mixed = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), mixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(0, keepdim=True).tanh() if self.mixed else x.tanh()


def planned(*, mixed: bool = False, **options: Any) -> Plan:
    plan = autosplit(Net(mixed=mixed), devices=2, sample=torch.zeros(ROWS, WIDTH), **{"chunks": 3, **options}).plan
    assert plan is not None
    return plan


CASES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "mixed": True},
    {"schedule": "interleaved", "virtual_stages": 2, "chunks": 4},
    {"schedule": "zb_h1"},
    {"schedule": "1f1b", "recompute": "always", "optimizer": "adam"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_the_highest_point_is_the_peak(options: dict[str, Any]) -> None:
    plan = planned(**options)
    lanes = plan.schedule_for(len(plan.microbatch_rows)).lanes
    assert len(plan.curves) == len(lanes)
    for lane, curve in enumerate(plan.curves):
        own = [stage.memory for stage in plan.stages if stage.lane == lane]
        kinds = {name: tuple(values) for name, values in curve.model_dump().items()}
        assert {len(values) for values in kinds.values()} == {len(lanes[lane]) + 1}
        totals = [sum(moment) for moment in zip(*kinds.values(), strict=True)]
        assert max(totals) == own[0].peak_bytes
        at = totals.index(max(totals))
        assert kinds["parameter_bytes"][at] == sum(m.parameter_bytes + m.buffer_bytes for m in own)
        for name in ("gradient_bytes", "optimizer_bytes", "activation_bytes", "transient_bytes"):
            assert kinds[name][at] == sum(getattr(m, name) for m in own), name


def test_curves_come_back_from_a_file(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").curves == plan.curves


def test_a_very_long_step_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MOST_ACTIONS", 11)
    assert planned().curves == ()
    assert planned(chunks=2).curves
