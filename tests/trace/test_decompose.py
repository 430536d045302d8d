"""Reductions over the batch become a row-wise part and a light one, with the plain model's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.equivalence.test_loss_rules_equality import LOSSES, Net, inputs
from tests.models.three_layers import WIDTH, Model, numbers
from tests.pairwise import in_turn

ROWS, TOKENS, CLASSES = 7, 5, WIDTH
Body = Callable[..., Any]


def classes_of(traced: TracedGraph) -> dict[str, NodeClass]:
    return {info.name: info.node_class for _, info in traced.compute_nodes()}


def check(body: Body, *inputs: Any, dtype: torch.dtype = torch.float64, **parts: Any) -> TracedGraph:
    """Compare a pipe over ragged microbatches with the plain model; return the recording."""
    plain = (body if isinstance(body, nn.Module) else Model(body, **parts)).to(dtype)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    batch = Batch(tuple(v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch), dtype=dtype)
    return trace(copy.deepcopy(plain), Sample(*batch.args)).graph


def assert_light(traced: TracedGraph) -> None:
    """Assert that full nodes see what the rows gave only: never a tensor of many values per row."""
    for node, info in traced.compute_nodes():
        if info.node_class is not NodeClass.FULL:
            continue
        for operand in node.all_input_nodes:
            given = operand.meta.get(INFO)
            if given is not None and given.node_class is NodeClass.MICRO:
                assert given.name.endswith(".rows"), f"{info.name} takes {given.name}, which is merged"


X = numbers(ROWS, TOKENS, WIDTH)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of all dims": lambda x: torch.sum(x, (0, 1, 2)),
    "sum of the first two dims": lambda x: x.sum((0, 1)),
    "sum that keeps dims": lambda x: x.sum((-3, -1), keepdim=True),
    "sum of integers": lambda x: (x * 9).long().sum() * x.sum(),
    "sum of booleans": lambda x: (x > 0).sum() * x.sum(),
    "sum in another type": lambda x: x.float().sum(dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean of the first and the last dim": lambda x: torch.mean(x, (0, 2)),
    "mean with an axis": lambda x: x.mean(axis=(0, 1)),
    "mean over flat rows": lambda x: x.reshape(-1, WIDTH).mean(0),
    "mean where the batch is last": lambda x: x.permute(1, 2, 0).mean((1, 2)),
}


@in_turn(share=(0, 2), name=list(REDUCTIONS))
def test_a_reduction_over_the_batch_is_light(name: str) -> None:
    traced = check(lambda m, x: REDUCTIONS[name](torch.tanh(m.b(m.a(x)))), X)
    assert_light(traced)
    assert all(c is NodeClass.MICRO for n, c in classes_of(traced).items() if n in ("a#0", "b#0"))


UNTOUCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax((0, 1)),
    "norm": lambda x: x.norm(),
    "var": lambda x: x.var(),
    "any": lambda x: (x > 3).any() * x.sum((1, 2)),
    "mean over rows alone": lambda x: x.mean(0),
    "batch x batch": lambda x: (x.flatten(1) @ x.flatten(1).T).mean(),
    "changed in place": lambda x: (lambda y: (y.sum(), y.mul_(2))[0])(x * 1),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_left_alone_is_right_too(name: str) -> None:
    traced = check(lambda m, x: UNTOUCHED[name](m.b(m.a(x))), X)
    assert not [n for n in classes_of(traced) if n.endswith(".rows")]


LABELS = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % CLASSES
SOME = LABELS.where(LABELS % 3 > 0, -100).clone()
SOME[2:4] = -100
TARGET = numbers(ROWS, TOKENS, WIDTH, seed=2, gradient=False)
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 0.7, 0.0], dtype=torch.float64)
Loss = Callable[[Any, Tensor], Tensor]


def tokens(loss: Callable[..., Tensor], labels: Tensor, **options: Any) -> tuple[Loss, tuple[Tensor, ...]]:
    return lambda m, x, t: loss(m.b(x).flatten(0, 1), t.flatten(0, 1), **options), (labels,)


class Losing(nn.Module):
    """A model that returns a loss."""

    def __init__(self, form: str, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss_fn = Net(form), loss_fn

    def forward(self, value: Tensor, target: Any = None) -> Tensor:
        output = self.net(value)
        target = target.flatten(0, 1) if self.net.form == "tokens" else target
        return self.loss_fn(output) if target is None else self.loss_fn(output, target)


MERGED = {"ctc", "triplet, own distance", "gaussian", "two losses", "chosen rows", "an own choice by class"}
MERGED |= {f"{loss}an own {kind}" for loss in ("", "cross entropy and ") for kind in ("mean", "sum")}
"""What is no loss of torch alone, or stays whole."""


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@in_turn(share=(0, 2), name=[n for n in LOSSES if n not in MERGED and "time major" not in n])
def test_a_loss_of_torch_is_light(name: str) -> None:
    form, loss_fn, target = LOSSES[name]
    (value,), asked = inputs().args, target()
    asked = asked.unflatten(0, (ROWS, -1)) if form == "tokens" else asked
    traced = check(Losing(form, loss_fn), value, *([] if asked is None else [asked]))
    assert_light(traced)
    full = [n for n, c in classes_of(traced).items() if c is NodeClass.FULL]
    assert len(full) == 1, f"more is full than the light half: {full}"


def weighted_loss() -> nn.Module:
    return nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1)


def hooked_loss() -> nn.Module:
    loss = weighted_loss()
    loss.register_forward_hook(lambda *_: None)
    return loss


@pytest.mark.parametrize("build", [weighted_loss, nn.MSELoss, hooked_loss])
def test_a_loss_module_is_its_function_unless_hooks_want_its_call(build: Callable[[], nn.Module]) -> None:
    target = TARGET if build is nn.MSELoss else SOME.where(SOME >= 0, 1)
    flat = (lambda v: v) if build is nn.MSELoss else (lambda v: v.flatten(0, 1))
    classes = classes_of(check(lambda m, x, t: m.loss(flat(m.b(m.a(x))), flat(t)), X, target, loss=build))
    assert any(name.startswith("loss#0") and name.endswith(".rows") for name in classes) == (build is not hooked_loss)


def reduced(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden.mean(), hidden.sum((0, 1)), F.mse_loss(hidden, torch.ones_like(hidden))


def reduced_under_autocast(model: Any, value: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return reduced(torch.tanh(model.b(model.a(value))))


@pytest.mark.parametrize("autocast", ["inside", "outside"])
def test_a_reduction_under_autocast_differs_in_the_last_bits_of_its_type_only(autocast: str) -> None:
    """Sums of 16-bit values are made in 32 bits, rows by rows; torch's own losses add up in 16 bits."""
    body = reduced_under_autocast if autocast == "inside" else lambda m, x: reduced(torch.tanh(m.b(m.a(x))))
    plain = Model(body).float()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    seen = []
    for module in (pipe, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "outside"):
            outputs = module(X.detach().float())
        sum(value.float().sum() for value in outputs).backward()
        seen.append([*outputs, *(p.grad for p in module.parameters() if p.grad is not None)])
    for ours, theirs in zip(*seen, strict=True):
        assert ours.dtype == theirs.dtype
        bound = 4 * torch.finfo(torch.bfloat16).eps
        assert float((ours - theirs).detach().abs().max()) <= bound * float(theirs.detach().abs().max())
