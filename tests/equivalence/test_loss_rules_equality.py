"""Every loss of torch's in ``train_step`` on ragged microbatches: loss and gradients are the plain loss's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import Batch, Run, assert_equal_runs, forward_backward, train_step

ROWS, CHUNKS, TIME, CLASSES = 7, 4, 3, 5
WEIGHTS = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)
Case = tuple[str, Callable[..., Any], Callable[[], Any]]


class Net(nn.Module):
    """Two layers; the form of the output is the case's."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(CLASSES, CLASSES) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        match self.form:
            case "classes":  # [rows, classes]
                return y[:, 0]
            case "logs":
                return F.log_softmax(y[:, 0], -1)
            case "shares":
                return y[:, 0].sigmoid()
            case "spatial":  # [rows, classes, time]
                return y.transpose(1, 2)
            case "spatial logs":
                return F.log_softmax(y.transpose(1, 2), 1)
            case "tokens":  # [rows * time, classes]
                return y.flatten(0, 1)
            case "time major":  # [time, rows, classes]
                return y.transpose(0, 1)
            case "time major logs":
                return F.log_softmax(y.transpose(0, 1), -1)
            case "one value":  # [rows]
                return y[:, 0, 0].square()
            case "column":  # [rows, 1]
                return y[:, 0, :1]
            case "pair":
                return y[:, 0], 2 * y[:, 1]
            case "three":
                return y[:, 0], 2 * y[:, 1], y[:, 2].pow(3)
        return {"mean": y[:, 0], "var": F.softplus(y[:, 1]) + 0.1}


def classes(*shape: int, ignored: int | None = None) -> Tensor:
    drawn = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        flat = drawn.view(-1)
        flat[::3] = ignored
        drawn[2:4] = ignored  # the second microbatch has no target at all
    return drawn


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def signs(*shape: int) -> Tensor:
    return numbers(*shape).sign()


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).pow(2) * torch.linspace(1, 2, CLASSES)).mean()


def own_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum()


padded = partial(classes, ROWS, ignored=-100)
ROW_VALUES = partial(numbers, ROWS, CLASSES)
SHARES = lambda: numbers(ROWS, CLASSES).sigmoid()  # noqa: E731
LOSSES: dict[str, Case] = {
    "cross entropy": ("classes", nn.CrossEntropyLoss(), padded),
    "cross entropy, weights": ("classes", nn.CrossEntropyLoss(weight=WEIGHTS), padded),
    "cross entropy, weights and smoothing": (
        "classes",
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2, ignore_index=1),
        partial(classes, ROWS, ignored=1),
    ),
    "cross entropy, sum": ("classes", nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), padded),
    "cross entropy, spatial": (
        "spatial",
        nn.CrossEntropyLoss(weight=WEIGHTS),
        partial(classes, ROWS, TIME, ignored=-100),
    ),
    "cross entropy, tokens": ("tokens", nn.CrossEntropyLoss(), partial(classes, ROWS * TIME, ignored=-100)),
    "cross entropy, tokens in a sum": (
        "tokens",
        nn.CrossEntropyLoss(reduction="sum"),
        partial(classes, ROWS * TIME, ignored=-100),
    ),
    "cross entropy, smoothing": ("classes", nn.CrossEntropyLoss(label_smoothing=0.2), padded),
    "cross entropy, probabilities": (
        "classes",
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        lambda: numbers(ROWS, CLASSES).softmax(-1),
    ),
    "cross entropy, spatial probabilities": (
        "spatial",
        nn.CrossEntropyLoss(weight=WEIGHTS),
        lambda: numbers(ROWS, CLASSES, TIME).softmax(1),
    ),
    "cross entropy, function": ("classes", F.cross_entropy, padded),
    "cross entropy, partial": ("classes", partial(F.cross_entropy, weight=WEIGHTS, ignore_index=-100), padded),
    "cross entropy, partial of a module": ("classes", partial(nn.CrossEntropyLoss(weight=WEIGHTS)), padded),
    "nll": ("logs", nn.NLLLoss(weight=WEIGHTS), padded),
    "nll, spatial": ("spatial logs", nn.NLLLoss(weight=WEIGHTS), partial(classes, ROWS, TIME, ignored=-100)),
    "nll, function": ("logs", partial(F.nll_loss, reduction="sum"), padded),
    "bce": ("shares", nn.BCELoss(weight=WEIGHTS), SHARES),
    "bce with logits": ("classes", nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=1 + WEIGHTS), SHARES),
    "mse": ("classes", nn.MSELoss(), ROW_VALUES),
    "mse, time major": ("time major", nn.MSELoss(), partial(numbers, TIME, ROWS, CLASSES)),
    "mse, one value": ("one value", nn.MSELoss(), partial(numbers, ROWS)),
    "l1, sum": ("classes", nn.L1Loss(reduction="sum"), ROW_VALUES),
    "smooth l1": ("classes", nn.SmoothL1Loss(beta=0.5), ROW_VALUES),
    "huber": ("classes", nn.HuberLoss(delta=0.3), ROW_VALUES),
    "kl, batchmean": ("logs", nn.KLDivLoss(reduction="batchmean"), lambda: numbers(ROWS, CLASSES).softmax(-1)),
    "kl, mean": ("logs", nn.KLDivLoss(log_target=True), lambda: numbers(ROWS, CLASSES).log_softmax(-1)),
    "kl, batchmean, time major": (
        "time major logs",
        nn.KLDivLoss(reduction="batchmean"),
        lambda: numbers(TIME, ROWS, CLASSES).softmax(-1),
    ),
    "kl, batchmean of tokens": (
        "tokens",
        lambda o, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean"),
        lambda: numbers(ROWS * TIME, CLASSES).softmax(-1),
    ),
    "poisson": ("classes", nn.PoissonNLLLoss(full=True), lambda: numbers(ROWS, CLASSES).exp()),
    "gaussian": ("moments", lambda o, t: F.gaussian_nll_loss(o["mean"], t, o["var"], full=True), ROW_VALUES),
    "hinge embedding": ("classes", nn.HingeEmbeddingLoss(margin=0.4), partial(signs, ROWS, CLASSES)),
    "soft margin": ("classes", nn.SoftMarginLoss(), partial(signs, ROWS, CLASSES)),
    "margin ranking": ("pair", lambda o, t: nn.MarginRankingLoss(0.2)(*o, t), partial(signs, ROWS, CLASSES)),
    "cosine embedding": ("pair", lambda o, t: nn.CosineEmbeddingLoss(0.1)(*o, t), partial(signs, ROWS)),
    "triplet": ("three", lambda o: nn.TripletMarginLoss(swap=True)(*o), lambda: None),
    "triplet, own distance": (
        "three",
        lambda o: F.triplet_margin_with_distance_loss(*o, distance_function=lambda a, b: (a - b).abs().sum(-1)),
        lambda: None,
    ),
    "multi margin": ("classes", nn.MultiMarginLoss(p=2, weight=WEIGHTS), partial(classes, ROWS)),
    "multilabel margin": (
        "classes",
        nn.MultiLabelMarginLoss(),
        lambda: classes(ROWS, CLASSES).sort(-1, descending=True)[0].index_fill(1, torch.tensor([2]), -1),
    ),
    "multilabel soft margin": (
        "classes",
        nn.MultiLabelSoftMarginLoss(weight=WEIGHTS),
        lambda: classes(ROWS, CLASSES).clamp(max=1).double(),
    ),
    "ctc": (
        "time major logs",
        lambda o, t: F.ctc_loss(o, t["labels"], t["lengths"], t["wanted"]),
        lambda: {
            "labels": classes(ROWS, 2) % 4 + 1,
            "lengths": torch.full((ROWS,), TIME),
            "wanted": torch.tensor([1, 1, 1, 1, 1, 1, 1]),
        },
    ),
    "a lambda of a module": ("classes", lambda o, t: nn.CrossEntropyLoss(weight=WEIGHTS)(o, t), padded),
    "a nested lambda": ("spatial", lambda o, t: _outer(o, t), partial(classes, ROWS, TIME, ignored=-100)),
    "two losses": (
        "pair",
        lambda o, t: F.cross_entropy(o[0], t["a"]) + 0.5 * F.mse_loss(o[1], t["b"]),
        lambda: {"a": padded(), "b": ROW_VALUES()},
    ),
    "cross entropy and an own mean": (
        "classes",
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS) + 0.1 * o.pow(2).mean(),
        padded,
    ),
    "cross entropy and an own sum": ("classes", lambda o, t: F.cross_entropy(o, t) + 0.1 * o.pow(2).sum(), padded),
    "an own mean": ("classes", own_mean, ROW_VALUES),
    "an own sum": ("classes", own_sum, ROW_VALUES),
    "an own choice by class": (
        "classes",
        lambda o, t: F.log_softmax(o, -1).gather(1, t[:, None]).neg().mean(),
        partial(classes, ROWS),
    ),
    "a lambda of a sum": ("classes", lambda o, t: F.mse_loss(o, t, reduction="sum"), ROW_VALUES),
    "chosen rows": ("classes", lambda o, t: F.mse_loss(o[t[:, 0] > 0], t[t[:, 0] > 0]), ROW_VALUES),
}


def _outer(output: Tensor, target: Tensor) -> Any:
    inner = lambda o, t: F.cross_entropy(o.transpose(1, 2).flatten(0, 1), t.flatten(), weight=WEIGHTS)  # noqa: E731
    return inner(output, target)


@cache
def pair(form: str, **options: Any) -> tuple[nn.Module, Any]:
    plain = Net(form).double()
    return plain, autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=CHUNKS, **options)


def inputs(rows: int = ROWS) -> Batch:
    return Batch((numbers(rows, TIME, CLASSES, seed=5).requires_grad_(),))


def assert_equal_step(form: str, loss_fn: Callable[..., Any], target: Any, **options: Any) -> Tensor:
    """Run a step on both, the gradients of the inputs included; return the pipe's loss."""
    (plain, pipe), batch = pair(form, **options), inputs()
    expected = forward_backward(plain, batch, loss=lambda o: loss_fn(o) if target is None else loss_fn(o, target))
    actual = train_step(pipe, batch, target=target, loss_fn=loss_fn)
    assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))
    return actual.loss


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # torch's opinion of kl_div's mean
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_ragged_microbatches(name: str) -> None:
    form, loss_fn, target = LOSSES[name]
    for _ in range(2):  # what the first step proved holds in the second
        assert_equal_step(form, loss_fn, target(), lanes="threads" if len(form) % 2 else "inline")


@pytest.mark.parametrize("kind", ["the mean", "a number", "a tensor"])
def test_what_is_exact_for_a_sum_over_valid_targets(kind: str) -> None:
    target = classes(ROWS, ignored=-100)
    count = (target != -100).sum()
    divisor = {"the mean": None, "a number": int(count), "a tensor": count}[kind]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if divisor is None:
            return F.cross_entropy(output, target, ignore_index=-100)
        return F.cross_entropy(output, target, ignore_index=-100, reduction="sum") / divisor

    model, x = Net("classes").double(), numbers(ROWS, TIME, CLASSES)
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=CHUNKS)
    loss = F.cross_entropy(model(x), target, reduction="sum") / count
    loss.backward()
    torch.testing.assert_close(
        pipe.train_step(x, target=target, loss_fn=loss_fn), loss.detach(), rtol=1e-12, atol=1e-12
    )
    for mine, other in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
