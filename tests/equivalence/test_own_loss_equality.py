"""Models that compute their own loss: equal to the plain model, and still a pipeline up to their last layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.equivalence.language_models import VOCABULARY, Decoder

LENGTH = 12
SMALL_SHARE = 0.03
TOKENS = torch.randint(VOCABULARY, (7, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS.where(torch.arange(LENGTH) < torch.tensor([12, 3, 7, 1, 9, 12, 2])[:, None], -100)
MASK = (LABELS >= 0).long()
MODELS: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
    "a decoder with labels": ({}, (TOKENS, LABELS)),
    "a decoder that divides by the items": ({"items": 40}, (TOKENS, LABELS)),
    "mixtral": ({"experts": "mixtral"}, (TOKENS, LABELS)),
    "mixtral with a mask": ({"experts": "mixtral"}, (TOKENS, LABELS, MASK)),
    "qwen3_moe": ({"experts": "qwen3_moe"}, (TOKENS, LABELS)),
    "qwen3_moe with a mask": ({"experts": "qwen3_moe"}, (TOKENS, LABELS, MASK)),
}


def loss_and_logits(output: Any) -> Tensor:
    """Return the model's own loss and, faintly, its logits, as a caller may use both."""
    return output["loss"] + 1e-3 * output["logits"].square().mean()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_models_own_loss_is_the_plain_models(name: str, dtype: torch.dtype) -> None:
    options, inputs = MODELS[name]
    plain = Decoder(**options).to(dtype)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3)
    runs = [forward_backward(m, Batch(inputs), loss=lambda o: loss_and_logits(o).double()) for m in (pipe, plain)]
    assert_equal_runs(*runs, dtype=dtype)
    assert pipe.plan is not None
    assert pipe.plan.class_flops["full"] < SMALL_SHARE


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_loss_does_not_end_the_pipeline_early(name: str) -> None:
    options, inputs = MODELS[name]
    graph = trace(Decoder(**options), Sample(*inputs)).graph
    classes = {info.name: info.node_class for _, info in graph.compute_nodes()}
    large = [node for node, info in graph.compute_nodes() if info.module.startswith(("layers", "head", "norm", "emb"))]
    for node in large:
        info = graph.info(node)
        assert info is not None
        assert info.node_class is not NodeClass.FULL, f"{info.name} is full"
    assert classes["#0/cross_entropy_0.each"] is NodeClass.MICRO, "the loss per token runs row by row"
    assert classes["#0/cross_entropy_0.rows"] is NodeClass.MICRO
    assert classes["#0/cross_entropy_0"] is NodeClass.FULL


class Watched(nn.Module):
    """A body whose activations are watched on the side, as for logs: values that mix rows and that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, value: Tensor) -> dict[str, Any]:
        seen = []
        for layer in self.layers:
            value = torch.tanh(layer(value))
            seen += [value.std(), value.abs().mean(), value.abs().amax((0, 1))]
        return {"value": value, "seen": torch.stack([s for s in seen if s.dim() == 0]), "largest": seen[2]}


def test_values_watched_on_the_side_do_not_drag_the_layers_along() -> None:
    value = torch.randn(7, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = Watched().double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3)
    assert_equal_runs(*(forward_backward(module, Batch((value,))) for module in (pipe, plain)))
    graph = trace(plain, Sample(value)).graph
    full = {info.name for _, info in graph.compute_nodes() if info.node_class is NodeClass.FULL}
    assert not [name for name in full if name.startswith("layers") or "tanh" in name]
    assert pipe.plan is not None
    assert pipe.plan.class_flops["full"] < SMALL_SHARE
