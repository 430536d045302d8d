"""Precisions and losses on paper: what they cost and keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import TraceError, plan
from autosplit.options import Sample
from autosplit.profile.autocasting import autocast_of, set_dtypes
from autosplit.trace.ladder import trace

ROWS, WIDTH, WORDS = 8, 32, 4096


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + torch.relu(self.linear(self.norm(value)))
        return result


@pytest.mark.parametrize("blocks", [2, 6])
def test_dtypes_under_autocast_are_those_of_a_run_under_it(blocks: int) -> None:
    model = nn.Sequential(*[Block(8) for _ in range(blocks)])
    traced = trace(model.to("meta"), Sample(torch.empty(4, 8, device="meta"))).graph
    with autocast_of("amp_bf16", kernels="cuda"):
        set_dtypes(traced, kernels="cuda")
    found = [info.tensors[0].dtype for _, info in traced.compute_nodes()]
    assert found == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32] * blocks


def wide(layers: int = 4) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(layers)])


def planned(precision: str, **asked: Any) -> Any:
    return plan(wide(), "2xH100-SXM5-80GB", 4, sample=torch.empty(4096, 2048), precision=precision, **asked)


def test_autocast_keeps_fp32_weights_and_computes_in_the_lower_type() -> None:
    full, mixed, half = (planned(precision) for precision in ("fp32", "amp_bf16", "bf16"))
    states = [sum(s.memory.parameter_bytes + s.memory.optimizer_bytes for s in each.stages) for each in (full, mixed)]
    assert states[0] == states[1]
    assert full.bottleneck_s > 2 * mixed.bottleneck_s
    crossing = [next(b.bytes for b in each.boundaries if b.producer == 0) for each in (full, mixed, half)]
    assert crossing == [4 * 1024 * 2048, 2 * 1024 * 2048, 2 * 1024 * 2048]


def head() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(WORDS, WIDTH), *[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Linear(WIDTH, WORDS)
        )


def with_loss(loss_fn: Any) -> Any:
    sample = torch.zeros(ROWS, 16, dtype=torch.int64)
    return plan(head(), "2xL4-24GB", 4, sample=sample, loss_fn=loss_fn, schedule="1f1b")


def test_a_loss_is_counted_on_the_last_stage() -> None:
    bare, same, softmax = with_loss(None), with_loss(lambda output: output.mean()), with_loss(nn.CrossEntropyLoss())
    logits = ROWS // 4 * 16 * WORDS * 4
    mean, logarithms = same.stages[-1], softmax.stages[-1]
    assert mean.memory.peak_bytes == bare.stages[-1].memory.peak_bytes
    assert mean.backward_s > bare.stages[-1].backward_s
    # The logarithms stay for the backward, and the gradient of the logits is made beside them.
    assert logarithms.memory.transient_bytes == pytest.approx(mean.memory.transient_bytes + logits, rel=0.02)
    assert logarithms.forward_s > mean.forward_s


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
    with pytest.raises(
        TraceError, match=r"test_paper_precision.py:\d+\) reads a tensor's value, and a model on the meta"
    ):
        plan(layers(asks), "2xL4-24GB", sample=torch.empty(8, 16, device="meta"), chunks=4)
