"""Autocast keeps the casts of leaves until its context ends: what goes from stage to stage is not among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.profile.node_costs.ledger import Ledger
from tests.equivalence.equality import LANES


class Single(nn.Module):
    """Gives fp32, which the next layer casts."""

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value.float())


@pytest.mark.parametrize("lanes", LANES)
def test_values_between_stages_do_not_outlive_their_backward(lanes: str) -> None:
    left = []
    for rows in (8, 64):
        model = nn.Sequential(nn.Linear(16, 16), Single(), nn.Linear(16, 16), Single(), nn.Linear(16, 4))
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes, schedule="1f1b")
        batch, target = torch.randn(rows, 16), torch.randn(rows, 4)
        pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
        with Ledger() as ledger, torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
            before = ledger.live_bytes
            pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
            left.append(ledger.live_bytes - before)
    assert left[0] == left[1]
