"""Per microbatch a stage runs the operators that the plain model runs on those rows, decided by values as there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._subclasses
from torch import nn
from torch.nn import functional as F

from autosplit import PipelinedModule, Sample, autosplit, plan
from benchmarks.operators import MICROBATCHES, Difference, compared, repeated
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


# -- what values and sizes decide ------------------------------------------------------------------------------------
class Asks(nn.Module):
    """Does something else where it seems to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Scale by 0.5 where tracing shows, and mask what has to be masked."""
        tracing = torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor)
        for layer in self.layers:
            x = torch.tanh(layer(x) * (0.5 if tracing else 1.0))
        return x if mask is None or mask.all() else torch.where(mask, x, 0.0)


def test_a_mask_is_a_guard_of_the_whole_batch() -> None:
    model, x = Asks(), torch.randn(8, 6)
    whole, partly = torch.ones(8, 6, dtype=torch.bool), torch.ones(8, 6, dtype=torch.bool)
    partly[3] = False
    pipe = autosplit(model, devices=2, chunks=4)
    for mask, chooses in ((whole, False), (partly, True)):
        torch.testing.assert_close(pipe(x, mask), model(x, mask))
        assert ("where" in names(pipe)) is chooses
        assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == 4
    torch.testing.assert_close(pipe(x, whole), model(x, whole))


def test_on_meta_what_sizes_decide_is_computed() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(x.shape[1], device=x.device)
            if (steps.diff() == 1).all():
                x = self.layers(x)
            return x if mask.all() else x * mask

    with torch.device("meta"):
        model, x, mask = Positions(), torch.empty(8, 6), torch.empty(8, 6, dtype=torch.bool)
    found = plan(model, devices="2xH100-SXM5-80GB", chunks=2, sample=(x, mask))
    assert found.rung == "recorded"
    assert any("mul" in node for stage in found.stages for node in stage.nodes)


def names(pipe: PipelinedModule) -> set[str]:
    return {getattr(n.target, "__name__", "") for stage in pipe.stages for n in stage.graph.nodes}


@pytest.mark.slow
def test_attention_keeps_is_causal() -> None:
    model, ids = llama().double(), torch.randint(3, 64, (8, 7))
    whole, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[3, :4] = 0
    pipe = autosplit(model, devices=2, chunks=4)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"use_cache": False}, True),
        ({"attention_mask": whole}, True),
        ({"attention_mask": padded}, False),
    ]
    for given, causal in cases:
        torch.testing.assert_close(pipe(ids, **given).logits, model(ids, **given).logits)
        attention = [n for s in pipe.stages for n in s.graph.nodes if "scaled_dot" in str(n.target)]
        assert [node.kwargs["is_causal"] for node in attention] == [causal] * 2
