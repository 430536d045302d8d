"""Residual blocks with a hidden layer that is wider: inside of one more crosses than between two."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class WideBlock(nn.Module):
    """Two layers, ``times`` as wide between them; ``norm`` puts a LayerNorm before them."""

    def __init__(self, width: int, *, norm: bool = False, times: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else None
        self.wide, self.narrow = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, value: Tensor) -> Tensor:
        inner = value if self.norm is None else self.norm(value)
        return value + self.narrow(F.gelu(self.wide(inner)))


def wide_blocks(count: int, width: int, *, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(*[WideBlock(width, norm=norm) for _ in range(count)])
