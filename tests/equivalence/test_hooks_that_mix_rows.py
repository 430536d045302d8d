"""Hooks on inner modules that mix rows run on the whole batch, whenever they were registered."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit

pytestmark = pytest.mark.filterwarnings("ignore:2 devices were given")


def _centred(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output - output.mean(0)


def _gradient_of_length_one(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (inputs[0] / inputs[0].norm(),)


@pytest.mark.parametrize("late", [False, True], ids=["before the split", "after a call"])
@pytest.mark.parametrize(
    "register",
    [
        lambda model: model[0].register_forward_hook(_centred),
        lambda model: model[2].register_full_backward_hook(_gradient_of_length_one),
    ],
    ids=["forward", "backward"],
)
def test_a_hook_that_mixes_rows_sees_the_whole_batch(register: Callable[[nn.Module], object], late: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(7, 6, dtype=torch.float64)
    pipe = autosplit(model, devices=2, chunks=3)
    if late:
        pipe(inputs)
    register(model)
    register(plain)
    actual, expected = pipe(inputs), plain(inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
