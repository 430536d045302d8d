"""Models with a known trap: the pipeline equals the plain model, and every cut gives the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autosplit import autosplit
from tests.equivalence.equality import (
    LANES,
    Run,
    assert_equal_runs,
    assert_same_bits,
    flatten,
    forward_backward,
    train_step,
)
from tests.models.named import CASES, numbers
from tests.pairwise import in_turn

# Some of these models have fewer separable nodes than the most devices that the tests ask for.
pytestmark = pytest.mark.filterwarnings("ignore:.*stage:UserWarning")


def row_loss(output: object, target: Tensor) -> Tensor:
    """Return the mean over rows of a squared distance that weighs the first floating output's elements unequally.

    With equal weights the mean of a layer norm's squares is a constant, and its gradient only rounding noise.
    """
    value = next(leaf for _, leaf in flatten(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    rows = value.flatten(1)
    return (rows * torch.linspace(0.5, 1.5, rows.shape[1]) - target[:, None]).pow(2).mean()


@in_turn(share=(0, 2), rest=False, name=list(CASES), lanes=LANES)
def test_forward_and_backward_equal_the_plain_model(name: str, lanes: str) -> None:
    case = CASES[name]
    plain, pipe = case.build(), autosplit(case.build(), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    for rows in (8, 10, 3):
        batch = case.batch(rows)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@in_turn(share=(1, 2), rest=False, name=list(CASES), schedule=("1f1b", "gpipe"))
def test_train_step_equals_the_plain_model(name: str, schedule: str) -> None:
    case = CASES[name]
    plain, pipe = case.build(), autosplit(case.build(), devices=["cpu"] * 3, chunks=4, schedule=schedule)
    for rows in (8, 7):
        batch, target = case.batch(rows), numbers(rows, seed=5)
        expected = forward_backward(plain, batch, loss=lambda output, target=target: row_loss(output, target))
        actual = train_step(pipe, batch, target=target, loss_fn=row_loss)
        assert actual.loss.shape == ()
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


@in_turn(share=(0, 4), name=list(CASES))
def test_eval_equals_the_plain_model(name: str) -> None:
    case = CASES[name]
    plain, pipe = case.build().eval(), autosplit(case.build().eval(), devices=["cpu"] * 2, chunks=3)
    batch = case.batch(7)
    with torch.no_grad():
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@in_turn(share=(2, 4), name=list(CASES), cut=(("threads", 5), ("inline", 3)))
def test_bits_do_not_depend_on_the_cut_or_the_run(name: str, cut: tuple[str, int]) -> None:
    case, (lanes, devices) = CASES[name], cut
    batch, target = case.batch(10), numbers(10, seed=5)
    whole = autosplit(case.build(), devices=["cpu"], chunks=4, lanes=lanes)
    called = forward_backward(whole, batch)
    stepped = train_step(whole, batch, target=target, loss_fn=row_loss)
    assert_same_bits(forward_backward(whole, batch), called)
    pipe = autosplit(case.build(), devices=["cpu"] * devices, chunks=4, lanes=lanes)
    assert_same_bits(forward_backward(pipe, batch), called)
    assert_same_bits(train_step(pipe, batch, target=target, loss_fn=row_loss), stepped)
    assert_same_bits(train_step(pipe, batch, target=target, loss_fn=row_loss), stepped)
