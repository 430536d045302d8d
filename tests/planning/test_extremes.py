"""The fewest devices that hold a model, and the largest batch that some hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosplit
from autosplit.errors import DeviceError, InputError
from autosplit.planning.explain.changes import least
from autosplit.planning.timeline import predicted
from examples.models import ResNet

WIDTH, DEPTH = 32, 6


def net() -> nn.Sequential:
    """Layers that are all alike: 4.1 KiB of parameters each, so 16.5 KiB of state, and 128 bytes per row between."""
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def planned(devices: str, *, rows: int = 16, **choices: Any) -> autosplit.Plan:
    """Plan without recompute where nothing else is said: it is the quickest to search."""
    return autosplit.plan(net(), devices, 2, sample=torch.zeros(rows, WIDTH), **{"recompute": "never"} | choices)


@given(st.integers(-20, 60), st.integers(0, 40), st.integers(0, 40), st.integers(-30, 80))
def test_least_finds_the_edge_wherever_it_starts(edge: int, low: int, more: int, guess: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= edge

    found = least(holds, guess=guess, low=low, high=low + more)
    expected = max(edge, low)
    assert found == (expected if expected <= low + more else None)
    assert len(asked) == len(set(asked)), "nothing is asked twice"
    assert all(low <= number <= low + more for number in asked)


@pytest.mark.parametrize("off", [0, 1])
def test_a_good_guess_needs_few_questions(off: int) -> None:
    asked: list[int] = []
    least(lambda number: asked.append(number) is None and number >= 500, guess=500 + off, low=1, high=10**6)
    assert len(asked) <= 4


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


def test_where_no_number_of_devices_will_do_the_most_that_can_be_used_are_planned() -> None:
    found = planned("2xH100-SXM5-80GB", memory_limit="4KiB", find="smallest")
    assert found.verdict == "no"
    assert found.reasons[0].startswith("no number of H100-SXM5-80GB holds the model: with ")


def test_one_device_is_the_fewest() -> None:
    found = planned("4xH100-SXM5-80GB", find="smallest")
    assert len(found.devices) == 1
    assert found.reasons[0] == "1xH100-SXM5-80GB is the least that holds the model"


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
        ("2xH100-SXM5-80GB", {"find": "fewest"}, InputError, "valid: 'best', 'smallest', 'largest_batch'"),
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


def test_without_a_known_capacity_no_number_of_devices_surely_holds() -> None:
    found = planned("2xcpu-lane", find="smallest")
    assert found.verdict == "borderline"
    assert found.reasons[0].endswith("no capacity is known")
