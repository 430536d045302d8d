"""``train_step`` with torch's losses, own losses and the model's own loss; what it accumulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, autosplit
from tests.equivalence.equality import Batch, Run, assert_equal_runs, forward_backward, train_step
from tests.models.named import WIDTH, Chain, TinyGPT, flat, numbers, tokens

CLASS_WEIGHTS = torch.linspace(0.2, 2.0, WIDTH, dtype=torch.float64)
Loss = Callable[[Any, Tensor], Tensor]


def values(rows: int) -> Tensor:
    return numbers(rows, WIDTH, seed=2).sigmoid()


def classes(rows: int) -> Tensor:
    return tokens(rows, 1, words=WIDTH)[:, 0]


def padded_classes(rows: int) -> Tensor:
    labels = classes(rows)
    labels[:: 2 if rows > 2 else 5] = -100
    return labels


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).pow(2) * torch.linspace(1, 2, WIDTH)).mean()


def own_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum()


def own_method(output: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(output, dim=-1).gather(1, target[:, None]).neg().mean()


LOSSES: dict[str, tuple[Loss, Callable[[int], Tensor]]] = {
    "nn.MSELoss": (nn.MSELoss(), values),
    "nn.CrossEntropyLoss padded": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), padded_classes),
    "own mean": (own_mean, values),
    "own sum": (own_sum, values),
    "own gather": (own_method, classes),
    "lambda": (lambda output, target: F.mse_loss(output, target, reduction="sum"), values),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_train_step_equals_backward_of_the_plain_loss(name: str, schedule: str) -> None:
    loss_fn, target_for = LOSSES[name]
    plain, pipe = _chain(), autosplit(_chain(), devices=["cpu"] * 3, chunks=4, schedule=schedule)
    for rows in (8, 10, 3):
        batch, target = flat(rows), target_for(rows)
        expected = forward_backward(plain, batch, loss=lambda output, target=target: loss_fn(output, target))
        actual = train_step(pipe, batch, target=target, loss_fn=loss_fn)
        assert actual.loss.shape == ()
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


@pytest.mark.parametrize(("reduction", "loss_fn"), [("mean", own_mean), ("sum", own_sum)])
def test_a_given_reduction_is_used(reduction: str, loss_fn: Loss) -> None:
    plain, pipe = _chain(), autosplit(_chain(), devices=["cpu"] * 2, chunks=4)
    batch, target = flat(7), values(7)
    expected = forward_backward(plain, batch, loss=lambda output: loss_fn(output, target))
    actual = train_step(pipe, batch, target=target, loss_fn=loss_fn, loss_reduction=reduction)
    assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


def test_padding_in_token_losses_is_counted_over_the_whole_batch() -> None:
    plain, pipe = _gpt(), autosplit(_gpt(), devices=["cpu"] * 3, chunks=4)
    words = tokens(10, 6)
    labels = words.roll(-1, dims=1)
    for row in range(10):
        labels[row, row % 6 :] = -100
    labels[3] = labels[4] = labels[5] = -100  # one microbatch has no valid target at all

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    def by_rows(output: Any, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output.logits.transpose(1, 2), target, reduction="none")
        return (losses.sum(1) / (target != -100).sum(1).clamp(min=1)).mean()

    def by_hand(output: Any, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output.logits.transpose(1, 2), target, reduction="none")
        return losses.sum() / (target != -100).sum()

    # Its mean is neither by rows nor a sum, and it is not one of torch's own losses: refused, never approximated.
    with pytest.raises(InputError, match="loss_reduction"):
        pipe.train_step(words, target=labels, loss_fn=by_hand)
    for exact in (loss_fn, by_rows):
        actual = train_step(pipe, Batch((words,)), target=labels, loss_fn=exact)
        expected = forward_backward(plain, Batch((words,)), loss=lambda output, exact=exact: exact(output, labels))
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


def test_an_unknown_reduction_lists_the_valid_ones() -> None:
    pipe = autosplit(_chain(), devices=["cpu"] * 2, chunks=4)
    with pytest.raises(InputError, match=r"median.*auto.*mean.*sum"):
        pipe.train_step(*flat(8).args, target=values(8), loss_fn=own_mean, loss_reduction="median")


def test_a_step_leaves_no_gradient_on_target_and_no_graph_on_the_loss() -> None:
    pipe = autosplit(_chain(), devices=["cpu"] * 2, chunks=4)
    target = values(8)
    loss = pipe.train_step(*flat(8).args, target=target, loss_fn=own_mean)
    assert target.grad is None
    assert loss.grad_fn is None


def _chain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Chain().double()


def _gpt() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return TinyGPT().double()
