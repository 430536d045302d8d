"""Models that compute their own loss: equal to the plain model, and still a pipeline up to their last layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, Sample, autosplit
from autosplit.runtime.step import train_cells
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.ladder import trace
from tests.equivalence.equality import LANES, Batch, Run, assert_equal_runs, forward_backward, train_step
from tests.models.decoders import VOCABULARY, Decoder
from tests.pairwise import mostly_slow

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


NAMES = mostly_slow(MODELS, "a decoder with labels", "mixtral")


def loss_and_logits(output: Any) -> Tensor:
    """Return the model's own loss and, faintly, its logits, as a caller may use both."""
    return output["loss"] + 1e-3 * output["logits"].square().mean()


@pytest.mark.parametrize("name", mostly_slow(MODELS, "a decoder with labels", "qwen3_moe with a mask"))
def test_a_models_own_loss_is_the_plain_models(name: str) -> None:
    options, inputs = MODELS[name]
    dtype = torch.float32 if len(name) % 2 else torch.float64
    plain = Decoder(**options).to(dtype)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3)
    runs = [forward_backward(m, Batch(inputs), loss=lambda o: loss_and_logits(o).double()) for m in (pipe, plain)]
    assert_equal_runs(*runs, dtype=dtype)
    assert pipe.plan is not None
    assert pipe.plan.class_flops["full"] < SMALL_SHARE


@pytest.mark.parametrize("name", NAMES)
def test_a_models_own_loss_does_not_end_the_pipeline_early(name: str) -> None:
    options, inputs = MODELS[name]
    graph = trace(Decoder(**options), Sample(*inputs)).graph
    classes = {info.name: info.node_class for _, info in graph.compute_nodes()}
    large = [node for node, info in graph.compute_nodes() if info.module.startswith(("layers", "head", "norm", "emb"))]
    for node in large:
        info = node.meta.get(INFO)
        assert info is not None
        assert info.node_class is not NodeClass.FULL, f"{info.name} is full"
    assert classes["#0/cross_entropy_0.each"] is NodeClass.MICRO, "the loss per token runs row by row"
    assert classes["#0/cross_entropy_0.rows"] is NodeClass.MICRO
    assert classes["#0/cross_entropy_0"] is NodeClass.FULL


def first_of(output: Any) -> Tensor:
    """Return the loss of a model that returns it first, alone or under its name."""
    return output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output[0]


class Forms(nn.Module):
    """Own losses of many forms; ``extra`` holds class weights and the number of items."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("weights", torch.linspace(0.5, 2, VOCABULARY))
        self.form = form

    def forward(self, x: Tensor, labels: Tensor, items: Tensor | None = None) -> Any:
        y = self.b(torch.tanh(self.a(x)))
        logits = self.c(torch.tanh(y))
        flat, wanted = logits.flatten(0, 1), labels.flatten()
        match self.form:
            case "a tuple with class weights":
                return F.cross_entropy(flat, wanted, weight=self.weights), logits
            case "a scalar alone":
                return F.cross_entropy(flat, wanted)
            case "several terms":
                loss = F.cross_entropy(flat, wanted) * 0.5 + y.pow(2).mean() / 4 + (y.sum(-1) * 0.1).sum() * 0.01
                return {"loss": loss.neg().neg(), "logits": logits}
            case "divided by items":
                return {"loss": F.cross_entropy(flat, wanted, reduction="sum") / items, "logits": logits}
            case "divided by its labels":
                loss = F.cross_entropy(flat, wanted, reduction="none", ignore_index=-100)
                return {"loss": loss.sum() / (wanted != -100).sum(), "y": y}
            case "a mean per row":
                return {"loss": (y.sum((1, 2)) ** 2).mean(), "y": y}
            case "a root":
                return {"loss": F.cross_entropy(flat, wanted).sqrt(), "y": y}
        return {"loss": F.cross_entropy(flat, wanted) + 1, "y": y}


IN_SCHEDULE = ("a tuple with class weights", "a scalar alone", "several terms", "divided by items")
IN_SCHEDULE += ("divided by its labels", "a mean per row")


@pytest.mark.parametrize("form", [*IN_SCHEDULE, "a root", "a constant beside it"])
def test_a_step_with_the_models_own_loss(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled: list[Any] = []
    run = train_cells.run
    monkeypatch.setattr(train_cells, "run", lambda *args: scheduled.append(args) or run(*args))
    plain = Forms(form).double()
    x = torch.randn(7, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    batch = Batch((x, LABELS), {"items": torch.tensor(37.0)} if form == "divided by items" else {})
    expected = forward_backward(plain, batch, loss=first_of)
    expected = Run({}, expected.loss, expected.gradients, expected.buffers)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4, lanes=LANES[len(form) % 2])
    assert_equal_runs(train_step(pipe, batch), expected)
    assert bool(scheduled) == (form in IN_SCHEDULE)
    assert ("the model's own loss needs the whole batch" in pipe.report().replace("\n   ", "")) != bool(scheduled)


def test_all_labels_ignored_give_what_the_plain_model_gives() -> None:
    plain = Forms("a scalar alone").double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4)
    x = torch.randn(7, LENGTH, 8, dtype=torch.float64)
    assert pipe.train_step(x, torch.full_like(LABELS, -100)).isnan()
    plain(x, torch.full_like(LABELS, -100)).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)


def test_a_model_without_a_loss_of_its_own_is_told_what_to_give() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2)
    value = torch.ones(4, 3)
    with pytest.raises(InputError, match=r"loss_fn=.*loss_fn\(output, target\).*Tensor without a loss of its own"):
        pipe.train_step(value)
    for option in ({"target": value}, {"loss_reduction": "sum"}):
        with pytest.raises(InputError, match=f"{next(iter(option))}= without loss_fn="):
            pipe.train_step(value, **option)
    assert all(parameter.grad is None for parameter in pipe.parameters())
