"""Tensors of the model that have the name of an input, of a value, or a number for a name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.models.three_layers import WIDTH, Model

ROWS = 24
"""Microbatches have as many rows as tensors have, so that one in the place of another fits."""


def tied() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return Model(lambda m, x: torch.tanh(m.layer(torch.tanh(x @ m.x))), x=layer.weight, layer=lambda: layer)


def centred(model: Any, x: Tensor) -> Tensor:
    y = model.b(torch.tanh(model.a(x)))
    return (y - y.mean(0)) @ model.x + (x - x.mean(0)) @ model.x


def chained(model: Any, x: Tensor) -> Tensor:
    for weight in model.weights:
        x = torch.tanh(x @ weight)
    return x


def square(kind: Any = nn.Parameter) -> Tensor:
    return kind(torch.randn(WIDTH, WIDTH))


CASES: dict[str, Callable[[], nn.Module]] = {
    "an input": lambda: Model(lambda m, x: torch.tanh(torch.tanh(x @ m.x) @ m.other), x=square, other=square),
    "an input, tied": tied,
    "an input, a buffer": lambda: Model(lambda m, x: m.b(torch.tanh(m.a(x @ m.x))), x=square(nn.Buffer)),
    "an input, on the whole batch": lambda: Model(centred, x=square),
    "a value": lambda: Model(
        lambda m, x: torch.tanh(torch.tanh(x @ m.matmul) @ m.tanh) @ m.matmul, matmul=square, tanh=square
    ),
    "numbers": lambda: Model(chained, weights=lambda: nn.ParameterList(square() for _ in range(4))),
}


@pytest.mark.filterwarnings("ignore:.*of the work runs on the whole batch")
@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("case", CASES)
def test_names(case: str, recompute: str) -> None:
    torch.manual_seed(0)
    plain = CASES[case]()
    model = copy.deepcopy(plain)
    pipe = autosplit(model, ["cpu"] * 2, chunks=4, recompute=recompute)
    x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    for _ in range(2):
        plain.zero_grad()
        pipe.zero_grad()
        expected = F.mse_loss(plain(x), target)
        expected.backward()
        torch.testing.assert_close(pipe.train_step(x, target=target, loss_fn=F.mse_loss), expected.detach())
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
    torch.testing.assert_close(pipe(x), plain(x))
