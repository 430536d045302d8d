"""Costs at several sizes with one memo are those of each size alone, with torch working everything out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.blocks import CostMemo, block_costs
from autosplit.profile.fake import fake_costs
from autosplit.profile.ledger import Ledger
from autosplit.trace.ladder import trace


class Net(nn.Module):
    """Repeated blocks with norms around ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(6))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Plain(Ledger):
    """Has torch work everything out."""

    def __init__(self, **choices: Any) -> None:
        super().__init__(**(choices | {"quick": None}))


def test_costs_of_several_sizes_with_one_memo_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(Net(), Sample(torch.zeros(4, 3, 8, 8))).graph
    memo = CostMemo()
    quick = [block_costs(graph, rows=rows, batch_rows=16, kernels="cuda", memo=memo) for rows in (1, 2, 4, 2)]
    assert quick[1] is quick[3]
    monkeypatch.setattr("autosplit.profile.fake.Ledger", Plain)
    for rows, found in zip((1, 2, 4), quick, strict=False):
        slow = fake_costs(graph, rows=rows, batch_rows=16, kernels="cuda").nodes
        assert found.nodes.keys() == slow.keys()
        for name, own in found.nodes.items():
            assert (own.forward_operations, own.backward_operations) == (
                slow[name].forward_operations,
                slow[name].backward_operations,
            )
            assert (own.output_bytes, own.forward_transient_bytes, own.backward_transient_bytes) == (
                slow[name].output_bytes,
                slow[name].forward_transient_bytes,
                slow[name].backward_transient_bytes,
            )
            assert sorted(own.saved.values()) == sorted(slow[name].saved.values())
