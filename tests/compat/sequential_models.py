"""Sequential models of the kinds that torchgpipe was used for, and runs of them beside the plain model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from autosplit.compat import Namespace, pop, skippable, stash
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, wider, 3, padding=1)

    def forward(self, x: Tensor):
        yield stash("skip", x)
        return self.conv(x).relu()


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, wider: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(wider, width, 3, padding=1)

    def forward(self, x: Tensor):
        skip = yield pop("skip")
        return self.conv(x) + skip


def unet() -> nn.Sequential:
    """Two pairs of skips with one name, which namespaces tell apart."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down(2, 3).isolate(outer),
        Down(3, 4).isolate(inner),
        nn.Conv1d(4, 4, 1),
        Up(4, 3).isolate(inner),
        Up(3, 2).isolate(outer),
    ).double()


class Twice(nn.Module):
    """Gives a pair, of which the second half is made of the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.tanh()


class Both(nn.Module):
    """Takes the pair as one argument."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        return first * second, first + second


def pairs() -> nn.Sequential:
    return nn.Sequential(Twice(), Both(), Both()).double()


def assert_like_plain(wrapped: nn.Module, model: nn.Module, *inputs) -> None:
    """Assert outputs, gradients and buffers of a wrapper that was made of a copy of ``model``; names may differ."""
    batch = Batch(inputs)
    plain, own = forward_backward(copy.deepcopy(model), batch), forward_backward(wrapped, batch)
    names = dict(zip(dict(wrapped.named_parameters()), dict(model.named_parameters()), strict=True))
    names |= dict(zip(dict(wrapped.named_buffers()), dict(model.named_buffers()), strict=True))
    for table in (own.gradients, own.buffers):
        for name in list(table):
            table[names.get(name, name)] = table.pop(name)
    assert_equal_runs(own, plain)


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, dtype=torch.float64, requires_grad=True)
