"""Small models with what crosses lanes in one way or another, and the plain model's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH, ROWS = 3, 5
PLACES = {
    "one card": (["cuda:0"] * 3, "cuda:0"),
    "two cards": (["cuda:0", "cuda:1"], "cuda:0"),
    "back and forth": (["cuda:1", "cuda:0", "cuda:1", "cuda:0"], "cuda:0"),
    "from the CPU": (["cuda:0", "cuda:1"], "cpu"),
    "CPU and cards": (["cpu", "cuda:0", "cpu", "cuda:1"], "cpu"),
    "ends on the CPU": (["cuda:0", "cuda:1", "cpu"], "cpu"),
}
"""The devices of the lanes, and the caller's."""


class Chain(nn.Module):
    """Layers that change each other's outputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.relu_(layer(value) + 0.5)
        return value


class Skips(nn.Module):
    """A value that every later stage uses, a mask without gradients beside it, and one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        first = torch.tanh(self.first(value))
        mask = first > 0
        second = torch.tanh(self.second(first)) * mask
        third = torch.tanh(self.third(second)) + first
        return self.last(torch.where(mask, third, second) + first)


class Positions(nn.Module):
    """Shared values that two stages use, and a mean over the batch at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        position = self.scale.tanh() * 2
        value = torch.tanh(self.first(value + position))
        value = torch.tanh(self.second(value * position))
        return value - value.mean(0)


class Frozen(nn.Module):
    """A stage without gradients in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle.requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = torch.tanh(self.first(value))
        return self.last(torch.tanh(self.middle(value)) * teacher)


MODELS = [Chain, Skips, Positions, Frozen]


def loss(outputs: Sequence[Tensor]) -> Tensor:
    total = outputs[0].pow(2).mean()
    for output in outputs[1:]:
        total = total + output.pow(3).sum().to(total.device)
    return total


def plain(model: nn.Module, value: Tensor) -> list[Tensor]:
    """Return outputs and gradients of the plain model, and leave it without gradients."""
    outputs = model(value)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    loss(outputs).backward()
    found = [*(output.detach() for output in outputs), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close([a.cpu() for a in actual], [e.cpu() for e in expected], rtol=1e-10, atol=1e-12)
