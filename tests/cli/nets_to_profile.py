"""More models that the tests of the command line name as ``nets_to_profile.py:factory``."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Routed(nn.Module):
    """Experts that rows are routed to by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


def make_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Mlp()


def make_mlp() -> nn.Module:
    print("a factory that talks")
    return Mlp()
