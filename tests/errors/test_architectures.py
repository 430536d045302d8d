"""A GPU for which torch has no kernels is refused before anything is done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.errors import DeviceError
from autosplit.options import resolve_devices

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return monkeypatch


def build(card: pytest.MonkeyPatch, built: list[str], capability: tuple[int, int]) -> None:
    card.setattr(torch.cuda, "get_arch_list", lambda: built)
    card.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (WHEEL, (8, 0), True),
        (WHEEL, (8, 9), True),  # by the kernels of 8.0 or 8.6
        (WHEEL, (7, 0), False),
        (WHEEL, (3, 7), False),
        (WHEEL, (12, 1), True),
        (WHEEL, (13, 0), True),  # compiled from PTX
        (WHEEL[:-1], (13, 0), False),
        (["sm_86"], (8, 0), False),  # built for a later one of its family
        (["sm_90a"], (9, 0), True),
        (["sm_90a", "compute_90a"], (10, 0), False),
        (["sm_100f"], (10, 3), True),
        (["compute_100f"], (12, 0), False),
        (["compute_70"], (9, 0), True),
        (["gfx90a", "gfx942"], (9, 4), True),  # another vendor's: torch itself knows
        ([], (3, 7), True),
    ],
)
def test_what_runs(card: pytest.MonkeyPatch, built: list[str], capability: tuple[int, int], runs: bool) -> None:
    build(card, built, capability)
    if runs:
        assert resolve_devices(["cpu", "cuda:1"]) == (torch.device("cpu"), torch.device("cuda:1"))
        assert resolve_devices(2) == (torch.device("cuda:0"), torch.device("cuda:1"))
    for devices in [["cuda:0"], 2] if not runs else []:
        with pytest.raises(DeviceError, match="no kernels for it"):
            resolve_devices(devices)


def test_what_is_said(card: pytest.MonkeyPatch) -> None:
    build(card, WHEEL, (3, 7))
    model = nn.Linear(2, 2)
    with pytest.raises(DeviceError) as caught:
        autosplit(model, devices=["cuda:1"], sample=torch.zeros(4, 2))
    for part in ("'cuda:1' (Some GPU)", "3.7", torch.__version__, "sm_75", "compute_120", "sm_37", "['cpu', "):
        assert part in str(caught.value)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
