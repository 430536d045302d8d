"""The fewest devices that hold a model, and the largest batch that some hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.errors import DeviceError, InputError
from autosplit.planning.timeline import predicted
from examples.models import ResNet

WIDTH, DEPTH = 32, 6


def net() -> nn.Sequential:
    """Layers that are all alike: 4.1 KiB of parameters each, so 16.5 KiB of state, and 128 bytes per row between."""
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def planned(devices: str, *, rows: int = 16, **choices: Any) -> autosplit.Plan:
    """Plan without recompute where nothing else is said: it is the quickest to search."""
    return autosplit.plan(net(), devices, 2, sample=torch.zeros(rows, WIDTH), **{"recompute": "never"} | choices)


def test_the_fewest_devices_hold_the_model_and_one_fewer_do_not() -> None:
    limit = "70KiB"
    found = planned("1xH100-SXM5-80GB", memory_limit=limit, find="smallest")
    count = len(found.devices)
    assert found.verdict == "fits"
    assert count > 1
    assert planned(f"{count}xH100-SXM5-80GB", memory_limit=limit).verdict == "fits"
    assert planned(f"{count - 1}xH100-SXM5-80GB", memory_limit=limit).verdict != "fits"
    first = found.reasons[0]
    assert first.startswith(f"{count}xH100-SXM5-80GB is the least that holds the model: with {count - 1}xH100")
    assert "of 70.0 KiB" in first


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    limit = "60KiB"
    found = planned("3xH100-SXM5-80GB", memory_limit=limit, find="largest_batch")
    rows = sum(found.microbatch_rows)
    assert found.verdict == "fits"
    assert rows % 2 == 0
    assert rows != 16
    assert found.step_s == pytest.approx(predicted(found).step_s)
    more = planned("3xH100-SXM5-80GB", rows=rows + 1, memory_limit=limit)
    assert more.verdict != "fits"
    assert planned("3xH100-SXM5-80GB", rows=rows, memory_limit=limit).verdict == "fits"
    assert found.reasons[0].startswith(f"the largest batch that fits in 2 microbatches is {rows} rows, {rows // 2} in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "limit", "choices"),
    [
        ("2xH100-SXM5-80GB", "66KiB", {"recompute": "auto"}),
        ("2xH100-SXM5-80GB", "63KiB", {"schedule": "auto"}),
    ],
)
def test_the_largest_batch_is_that_of_the_batches_around_it(devices: str, limit: str, choices: dict[str, Any]) -> None:
    found = planned(devices, memory_limit=limit, find="largest_batch", **choices)
    each = max(found.microbatch_rows)
    near = range(max(1, each - 2), each + 4)
    every = {rows: planned(devices, rows=2 * rows, memory_limit=limit, **choices) for rows in near}
    assert each == max(rows for rows, plan in every.items() if plan.verdict == "fits")
    said = {"reasons": (), "changes": ()}
    assert found.model_copy(update=said) == every[each].model_copy(update=said)


@pytest.mark.slow
def test_a_cut_that_surely_fits_is_looked_for_where_the_fastest_may_not() -> None:
    with torch.device("meta"):
        model, sample = ResNet(), torch.empty(16 * 1145, 3, 224, 224)
    asked = {"sample": sample, "schedule": "auto", "recompute": "auto"}
    assert autosplit.plan(model, "4xA100-SXM4-80GB", 16, **asked).verdict == "fits"


def test_a_batch_that_cannot_fit_at_all_is_said() -> None:
    found = planned("2xH100-SXM5-80GB", memory_limit="20KiB", find="largest_batch")
    assert found.verdict == "no"
    assert found.reasons[0].startswith("not even 2 rows in 2 microbatches fit: device ")


@pytest.mark.parametrize(
    ("devices", "choices", "error", "text"),
    [
        ("1xH100-SXM5-80GB+1xL4-24GB", {}, DeviceError, "has devices of 2 kinds; name one, such as 8xH100-SXM5-80GB"),
        ("2xH100-SXM5-80GB", {"recompute": ["never", "block"]}, InputError, "a recompute per stage is made for one"),
        (
            "2xH100-SXM5-80GB",
            {"find": "fewest"},
            InputError,
            "valid: 'best', 'smallest', 'largest_batch', 'largest_sequence'",
        ),
    ],
)
def test_what_cannot_be_searched_is_said(
    devices: str, choices: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        planned(devices, **{"find": "smallest"} | choices)


def test_a_batch_without_a_limit_has_no_largest() -> None:
    with pytest.raises(InputError, match="no capacity is known, so any batch fits; give memory_limit="):
        planned("2xcpu-lane", find="largest_batch")
