"""Bytes of parameters, gradients and optimizer state, and what torch's own optimizers allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosplit.devices import Allocations
from autosplit.errors import InputError
from autosplit.memory.events import Step
from autosplit.memory.state import Implementation, Optimizer, Precision, optimizer_steps, parameter_bytes
from tests.memory.extents import Extent, extent

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
def test_bytes_per_element(optimizer: str | float, precision: Precision | None, per_element: int) -> None:
    """`precision=None` keeps the model's own two bytes; the last column is the table of the literature."""
    own = parameter_bytes(1000, element_bytes=2, optimizer=Optimizer(optimizer), precision=precision)
    assert own.parameter_bytes + own.gradient_bytes + own.optimizer_bytes == 1000 * per_element


def test_what_the_optimizer_updates_is_the_master_weight_where_there_is_one() -> None:
    adam = Optimizer("adam")
    mixed = parameter_bytes(10, element_bytes=4, optimizer=adam, precision="bf16_fp32_master")
    assert (mixed.updated_bytes, mixed.master_bytes, mixed.moments, mixed.counter_bytes) == (40, 40, (40, 40), 4)
    assert parameter_bytes(10, element_bytes=4, optimizer=adam, precision="bf16").updated_bytes == 20


def test_the_order_of_adam_one_parameter_at_a_time() -> None:
    adam = Optimizer("adam", "forloop")
    parameters = [parameter_bytes(count, element_bytes=1, optimizer=adam) for count in (5, 7)]
    changes = ((0, 5), (1, 5), (0, -5), (2, 7), (3, 7), (2, -7), (1, -5), (3, -7))
    assert optimizer_steps(parameters, optimizer=adam, first=False) == (Step("optimizer", changes),)


def real(name: str, how: Implementation, *, first: bool) -> Allocations:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
    make, given = kinds[name]
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in ELEMENTS]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters, foreach=how == "foreach", **given)
    if not first:
        optimizer.step()
    with Allocations() as found:
        optimizer.step()
    return found


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["forloop", "foreach"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_what_torch_allocates_in_a_step(name: str, how: Implementation, *, first: bool) -> None:
    optimizer = Optimizer(name, how)
    parameters = [parameter_bytes(count, element_bytes=4, optimizer=optimizer) for count in ELEMENTS]
    predicted = extent(optimizer_steps(parameters, optimizer=optimizer, first=first, on_cpu=True))
    found = real(name, how, first=first)
    assert predicted.left_bytes == found.left_bytes
    assert abs(predicted.peak_bytes - found.peak_bytes) <= SLACK_BYTES


def test_only_state_is_known_of_an_optimizer_given_in_bytes() -> None:
    own = Optimizer(12.5)
    parameters = [parameter_bytes(count, element_bytes=4, optimizer=own) for count in (10, 4)]
    assert extent(optimizer_steps(parameters, optimizer=own, first=True)) == Extent(175, 175)
    assert optimizer_steps([], optimizer=Optimizer("adam"), first=True) == (Step("optimizer", ()),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer("lion"), "there is no optimizer 'lion'; choose one of 'none', 'sgd', 'momentum', 'adam'"),
        (lambda: Optimizer(-1), "there is no optimizer -1; choose one of"),
        (lambda: Optimizer("sgd", "loop"), "there is no implementation 'loop'; choose one of 'forloop', 'foreach'"),  # type: ignore[arg-type]
        (
            lambda: parameter_bytes(1, element_bytes=4, optimizer=Optimizer("sgd"), precision="fp8"),  # type: ignore[arg-type]
            r"there is no precision 'fp8'; choose None \(as the model is\) or one of 'fp32', 'amp_bf16'",
        ),
    ],
)
def test_unknown_names(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
