"""Custom autograd functions: what mixes rows in the backward only runs on the whole batch; what does not stays rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, numbers


class Scaled(torch.autograd.Function):
    """Twice the value, with its own backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Centred(Scaled):
    """Takes the mean over the rows off the gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Clipped(Scaled):
    """Clips the gradient by its norm over all rows, which small gradients do not show."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Turned(Scaled):
    """Sends each row's gradient to the next row."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 0)


class Weighted(torch.autograd.Function):
    """A product with a weight; the weight's gradient is a sum over the rows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradient @ weight.T, value.T @ gradient


class Averaged(Weighted):
    """The same with a mean over the rows in the place of the sum."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradient @ weight.T, value.T @ gradient / len(value)


def twice(function: Any) -> nn.Module:
    return Model(lambda m, x: m.b(torch.tanh(m.a(function.apply(torch.tanh(m.c(x)))))))


def with_weight(function: Any) -> nn.Module:
    return Model(lambda m, x: m.b(torch.tanh(m.a(function.apply(torch.tanh(m.c(x)), m.b.weight)))))


def share(plain: nn.Module) -> float:
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for rows in (7, 9):
        runs: list[Any] = [forward_backward(module, Batch((numbers(rows, WIDTH),))) for module in (pipe, plain)]
        assert_equal_runs(*runs)
    assert pipe.plan is not None
    return pipe.plan.class_flops["full"]


@pytest.mark.parametrize("function", [Centred, Clipped, Turned])
def test_rows_mixed_in_the_backward_only(function: Any) -> None:
    assert share(twice(function)) > 0.0


def test_a_weights_gradient_that_is_no_sum_over_rows() -> None:
    assert share(with_weight(Averaged)) > 0.0


@pytest.mark.parametrize("plain", [twice(Scaled), with_weight(Weighted)], ids=["scaled", "weighted"])
def test_an_ordinary_function_stays_row_by_row(plain: nn.Module) -> None:
    assert share(plain) == 0.0
