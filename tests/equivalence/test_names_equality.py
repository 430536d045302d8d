"""Tensors of the model that have the name of an input, of a value, or a number for a name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit

WIDTH, ROWS = 6, 24
"""Microbatches have as many rows as tensors have, so that one in the place of another fits."""


def square() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


class AsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.other = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.x) @ self.other)


class TiedAsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.layer = square(), nn.Linear(WIDTH, WIDTH)
        self.layer.weight = self.x

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(x @ self.x)))


class BufferAsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.randn(WIDTH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x @ self.x)))


class OnTheWholeBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.first, self.second = square(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return (y - y.mean(0)) @ self.x + (x - x.mean(0)) @ self.x


class AsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matmul, self.tanh = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.matmul) @ self.tanh) @ self.matmul


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([square() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.filterwarnings("ignore:.*of the work runs on the whole batch")
@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("make", [AsInput, TiedAsInput, BufferAsInput, OnTheWholeBatch, AsValue, Numbers])
def test_names(make: Any, recompute: str) -> None:
    torch.manual_seed(0)
    plain = make().double()
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
