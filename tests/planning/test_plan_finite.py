"""Plans of models that ask whether values are finite, as transformers' DETR does in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosplit import TraceError, plan

Ask = Callable[[torch.Tensor], bool]


class Layer(nn.Module):
    """Clamps in training what its test says."""

    def __init__(self, asks: Ask) -> None:
        super().__init__()
        self.asks = asks
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + self.down(torch.relu(self.up(value)))
        if self.training and self.asks(result):
            result = torch.clamp(result, -1e4, 1e4)
        return result


def layers(asks: Ask) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[Layer(asks) for _ in range(4)])


@pytest.mark.parametrize(
    "asks",
    [
        lambda value: not torch.isfinite(value).all(),
        lambda value: bool(torch.isnan(value).any()),
        lambda value: value.isinf().any().item(),
    ],
)
def test_values_that_nobody_has_are_finite(asks: Ask) -> None:
    found = plan(layers(asks), "2xL4-24GB", sample=torch.empty(8, 16, device="meta"), chunks=4)
    names = {name for stage in found.stages for name in stage.nodes}
    assert {"0.up#0", "3.down#0"} <= names, "no layer stays whole"
    assert not any("clamp" in name for name in names)
    (note,) = [note for note in found.notes if "finite" in note]
    assert note.startswith("the forward reads values 4 times (first: 0#0/")
    quiet = plan(layers(asks).eval(), "2xL4-24GB", sample=torch.empty(8, 16, device="meta"), chunks=4)
    assert not any("finite" in note for note in quiet.notes)


@pytest.mark.parametrize(
    "asks",
    [
        lambda value: bool((value > 1).any()),
        lambda value: bool(torch.isnan(value).all()),
        lambda value: bool(torch.isnan(value).sum()),
        lambda value: bool(torch.isfinite(value).all(1)[0]),
    ],
)
def test_other_values_are_not_made_up(asks: Ask) -> None:
    with pytest.raises(TraceError, match=r"test_plan_finite.py:\d+\) reads a tensor's value, and a model on the meta"):
        plan(layers(asks), "2xL4-24GB", sample=torch.empty(8, 16, device="meta"), chunks=4)
