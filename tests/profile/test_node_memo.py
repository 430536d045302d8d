"""Costs with nodes that are not run again are those of running every node, storage ids and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Sample
from autosplit.profile.fake import fake_costs
from autosplit.profile.node_memo import NodeMemo
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace


class Blocks(nn.Module):
    """Layers that are alike, layers that nearly are, in-place operations, views, and results of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.plain, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.plain.weight.requires_grad_(requires_grad=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.norms[1].eval()
        self.act, self.gentle = nn.ReLU(inplace=True), nn.ReLU()
        self.other.register_forward_hook(lambda *given: given[2] * 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.act(norm(conv(x)))
            kept = x
            x = x + self.gentle(self.plain(x)) + F.relu(self.wide(x), inplace=True) + self.other(x).detach()
            x += kept
            x = x.mul_(2.0).add_(kept).transpose(2, 3).contiguous()
            x = F.dropout(F.dropout(x, 0.1), 0.1)
        first, second = x.chunk(2, 1)
        first, second = first + second, first * second
        high, _ = torch.max(first, 1)
        other = torch.cat([first.mean((2, 3)), second.mean((2, 3)), first.mean((2, 3)), second.mean((2, 3))], 1)
        return self.head(other.view(-1, 8)) + high.sum((1, 2))[:, None] + self.head(other.view(-1, 8))


class Whole(nn.Module):
    """Has nodes that see the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.relu(self.one(x)))
        x = x - x.mean(0)
        with torch.no_grad():
            scale = torch.relu(self.one(x)).sum()
        return self.two(torch.relu(self.one(x))) * scale


class Steps(nn.Module):
    """Goes through positions one by one, as recurrent models do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x, state, found = self.mix(x), x.new_zeros(x.shape[0], 6), []
        for position in range(x.shape[1]):
            state = torch.tanh(state * x[:, position] + x[:, position].cumsum(1))
            found.append(state.view(-1, 2, 3)[:, 1])
        return torch.stack(found, 1)


def costs(traced: TracedGraph, kernels: Any) -> dict[str, Any]:
    return dict(fake_costs(traced, rows=2, batch_rows=8, input_grads=[True], kernels=kernels).nodes)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("model", [Blocks, Whole, Steps])
def test_costs_are_those_of_running_every_node(
    model: type[nn.Module], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = torch.zeros({Blocks: (8, 4, 6, 6), Whole: (8, 6), Steps: (8, 5, 6)}[model])
    traced = trace(model(), Sample(sample)).graph
    hits, again = [], NodeMemo.again

    def counted(self: NodeMemo, operands: Any, name: str) -> Any:
        found = again(self, operands, name)
        hits.extend([] if found is None else [name])
        return found

    monkeypatch.setattr(NodeMemo, "again", counted)
    found = costs(traced, kernels)
    monkeypatch.setattr(NodeMemo, "operands", lambda *_: None)
    assert found == costs(traced, kernels)
    if model is Steps:  # what is no view of a position costs what it costs at the first
        assert {f"#0/{name}_{step}" for name in ("mul", "cumsum", "tanh", "view") for step in (2, 4)} <= set(hits)
    if model is Blocks:
        assert not any(name.startswith("other") for name in hits)  # a layer with a hook
        assert "norms.1#0" not in hits
        assert {"convs.2#0", "norms.2#0", "act#1", "#0/relu_2", "#0/contiguous_1", "#0/mean_2"} <= set(hits)


def test_under_autocast_every_node_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = trace(Whole(), Sample(torch.zeros(8, 6))).graph
    monkeypatch.setattr(NodeMemo, "again", lambda *_: pytest.fail("told"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert costs(traced, "cpu")
