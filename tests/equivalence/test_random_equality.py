"""Random modules: the pipeline equals the plain model for every recipe, batch, cut, schedule and lane."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import (
    LANES,
    Run,
    assert_equal_runs,
    assert_same_bits,
    difference,
    forward_backward,
    train_step,
)
from tests.models.random_modules import OPERATIONS, Recipe, Step, build, make_batch, recipes
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*stage:UserWarning")

ROWS = st.integers(1, 13)
CHUNKS = st.integers(1, 9)
DEVICES = st.integers(1, 5)
LANE = st.sampled_from(LANES)


def row_wise_sum(output: Tensor, target: Tensor) -> Tensor:
    return (torch.sigmoid(output) - target).pow(2).sum()


LOSSES = {
    "nn mean": torch.nn.MSELoss(),
    "nn sum": torch.nn.SmoothL1Loss(reduction="sum"),
    "functional mean": F.l1_loss,
    "own mean": lambda output, target: (torch.sigmoid(output) - target).abs().mean(),
    "own sum": row_wise_sum,
}


def target_of(recipe: Recipe, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, recipe.width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", list(OPERATIONS))
def test_every_kind_of_step_early_and_late(kind: str) -> None:
    kinds = ("linear", kind, "tied_first", "multiply", kind, "repeated", "tied_weight", "add")
    steps = tuple(Step(name, near=0, far=1 + index % 3) for index, name in enumerate(kinds))
    recipe = Recipe(6, steps, inputs=2, outputs=(3, 6), form="dict", mean_output=False, frozen=0)
    plain, pipe = build(recipe), autosplit(build(recipe), devices=["cpu"] * 3, chunks=4)
    for rows in (9, 8):
        batch = make_batch(recipe, rows=rows)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@settings(max_examples=examples(80, few=8))
@given(recipe=recipes(), rows=ROWS, later=ROWS, chunks=CHUNKS, devices=DEVICES, lanes=LANE, gradients=st.booleans())
def test_call_and_backward_equal_the_plain_model(
    recipe: Recipe, rows: int, later: int, chunks: int, devices: int, lanes: str, gradients: bool
) -> None:
    plain, pipe = build(recipe), autosplit(build(recipe), devices=["cpu"] * devices, chunks=chunks, lanes=lanes)
    for seed, size in enumerate((rows, later)):
        batch = make_batch(recipe, rows=size, seed=seed, gradients=gradients)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@settings(max_examples=examples(12, few=4))
@given(recipe=recipes(), rows=ROWS, chunks=CHUNKS, devices=DEVICES, lanes=LANE)
def test_float32_is_within_its_tolerance(recipe: Recipe, rows: int, chunks: int, devices: int, lanes: str) -> None:
    plain, model = build(recipe, dtype=torch.float32), build(recipe, dtype=torch.float32)
    pipe = autosplit(model, devices=["cpu"] * devices, chunks=chunks, lanes=lanes)
    batch = make_batch(recipe, rows=rows, dtype=torch.float32)
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch), dtype=torch.float32)


@pytest.mark.quick
@settings(max_examples=examples(40, few=6))
@given(
    recipe=recipes(forms=("tensor",)),
    rows=ROWS,
    chunks=CHUNKS,
    devices=DEVICES,
    schedule=st.sampled_from(("auto", "gpipe", "1f1b")),
    loss=st.sampled_from(tuple(LOSSES)),
)
def test_train_step_equals_the_plain_model(
    recipe: Recipe, rows: int, chunks: int, devices: int, schedule: str, loss: str
) -> None:
    plain, loss_fn = build(recipe), LOSSES[loss]
    pipe = autosplit(build(recipe), devices=["cpu"] * devices, chunks=chunks, schedule=schedule)
    for seed in (0, 1):
        batch, target = make_batch(recipe, rows=rows, seed=seed), target_of(recipe, rows)
        expected = forward_backward(plain, batch, loss=lambda output, target=target: loss_fn(output, target))
        actual = train_step(pipe, batch, target=target, loss_fn=loss_fn)
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


def test_the_metric_sees_one_wrong_element() -> None:
    plain = torch.ones(3, 4, dtype=torch.float64)
    wrong = plain.clone()
    wrong[2, 1] += 2e-12
    assert difference(wrong, plain) > 1e-12
    assert difference(plain * float("nan"), plain) != difference(plain, plain) == 0.0
    runs = [Run({"/": value}, torch.zeros(()), {}, {}) for value in (plain, wrong)]
    with pytest.raises(AssertionError, match="output /"):
        assert_equal_runs(runs[1], runs[0])
    with pytest.raises(AssertionError, match="other bits in /"):
        assert_same_bits(runs[1], runs[0])
