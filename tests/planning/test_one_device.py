"""Where one device holds the model with room a plan says so, and names data parallel."""

from __future__ import annotations

import torch
from torch import nn

from autosplit import Plan, plan


def planned(devices: str, *, width: int = 256, **choices: object) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
        return plan(model, devices, 8, sample=torch.empty(64, 128, width), **choices)


def said(found: Plan) -> list[str]:
    return [reason for reason in found.reasons if "data parallel" in reason]


def test_a_small_model_is_told_of_data_parallel() -> None:
    [words] = said(planned("4xH100-SXM5-80GB"))
    assert words.startswith("one H100-SXM5-80GB holds the model with room (about ")
    assert "data parallel (DDP) over the 4 has no bubble" in words


def test_one_device_kinds_that_differ_and_full_ones_are_not() -> None:
    assert not said(planned("H100-SXM5-80GB"))
    assert not said(planned("H100-SXM5-80GB+L4-24GB"))
    assert not said(planned("4xH100-SXM5-80GB", schedule="forward"))
    assert not said(planned("4xL4-24GB", width=12288))
