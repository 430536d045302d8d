"""What tokens cost: at a price that is given, and at published list prices with their source and day."""

from __future__ import annotations

from datetime import date

import pytest
import torch
from torch import nn

import autosplit
from autosplit import InputError, Plan
from autosplit.checks import check_price
from autosplit.planning.explain.price import price_of
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.report.sections import render
from cost_models import names
from cost_models.prices import list_prices


def planned(**choices: object) -> Plan:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    sample = torch.zeros(4, 8, dtype=torch.int64)
    return autosplit.plan(model, "2xL4-24GB", 2, sample=sample, schedule="1f1b", recompute="never", **choices)


@pytest.fixture(scope="module")
def listed() -> Plan:
    return planned()


def test_the_price_of_a_billion_tokens(listed: Plan) -> None:
    given = planned(price="2.10/h").price
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
