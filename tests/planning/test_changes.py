"""What is said to make a plan fit does: planned with those arguments, it fits, at the price that was named."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.planning.plan.fields import Change
from tests.models.blocks import WideBlock

WIDTH, ROWS = 64, 32
H100 = "H100-SXM5-80GB"


@cache
def planned(devices: str = f"2x{H100}", *, rows: int = ROWS, width_rows: int = 16, **choices: Any) -> autosplit.Plan:
    model = nn.Sequential(*(WideBlock(WIDTH, norm=True, times=2) for _ in range(8)))  # of 65 KiB of parameters each
    sample = torch.zeros(rows, width_rows, WIDTH)
    return autosplit.plan(model, devices, sample=sample, **{"schedule": "1f1b"} | choices)


def again(change: Change, **choices: Any) -> autosplit.Plan:
    """Plan as a change says."""
    arguments: dict[str, Any] = {**choices, **change.arguments}
    rows = arguments.pop("batch", ROWS)
    return planned(arguments.pop("devices", f"2x{H100}"), rows=rows, **arguments)


@pytest.mark.parametrize(
    ("choices", "kinds"),
    [
        pytest.param({"memory_limit": "1.2MiB", "chunks": 4}, {"devices", "precision"}, marks=pytest.mark.slow),
        (
            {"memory_limit": "2.2MiB", "chunks": 2, "recompute": "never"},
            {"recompute", "chunks", "batch", "devices", "precision"},
        ),
    ],
)
def test_every_change_holds_when_it_is_planned(choices: dict[str, Any], kinds: set[str]) -> None:
    plan = planned(**choices)
    assert plan.verdict == "no"
    assert kinds <= {change.kind for change in plan.changes}, [change.text for change in plan.changes]
    assert len({change.kind for change in plan.changes}) == len(plan.changes)
    for change in plan.changes:
        found = again(change, **choices)
        assert found.verdict != "no", change.text
        assert change.step_s == pytest.approx(found.step_s, rel=0.25), change.text
        assert "about" in change.text


def test_a_plan_that_fits_needs_no_change() -> None:
    assert planned().changes == ()


def test_a_schedule_that_holds_less_is_proposed_for_one_that_was_asked_for() -> None:
    plan = planned(memory_limit="2MiB", chunks=8, recompute="never", schedule="gpipe")
    assert plan.verdict == "no"
    [schedule] = [change for change in plan.changes if change.kind == "schedule"]
    assert schedule.arguments == {"schedule": "1f1b"}
    assert schedule.text.startswith('schedule="1f1b": ')


def test_larger_devices_are_the_same_maker_s_and_only_where_no_limit_was_given() -> None:
    with torch.device("meta"):
        model, sample = nn.Sequential(*[nn.Linear(40_000, 40_000) for _ in range(2)]), torch.empty(8, 40_000)
    choices: dict[str, Any] = {"sample": sample, "optimizer": "sgd", "precision": "bf16", "schedule": "1f1b"}
    small = autosplit.plan(model, "2xL4-24GB", 2, **choices, memory_limit="6GiB")
    assert small.verdict == "no"
    assert "device" not in {change.kind for change in small.changes}
    few = autosplit.plan(model, "1xT4-16GB", 2, **choices | {"precision": "fp32"})
    [device] = [change for change in few.changes if change.kind == "device"]
    assert str(device.arguments["devices"]).startswith("1x")
    assert "MI" not in str(device.arguments["devices"])


@pytest.mark.slow
def test_where_no_change_is_enough_two_together_are() -> None:
    choices: dict[str, Any] = {"memory_limit": "0.3MiB", "chunks": 2, "recompute": "never"}
    plan = planned(f"8x{H100}", **choices)
    assert plan.verdict == "no"
    [change] = [change for change in plan.changes if change.kind == "pair"]
    assert all(change.verdict != "fits" for change in plan.changes if change.kind != "pair")
    assert len(change.arguments) == 2
    assert " and " in change.text
    assert again(change, **choices, devices=f"8x{H100}").verdict != "no", change.text
