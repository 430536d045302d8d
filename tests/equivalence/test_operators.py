"""Per microbatch a stage runs the operators that the plain model runs on those rows, with the same arguments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from benchmarks.operators import MICROBATCHES, Difference, compared, difference, repeated
from tests.clients.models import llama


class Blocks(nn.Module):
    """Attention with a causal flag, a mask that values decide, positions, and a cache in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.query = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return logits and what each layer attended to."""
        x = self.embed(ids) + torch.arange(ids.shape[1])[:, None].sin()
        bias = None if mask is None or mask.all() else mask[:, None, :].expand(-1, ids.shape[1], -1)
        cache = {}
        for number, (query, norm) in enumerate(zip(self.query, self.norm, strict=True)):
            q, k, v = query(norm(x)).chunk(3, -1)
            cache[f"keys{number}"] = torch.cat([k, v], 1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return self.head(x), cache


def run(model: nn.Module, *args: torch.Tensor) -> Difference:
    """Split a model and compare its operators."""
    sample = Sample(*args)
    batch = repeated(model, sample)
    pipe = autosplit(model, devices=2, chunks=MICROBATCHES, sample=batch, lanes="inline")
    pipe(*batch.args)
    assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == MICROBATCHES
    return compared(model, pipe, sample, batch)


@pytest.mark.parametrize("padded", [None, False, True])
def test_attention(padded: bool | None) -> None:
    ids, mask = torch.randint(0, 32, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = not padded
    assert run(Blocks(), *((ids,) if padded is None else (ids, mask))).equal


def test_llama() -> None:
    assert run(llama(use_cache=True), torch.randint(3, 64, (2, 7))).equal


def test_what_differs_is_told() -> None:
    plain = Counter({("aten.mul.Tensor", "[2, 3]"): 6, ("aten.add.Tensor", "[2, 3]"): 3})
    assert difference(plain, plain).equal
    once = Counter({("aten.mul.Tensor", "[2, 3]"): 6, ("aten.add.Tensor", "[6, 3]"): 1})
    assert difference(plain, once).equal
    shared = Counter({("aten.mul.Tensor", "[2, 3]"): 2, ("aten.add.Tensor", "[2, 3]"): 3})
    assert difference(plain, shared).equal
    lacks = Counter({("aten.add.Tensor", "[2, 3]"): 3, ("aten.exp.default", "[2, 3]"): 3})
    assert difference(plain, lacks) == Difference({"aten.exp.default": 3}, {"aten.mul.Tensor": 6})
