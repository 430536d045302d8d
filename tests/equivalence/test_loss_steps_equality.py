"""Steps with losses of every kind: schedules, targets of any structure, parameters of the loss, several steps."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, autosplit
from tests.equivalence.equality import Run, assert_equal_runs, difference, forward_backward, train_step
from tests.equivalence.test_loss_rules_equality import (
    CLASSES,
    ROWS,
    TIME,
    WEIGHTS,
    Net,
    assert_equal_step,
    classes,
    inputs,
    numbers,
    pair,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v")


class Headed(nn.Module):
    """A loss with parameters; one row in the third microbatch alone reaches the second of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.head, self.scale = nn.Linear(CLASSES, CLASSES), nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.head(output), target, weight=WEIGHTS)
        return loss + (output[target == 4].sum() * self.scale if (target == 4).any() else 0.0)


@pytest.mark.filterwarnings("ignore:.* parts")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_counted_loss_with_parameters_in_every_schedule(schedule: str) -> None:
    target = torch.tensor([1, -100, -100, -100, 4, 0, 2])
    plain, pipe = pair("classes", schedule=schedule)
    losses = [Headed().double(), Headed().double()]
    batch = inputs()
    for _ in range(2):
        for own in losses:
            own.zero_grad()
        expected = forward_backward(plain, batch, loss=lambda o: losses[0](o, target))
        actual = train_step(pipe, batch, target=target, loss_fn=losses[1], loss_reduction="auto")
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))
        for theirs, mine in zip(losses[0].parameters(), losses[1].parameters(), strict=True):
            assert theirs.grad is not None
            assert mine.grad is not None
            assert difference(mine.grad, theirs.grad) <= 1e-12


TARGETS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "a dict with None and numbers": (
        "classes",
        lambda o, t: F.mse_loss(o, t["y"]) * t["factor"] if t["mask"] is None else o.sum(),
        {"y": numbers(ROWS, CLASSES), "mask": None, "factor": 0.5},
    ),
    "a list of tuples": (
        "pair",
        lambda o, t: F.l1_loss(o[0], t[0][0]) + F.cross_entropy(o[1], t[1][0]),
        [(numbers(ROWS, CLASSES),), (classes(ROWS, ignored=-100), None)],
    ),
    "an object": ("classes", lambda o, t: F.mse_loss(o, t.labels), SimpleNamespace(labels=numbers(ROWS, CLASSES))),
    "a number": ("classes", lambda o, t: (o - t).square().mean(), 0.25),
    "classes beside the batch": (
        "time major",
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        classes(TIME, ROWS, ignored=-100),
    ),
    "the only dimension of the batch's size": (
        "classes",
        lambda o, t: F.mse_loss(o[:, :2], t.T),
        numbers(2, ROWS),
    ),
    "a target with a gradient": ("classes", F.mse_loss, numbers(ROWS, CLASSES).requires_grad_()),
    "a target with a graph": ("classes", F.mse_loss, numbers(ROWS, CLASSES).requires_grad_() + 0),
    "weights of rows": ("classes", nn.BCEWithLogitsLoss(weight=numbers(ROWS, 1).exp()), numbers(ROWS, CLASSES).exp()),
    "rows that meet by broadcasting": ("column", lambda o, t: F.mse_loss(o, t, reduction="sum"), numbers(ROWS, 1)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_any_structure(name: str) -> None:
    form, loss_fn, target = TARGETS[name]
    assert_equal_step(form, loss_fn, target, lanes="inline")


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_torchs_losses_where_rows_meet_run_on_the_whole_batch() -> None:
    assert_equal_step("column", nn.MSELoss(), numbers(ROWS), lanes="inline")
    assert_equal_step("one value", nn.CrossEntropyLoss(), numbers(ROWS).exp(), lanes="inline")


@pytest.mark.parametrize("weight", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_without_any_target_gives_the_plain_nan(weight: Tensor | None, smoothing: float) -> None:
    plain, pipe = pair("classes", lanes="inline")
    loss_fn, target = nn.CrossEntropyLoss(weight, label_smoothing=smoothing), torch.full((ROWS,), -100)
    expected = forward_backward(plain, inputs(), loss=lambda o: loss_fn(o, target))
    actual = train_step(pipe, inputs(), target=target, loss_fn=loss_fn)
    assert actual.loss.isnan()
    assert expected.loss.isnan()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient, equal_nan=True)


def test_a_lambda_made_anew_in_every_round_is_proved_once_and_kept_once() -> None:
    pipe = pair("classes", lanes="inline")[1]
    calls: list[int] = []

    def step(target: Tensor, factor: float) -> None:
        pipe.train_step(
            *inputs().args, target=target, loss_fn=lambda o, t: calls.append(len(o)) or F.mse_loss(o, t) * factor
        )

    for round_ in range(4):
        step(numbers(ROWS, CLASSES, seed=round_), 0.5 + round_)
        gc.collect()
    first, *others = [calls[i : i + 9] for i in range(0, len(calls), 9)]
    assert calls.count(ROWS) <= 2 + 2 * 4, "each round: counted once and checked once; the proof comes first"
    assert len(first) == 9
    assert others


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1)])
def test_steps_add_up_with_frozen_layers_and_other_batch_sizes(loss_fn: Callable[..., Tensor]) -> None:
    plain, pipe = Net("classes").double(), Net("classes").double()
    for model in (plain, pipe):
        model.b.requires_grad_(False)
        model.a.bias.requires_grad_(False)
    split = autosplit(pipe, devices=["cpu"] * 2, chunks=4)
    for rows in (7, 3, 1):
        target = classes(rows, ignored=-100) if rows > 3 else classes(rows)
        loss = loss_fn(plain(*inputs(rows).args), target)
        loss.backward()
        assert difference(split.train_step(*inputs(rows).args, target=target, loss_fn=loss_fn), loss.detach()) <= 1e-12
    for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert difference(mine.grad, theirs.grad) <= 1e-12, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-2)])
def test_losses_in_16_bits_and_under_autocast_have_the_plain_dtype(dtype: torch.dtype, bound: float) -> None:
    plain = Net("classes").to(dtype)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4)
    x, target = numbers(ROWS, TIME, CLASSES).to(dtype), classes(ROWS, ignored=-100)
    for loss_fn in (F.cross_entropy, lambda o, t: 2 * F.cross_entropy(o, t)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            expected = loss_fn(plain(x), target).detach()
            loss = pipe.train_step(x, target=target, loss_fn=loss_fn)
        assert loss.dtype == expected.dtype
        assert difference(loss.float(), expected.float()) <= bound


class WithInput(nn.Module):
    """A model whose input is one of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Tanh(), nn.Linear(CLASSES, CLASSES))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(value), value


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_input_that_is_an_output_gets_its_gradient_from_both(schedule: str) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return ((output[0] - target) * output[1]).pow(2).mean()

    plain = WithInput().double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4, schedule=schedule)
    batch, target = inputs(), numbers(ROWS, TIME, CLASSES, seed=6)
    expected = forward_backward(plain, batch, loss=lambda output: loss(output, target))
    actual = train_step(pipe, batch, target=target, loss_fn=loss)
    assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


def test_a_mean_that_is_neither_by_rows_nor_a_sum_is_refused() -> None:
    labels = classes(ROWS, TIME, ignored=-100)

    def by_hand(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none").sum() / (target != -100).sum()

    def by_rows(output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return (losses.sum(1) / (target != -100).sum(1).clamp(min=1)).mean()

    with pytest.raises(InputError, match="loss_reduction"):
        pair("spatial")[1].train_step(*inputs().args, target=labels, loss_fn=by_hand)
    assert_equal_step("spatial", by_rows, labels)
