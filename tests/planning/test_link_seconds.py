"""Which link a plan takes the devices to have."""

from __future__ import annotations

import pytest
import torch

from autosplit.options import Options
from autosplit.planning.profiled.specs import link_seconds
from cost_models import registry


def options(*devices: str) -> Options:
    return Options(tuple(map(torch.device, devices)), chunks=2)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200", "cuda:2": "NVIDIA Unheard-of 9000"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[str(device)])


@pytest.mark.usefixtures("cards")
def test_a_link_is_that_of_the_cards_which_the_driver_names() -> None:
    count = 2**30
    assert link_seconds(options("cuda:0", "cuda:1"), count) == registry.link(*("H200-SXM-141GB",) * 2).transfer_s(count)
    assert link_seconds(options("cpu", "cuda:0"), count) == registry.link("cpu-lane", "H200-SXM-141GB").transfer_s(
        count
    )
    assert link_seconds(options("cpu", "cpu"), count) == 0.0


@pytest.mark.usefixtures("cards")
def test_the_slowest_link_of_a_row_counts() -> None:
    count = 2**30
    row = link_seconds(options("cuda:0", "cuda:1", "cuda:2", "cuda:2"), count)
    assert row == link_seconds(options("cuda:1", "cuda:2"), count) > link_seconds(options("cuda:0", "cuda:1"), count)
