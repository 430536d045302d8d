"""Costs at several sizes with one memo are those of each size alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.blocks import CostMemo, block_costs
from autosplit.profile.node_costs.fake import fake_costs
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


def test_costs_of_several_sizes_with_one_memo_are_those_of_each_alone() -> None:
    graph = trace(Net(), Sample(torch.zeros(4, 3, 8, 8))).graph
    memo = CostMemo()
    own = [block_costs(graph, rows=rows, batch_rows=16, kernels="cuda", memo=memo) for rows in (1, 2, 4, 2)]
    assert own[1] is own[3]
    for rows, found in zip((1, 2, 4), own, strict=False):
        slow = fake_costs(graph, rows=rows, batch_rows=16, kernels="cuda").nodes
        assert found.nodes.keys() == slow.keys()
        for name, node in found.nodes.items():
            assert (node.forward_operations, node.backward_operations) == (
                slow[name].forward_operations,
                slow[name].backward_operations,
            )
            assert (node.output_bytes, node.forward_transient_bytes, node.backward_transient_bytes) == (
                slow[name].output_bytes,
                slow[name].forward_transient_bytes,
                slow[name].backward_transient_bytes,
            )
            assert sorted(node.saved.values()) == sorted(slow[name].saved.values())
