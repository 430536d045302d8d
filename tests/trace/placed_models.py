"""Models that are recorded wherever they and their batch lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Plain(nn.Module):
    """Layers, a norm and a roll within rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.norm(hidden + self.second(hidden)).roll(1, 1)


class Positions(nn.Module):
    """Makes tensors where its input lies, and picks from rows by their own values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        picked = hidden.gather(1, hidden.argsort(1)[:, :3]).sum(1, keepdim=True)
        return self.second(hidden + picked + torch.arange(x.shape[1], device=x.device))


class Mixed(nn.Module):
    """Moves rows and brings them back, numbers them, and mixes them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)[torch.arange(x.shape[0], device=x.device)]
        hidden = hidden + hidden.flip(0).flip(0)
        return self.second(hidden), hidden @ hidden.T


class Steps(nn.Module):
    """Takes rows of any number of steps, and numbers these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device)
        return self.second(torch.tanh(self.first(x)) + steps[:, None])


class Reads(nn.Module):
    """Moves its input to its own device, and chooses by a buffer's value and by its input's."""

    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("limit", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.device))
        if float(self.limit) > 1 and not x.isnan().any():
            hidden = torch.tanh(hidden)
        return self.second(hidden)


class Hides(nn.Module):
    """Does something that no recording sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.device))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            hidden.mul_(2.0)
        return self.second(hidden)


MODELS = {"plain": Plain, "positions": Positions, "mixed": Mixed, "reads": Reads}
PLACES = ["card, card", "cpu, card", "card, cpu", "spread, cpu", "spread, card"]
"""Where the model and its batch lie."""
MOVES = ["cpu, first, cpu", "cpu, all, cpu", "cpu, all, card", "card, all, cpu", "card, all, card"]
"""Where a model is recorded, what of it is moved to the card then, and where the next batch lies."""
