"""BatchNorm in a pipeline normalises by microbatch and counts once per step, over all that a layer saw."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import LANES, Batch, Run, assert_equal_runs, forward_backward, train_step
from tests.equivalence.norms_by_microbatch import run_by_microbatch
from tests.models.named import numbers


# No bias stands before a BatchNorm: its gradient is zero but for rounding, which no relative metric can compare.
def dense() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6))


def cumulative() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, momentum=None, affine=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def untracked() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def convolution() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())


BUILD = {"dense": dense, "cumulative": cumulative, "untracked": untracked, "convolution": convolution}
MODELS = ("dense", "cumulative", "convolution")


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return BUILD[name]().double()


def batch_of(name: str, rows: int, *, seed: int = 0) -> Batch:
    value = numbers(rows, 6, seed=seed).detach() * 2 + 3
    return Batch(((value.view(rows, 1, 2, 3) if name == "convolution" else value).requires_grad_(),))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_plain_model_by_microbatch(name: str, lanes: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    for seed, rows in enumerate((12, 14)):
        batch = batch_of(name, rows, seed=seed)
        assert_equal_runs(forward_backward(pipe, batch), run_by_microbatch(model, batch, parts=4))


@pytest.mark.parametrize("name", MODELS)
def test_train_step_equals_the_plain_model_by_microbatch(name: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4)
    for seed, rows in enumerate((12, 14)):
        batch, target = batch_of(name, rows, seed=seed), numbers(rows, 6, seed=9)
        actual = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
        loss = partial(F.mse_loss, target=target)
        expected = run_by_microbatch(model, batch, parts=4, loss=loss)
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


@pytest.mark.parametrize(("rows", "chunks", "parts"), [(5, 4, 2), (3, 4, 1), (2, 8, 1), (9, 8, 4)])
def test_no_microbatch_is_left_with_one_value_per_channel(rows: int, chunks: int, parts: int) -> None:
    model, pipe = build("dense"), autosplit(build("dense"), devices=["cpu"] * 2, chunks=chunks)
    batch = batch_of("dense", rows)
    assert_equal_runs(forward_backward(pipe, batch), run_by_microbatch(model, batch, parts=parts))


@pytest.mark.parametrize("name", MODELS)
def test_eval_equals_the_plain_model(name: str) -> None:
    plain, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4)
    warm = batch_of(name, 12)
    run_by_microbatch(plain, warm, parts=4)
    forward_backward(pipe, warm)
    plain.eval()
    pipe.eval()
    for rows in (10, 1):
        batch = batch_of(name, rows, seed=3)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_the_whole_batch_is_normalised(training: bool) -> None:
    plain = build("untracked").train(training)
    pipe = autosplit(build("untracked").train(training), devices=["cpu"] * 2, chunks=4)
    for rows in (8, 10):
        batch = batch_of("untracked", rows)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
