"""What a recomputed block does again: as far as its backward needs, as `torch.utils.checkpoint` does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import plan
from autosplit.planning.explain.reasons import without_recompute


class Block(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Dropout(dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.down(torch.relu(self.up(value))))


@pytest.mark.parametrize(("dropout", "least", "most"), [(0.0, 0.5, 0.85), (0.1, 0.85, 1.0)])
def test_the_last_product_is_not_made_again(dropout: float, least: float, most: float) -> None:
    """Its input is kept, and nothing behind it; a dropout behind it keeps its mask, so that it is."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(dropout=dropout) for _ in range(4)))
    sample = torch.zeros(65536, 256, device="meta")
    made = plan(model, "2xA100-SXM4-80GB", sample=sample, chunks=4, schedule="1f1b", recompute="block")
    stage = made.stages[0]
    assert stage.again_s is not None
    assert least < stage.again_s / stage.forward_s < most
    bare = without_recompute(made).stages[0]
    assert bare.backward_s == pytest.approx(stage.backward_s - stage.again_s)
