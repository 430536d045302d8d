"""Operators that return their operand itself: where the plain model returns an input, so does the pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.pairwise import in_turn

DROP, IDENTITY = nn.Dropout(0.5).eval(), nn.Identity()
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda x: x,
    "nn.Dropout": DROP,
    "nn.Identity": IDENTITY,
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout_": lambda x: F.dropout(x, 0.5, training=False, inplace=True),
    "contiguous": lambda x: x.contiguous(),
    "double": lambda x: x.double(),
    "to a dtype": lambda x: x.to(torch.float64),
    "to a tensor's": lambda x: x.to(x),
    "cpu": lambda x: x.cpu(),
    "type_as": lambda x: x.type_as(x),
    "conj": torch.conj,
    "real": torch.real,
    "positive": lambda x: +x,
    "atleast_2d": torch.atleast_2d,
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "two": lambda x: F.dropout(x.contiguous(), 0.5, training=False),
}


class Returns(nn.Module):
    """Returns an operator's result, alone or beside what it is used for."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor], *, beside: bool) -> None:
        super().__init__()
        self.operator, self.beside = operator, beside
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        kept = self.operator(x)
        if not self.beside:
            return kept
        return {"logits": self.second(self.first(kept).relu()) + x, "kept": [kept]}


def batch(rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64).requires_grad_()


def kept_of(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output["kept"][0] if isinstance(output, dict) else output
    return tensor


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_the_output_is_the_input(operator: Callable[[torch.Tensor], torch.Tensor], beside: bool) -> None:
    model = Returns(operator, beside=beside).double().eval()
    pipe = autosplit(model, devices=1 + beside, chunks=3)
    for rows, grad in ((7, True), (7, False), (5, False), (9, True)):
        x = batch(rows)
        with torch.set_grad_enabled(grad):
            assert kept_of(model(x)) is x
            output = pipe(x)
        assert kept_of(output) is x
        assert x.requires_grad
        assert not beside or torch.allclose(output["logits"], model(x)["logits"], rtol=0, atol=1e-12)


@in_turn(recompute=("never", "always", "block"), lanes=("inline", "threads"))
def test_gradients_and_hooks_are_those_of_the_plain_model(lanes: str, recompute: str) -> None:
    model = Returns(DROP, beside=True).double().eval()
    pipe = autosplit(model, devices=2, chunks=3, lanes=lanes, recompute=recompute)
    value, found = batch(), []
    for run in (model, pipe, pipe):
        x, seen = value.detach().clone().requires_grad_(), []
        model.zero_grad()
        output = run(x)
        kept_of(output).register_hook(seen.append)
        (output["logits"].sin().sum() + kept_of(output).cos().sum()).backward()
        assert len(seen) == 1
        found.append([x.grad, *seen, *(parameter.grad for parameter in model.parameters())])
    for other in found[1:]:
        for one, gradient in zip(found[0], other, strict=True):
            torch.testing.assert_close(gradient, one, rtol=0, atol=1e-12)


def test_other_inputs_are_copied_as_in_the_plain_model() -> None:
    """What is no operand there is none in a recording that was made of inputs for which it is."""
    for name, other in (
        ("contiguous", torch.randn(6, 7, dtype=torch.float64).t()),
        ("to a dtype", torch.randn(7, 6)),
        ("double", torch.randn(7, 6)),
    ):
        model = Returns(OPERATORS[name], beside=False).eval()
        pipe = autosplit(model, devices=1, chunks=3)
        for x in (batch(), other, batch(), other):
            plain, piped = model(x), pipe(x)
            assert (piped is x) == (plain is x) == x.requires_grad
            assert piped.dtype == plain.dtype
            assert piped.is_contiguous() == plain.is_contiguous()
            assert torch.equal(piped, plain)


def test_dropout_draws_in_training() -> None:
    model = Returns(nn.Dropout(0.5), beside=False).double()
    pipe, x = autosplit(model, devices=1, chunks=3), batch()
    assert not torch.equal(pipe(x), x)
    model.eval()
    assert pipe(x) is x
    model.train()
    assert pipe(x) is not x


class OwnTensors(nn.Module):
    """Returns a parameter and a buffer, and keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(6))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.drop(x)
        return self.lin(x) * self.scale, self.drop(self.lin.weight), self.scale.double(), self.drop(x)


def test_parameters_buffers_and_kept_inputs_are_themselves() -> None:
    model = OwnTensors().double().eval()
    pipe = autosplit(model, devices=2, chunks=3)
    for grad in (True, False, False):
        x = batch()
        with torch.set_grad_enabled(grad):
            _, weight, scale, kept = pipe(x)
        assert weight is model.lin.weight
        assert weight.requires_grad
        assert scale is model.scale
        assert kept is x
        assert model.last is x


class Rounds(nn.Module):
    """Gives back its operand unless some row is large, as a graph cannot tell."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in (x.detach().sum(-1) > 10).nonzero().flatten().tolist():
            x = x.index_add(0, torch.tensor([row]), self.lin(x[row : row + 1]))
        return x


def test_an_opaque_module_may_return_another_tensor_later() -> None:
    model = Returns(Rounds(), beside=True).double().eval()
    pipe = autosplit(model, devices=2, chunks=3)
    for factor in (0.1, 10, 10, 0.1):
        x = batch() * factor
        torch.testing.assert_close(kept_of(pipe(x)), kept_of(model(x)), rtol=0, atol=1e-12)
