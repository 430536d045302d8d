"""Together: every operation runs where its parameters are; the meta device stands for another one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosplit.trace.compared_runs import Together


class Apart(nn.Module):
    """Two layers on two devices, and operations without parameters between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, device="meta")
        self.register_buffer("scale", torch.ones(6, device="meta"))

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        first = torch.relu(self.a(value))
        second = self.b(first)
        written = torch.zeros(6, device="meta")
        written[:] = first[0]
        written.add_(first[1])
        return first, second, first + second, self.scale * first, torch.cat([first, second]), written


def test_operands_are_brought_to_the_parameters() -> None:
    model = Apart()
    with Together(model):
        outputs = model(torch.randn(3, 6))
    assert [output.device.type for output in outputs] == ["cpu", *["meta"] * 5]
    assert all(output.requires_grad for output in outputs)
