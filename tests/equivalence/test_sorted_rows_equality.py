"""Tokens sorted by expert and back, as mixtures of experts do it: row by row where they come back, whole where not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit, plan
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward

WIDTH, EXPERTS, CHOICES = 16, 4, 2


class Grouped(nn.Module):
    """Experts in one product of groups: tokens sorted by expert and put back; ``kind`` says how, or what is off."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        flat = torch.tanh(self.first(value)).reshape(-1, WIDTH)
        shares, chosen = self.gate(flat).softmax(-1).topk(CHOICES, -1)
        return self.last(self.experts(flat, chosen.reshape(-1), shares.reshape(-1)).reshape(value.shape))

    def experts(self, flat: Tensor, keys: Tensor, shares: Tensor) -> Tensor:
        ordered, order = torch.sort(keys)
        picked = flat[order // CHOICES]
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        if self.kind == "capacity":
            held = counts[:-1].clamp(max=5)
            counts = torch.cat([held, (len(order) - held.sum())[None]])
        bounds = torch.cumsum(counts, 0, dtype=torch.int32)
        made = F.grouped_mm(picked, self.weight.transpose(-2, -1), offs=bounds)
        if self.kind == "position":
            made = made * torch.arange(1, len(order) + 1)[:, None] / 10
        if self.kind == "neighbour":
            made = made + made.roll(1, 0)
        if self.kind == "load":
            made = made / counts.sum()
        if self.kind == "gated halves":
            made = torch.cat([made[..., ::2] * made[..., 1::2].sigmoid(), made[:, WIDTH // 2 :]], -1)
        if self.kind == "moved on":
            made = torch.cat([made[1:], made[:1]])
        made = made * shares[order][:, None]
        return self.back(made, order, keys, flat)

    def back(self, made: Tensor, order: Tensor, keys: Tensor, flat: Tensor) -> Tensor:
        if self.kind == "index_add":
            return torch.zeros_like(flat).index_add_(0, order // CHOICES, made)
        if self.kind == "argsort":
            made = made[torch.argsort(order)]
        elif self.kind == "assigned":
            result = torch.zeros_like(made)
            result[order] = made
            made = result
        elif self.kind == "another way back":
            made = made[keys.argsort()]
        elif self.kind != "no way back":
            way = torch.empty_like(order)
            way[order] = torch.arange(order.size(0))
            made = made[way]
        return made.reshape(-1, CHOICES, WIDTH).sum(1)


def shares(kind: str) -> dict[str, float]:
    """Compare forward and backward with the plain model at two batch sizes; return the shares of FLOPs by class."""
    plain = Grouped(kind)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3)
    for rows in (7, 10):
        value = torch.randn(rows, 5, WIDTH, generator=torch.Generator().manual_seed(rows))
        runs: list[Any] = [forward_backward(module, Batch((value,))) for module in (pipe, plain)]
        assert_equal_runs(*runs, dtype=torch.float32)
    assert pipe.plan is not None
    return pipe.plan.class_flops


@pytest.mark.parametrize("kind", ["assigned way", "argsort", "index_add", "gated halves"])
def test_tokens_that_are_sorted_by_expert_and_put_back_stay_rows(kind: str) -> None:
    assert shares(kind).get("full", 0.0) == 0.0


@pytest.mark.parametrize(
    "kind", ["assigned", "capacity", "position", "neighbour", "moved on", "load", "no way back", "another way back"]
)
def test_what_hangs_on_other_tokens_on_the_way_is_computed_on_the_whole_batch(kind: str) -> None:
    assert shares(kind)["full"] > 0.3


def test_sliced_rows_are_followed_where_there_are_no_values() -> None:
    with torch.device("meta"):
        model, value = Grouped("gated halves"), torch.empty(8, 5, WIDTH)
    asked = {"chunks": 2, "schedule": "1f1b", "precision": "bf16", "loss_fn": lambda output: output.sum()}
    found = plan(model, "2xL4-24GB", sample=value, **asked)
    assert found.class_flops.get("full", 0.0) == 0.0
