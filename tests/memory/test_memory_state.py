"""Bytes of parameters, gradients and optimizer state, and what torch's own optimizers allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosplit.devices import Allocations
from autosplit.optimizers import MasterWeights
from autosplit.options import Options
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.profile.types import StateProfile
from autosplit.schedule.memory.pieces import NodeStep
from autosplit.schedule.memory.replay import optimizer_changes
from tests.memory.extents import extent

ELEMENTS = (30_000, 100_000, 70_000, 50_000)
SLACK_BYTES = 100
"""torch wraps Python scalars in tensors of 4 or 8 bytes on the CPU."""


@pytest.mark.parametrize(
    ("optimizer", "precision", "per_element"),
    [
        ("none", "fp32", 8),
        ("sgd", "fp32", 8),
        ("momentum", "fp32", 12),
        ("adam", "fp32", 16),
        ("adamw", "amp_bf16", 16),
        ("adam", "amp_fp16", 16),
        ("adam", "bf16", 8),
        ("adam", None, 8),
        ("adamw", "bf16_fp32_master", 16),
        ("momentum", "bf16_fp32_master", 12),
        (6, "bf16", 10),
        (6, "bf16_fp32_master", 14),
        (0, "fp32", 8),
    ],
)
def test_bytes_per_element(optimizer: str | int, precision: str | None, per_element: int) -> None:
    """`precision=None` keeps the model's own two bytes; the last column is the table of the literature."""
    options = Options((torch.device("cpu"),), 1, optimizer=optimizer, precision=precision)
    size = 2 if precision in (None, "bf16", "bf16_fp32_master") else 4
    own = state_bytes(StateProfile("weight", 1000, 1000 * size, True, True, ()), options)
    assert own.total == 1000 * per_element


def test_what_the_optimizer_updates_is_the_master_weight_where_there_is_one() -> None:
    mixed = Options((torch.device("cpu"),), 1, precision="bf16_fp32_master")
    assert mixed.updated_bytes(elements=10, parameter_bytes=20) == 40
    assert Options((torch.device("cpu"),), 1, precision="bf16").updated_bytes(elements=10, parameter_bytes=20) == 20


def test_the_order_of_adam_one_parameter_at_a_time() -> None:
    changes = ((0, 5), (1, 5), (0, -5), (2, 7), (3, 7), (2, -7), (1, -5), (3, -7))
    assert optimizer_changes([5, 7], name="adam", foreach=False) == changes


def real(name: str, *, foreach: bool, masters: bool = False) -> Allocations:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
    make, given = kinds[name]
    dtype = torch.bfloat16 if masters else torch.float32
    parameters = [torch.nn.Parameter(torch.ones(count, dtype=dtype)) for count in ELEMENTS]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    how: dict[str, Any] = {"foreach": foreach, **given}
    optimizer = MasterWeights(make, parameters, **how) if masters else make(parameters, **how)
    optimizer.step()
    with Allocations() as found:
        optimizer.step()
    return found


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_what_torch_allocates_in_a_step(name: str, *, foreach: bool) -> None:
    updated = [4 * count for count in ELEMENTS]
    predicted = extent([NodeStep("", optimizer_changes(updated, name=name, foreach=foreach))])
    found = real(name, foreach=foreach)
    assert predicted.left_bytes == found.left_bytes
    assert abs(predicted.peak_bytes - found.peak_bytes) <= SLACK_BYTES


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_what_a_step_of_masters_allocates(name: str, monkeypatch: pytest.MonkeyPatch, *, foreach: bool) -> None:
    monkeypatch.setattr("autosplit.optimizers.BATCH_ELEMENTS", 130_000)
    updated = [4 * count for count in ELEMENTS]
    changes = optimizer_changes(updated, name=name, foreach=foreach, masters_bytes=4 * 130_000)
    predicted, found = extent([NodeStep("", changes)]), real(name, foreach=foreach, masters=True)
    assert predicted.left_bytes == found.left_bytes == 0
    assert abs(predicted.peak_bytes - found.peak_bytes) <= SLACK_BYTES


def test_the_bytes_of_masters_are_what_a_plan_counts() -> None:
    options = Options((torch.device("cpu"),), 1, optimizer="adamw", precision="bf16_fp32_master")
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = MasterWeights(torch.optim.AdamW, [parameter])
    optimizer.step()
    state = sum(value.nbytes for name, value in optimizer.state[parameter].items() if name != "step")
    assert state == options.optimizer_bytes(elements=1000, parameter_bytes=2000) == 12 * 1000


def test_only_state_is_known_of_an_optimizer_given_in_bytes() -> None:
    assert optimizer_changes([10, 4], name=12, foreach=True) == ()
