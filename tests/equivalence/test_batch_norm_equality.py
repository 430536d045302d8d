"""BatchNorm normalises by microbatch, and its running statistics move once per step, over all that it saw."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import Batch, Run, assert_equal_runs, forward_backward, probe_loss, train_step
from tests.equivalence.named_models import numbers


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
    )


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None, affine=False), nn.Tanh(), nn.Linear(6, 6))


def untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh(), nn.Linear(6, 6))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6)
    )


MODELS = {"dense": dense, "cumulative": cumulative, "untracked": untracked, "convolution": convolution}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return MODELS[name]().double()


def batch_of(name: str, rows: int, *, seed: int = 0) -> Batch:
    value = numbers(rows, 6, seed=seed).detach() * 2 + 3
    return Batch(((value.view(rows, 1, 2, 3) if name == "convolution" else value).requires_grad_(),))


@dataclass(frozen=True)
class Statistics:
    """The buffers of one BatchNorm before the step, and what it saw in the step."""

    mean: Tensor
    variance: Tensor
    count: Tensor
    seen: list[Tensor]

    def update(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        """Write the buffers as one update over all inputs of the step leaves them."""
        values = torch.cat(self.seen).transpose(0, 1).flatten(1)
        momentum = 1 / float(self.count + 1) if layer.momentum is None else layer.momentum
        layer.running_mean.copy_(self.mean * (1 - momentum) + momentum * values.mean(1))
        layer.running_var.copy_(self.variance * (1 - momentum) + momentum * values.var(1))
        layer.num_batches_tracked.copy_(self.count + 1)


class Sequentially(nn.Module):
    """The plain model on one microbatch after the other, with one update of the running statistics per step."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        super().__init__()
        self.model, self.parts = model, parts
        self.records: dict[nn.Module, Statistics] = {}

    def forward(self, value: Tensor) -> Tensor:
        handles = []
        for layer in self.model:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats and layer.training:
                buffers = (layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone())
                self.records[layer] = Statistics(*buffers, seen=[])
                handles.append(layer.register_forward_hook(self._see))
        output = torch.cat([self.model(part) for part in value.tensor_split(self.parts)])
        for handle in handles:
            handle.remove()
        return output

    def update(self) -> None:
        """Replace the updates by microbatch; only after the backward, which checks that nobody changed the buffers."""
        for layer, record in self.records.items():
            record.update(layer)

    def _see(self, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.records[layer].seen.append(args[0].detach())


def run_sequentially(model: nn.Module, batch: Batch, *, parts: int, target: Tensor | None = None) -> Run:
    sequentially = Sequentially(model, parts)
    loss = probe_loss if target is None else lambda output: F.mse_loss(output, target)
    run = forward_backward(sequentially, batch, loss=loss)
    sequentially.update()
    gradients = {name.removeprefix("model."): gradient for name, gradient in run.gradients.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Run(run.outputs, run.loss, gradients, buffers)


@pytest.mark.parametrize("lanes", ["inline", "threads"])
@pytest.mark.parametrize("name", list(MODELS))
def test_training_equals_the_plain_model_by_microbatch(name: str, lanes: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    for seed, rows in enumerate((8, 10)):
        batch = batch_of(name, rows, seed=seed)
        assert_equal_runs(forward_backward(pipe, batch), run_sequentially(model, batch, parts=4))


@pytest.mark.parametrize("name", list(MODELS))
def test_train_step_equals_the_plain_model_by_microbatch(name: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4)
    for seed, rows in enumerate((8, 10)):
        batch, target = batch_of(name, rows, seed=seed), numbers(rows, 6, seed=9)
        actual = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
        expected = run_sequentially(model, batch, parts=4, target=target)
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


def test_the_first_layers_running_statistics_are_the_plain_models() -> None:
    plain, pipe = build("dense"), autosplit(build("dense"), devices=["cpu"] * 3, chunks=4)
    for seed, rows in enumerate((8, 10, 9)):
        batch = batch_of("dense", rows, seed=seed)
        actual, expected = forward_backward(pipe, batch), forward_backward(plain, batch)
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "4.num_batches_tracked"):
            torch.testing.assert_close(actual.buffers[name], expected.buffers[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("rows", "chunks", "parts"), [(5, 4, 2), (3, 4, 1), (2, 8, 1), (9, 8, 4)])
def test_no_microbatch_is_left_with_one_value_per_channel(rows: int, chunks: int, parts: int) -> None:
    model, pipe = build("dense"), autosplit(build("dense"), devices=["cpu"] * 2, chunks=chunks)
    batch = batch_of("dense", rows)
    assert_equal_runs(forward_backward(pipe, batch), run_sequentially(model, batch, parts=parts))


@pytest.mark.parametrize("name", list(MODELS))
def test_eval_equals_the_plain_model(name: str) -> None:
    plain, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4)
    warm = batch_of(name, 8)
    run_sequentially(plain, warm, parts=4)
    forward_backward(pipe, warm)
    plain.eval()
    pipe.eval()
    if name == "untracked":  # it normalises by batch in eval mode too
        assert_equal_runs(forward_backward(pipe, warm), run_sequentially(plain, warm, parts=4))
        return
    for rows in (10, 1):
        batch = batch_of(name, rows, seed=3)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_bits_and_statistics_do_not_depend_on_the_cut(lanes: str) -> None:
    batch = batch_of("dense", 10)
    runs = []
    for devices in (1, 2, 4):
        pipe = autosplit(build("dense"), devices=["cpu"] * devices, chunks=4, lanes=lanes)
        runs.append(forward_backward(pipe, batch))
    for run in runs[1:]:
        for kind in ("outputs", "gradients", "buffers"):
            for name, value in getattr(runs[0], kind).items():
                assert torch.equal(getattr(run, kind)[name], value), name


def test_frozen_statistics_in_one_layer() -> None:
    model, pipe = build("dense"), autosplit(build("dense"), devices=["cpu"] * 3, chunks=4)
    for module in (model, pipe):
        module.get_submodule("1").eval()
    for seed in (0, 1):
        batch = batch_of("dense", 10, seed=seed)
        assert_equal_runs(forward_backward(pipe, batch), run_sequentially(model, batch, parts=4))
