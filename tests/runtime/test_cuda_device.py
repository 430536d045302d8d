"""The lane of a CUDA device on a device: late work and memory that is free early change no number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.runtime import ops
from autosplit.runtime.lanes.lanes import caller_lane, lane
from tests.runtime.lane_models import MODELS, ROWS, WIDTH, Skips, assert_close, loss, plain

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("double")]
CPU = torch.device("cpu")
DEVICES = [["cuda:0"] * 3, ["cpu", "cuda:0"], ["cuda:0", "cpu", "cuda:0"]]


def own(output: Any, target: torch.Tensor) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return (first - target).abs().pow(1.5).mean()


def late(pipe: Any) -> Any:
    """Have every stage of a pipe start late, forward and backward."""

    def slow_gradients(stage: nn.Module, given: Any, sent: Any) -> None:
        for tensor in (tensor for bundle in sent.values() for tensor in bundle if tensor.requires_grad):
            tensor.register_hook(lambda gradient: torch.cuda._sleep(2_000_000))

    for stage in pipe.stages:
        stage.register_forward_pre_hook(lambda stage, given: torch.cuda._sleep(2_000_000))
        stage.register_forward_hook(slow_gradients)
    return pipe


def split(model: nn.Module, devices: list[str], schedule: str) -> Any:
    sample = torch.zeros(ROWS, WIDTH)
    return late(autosplit(model, devices=devices, chunks=3, schedule=schedule, lanes="inline", sample=sample))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_a_pipe_on_a_device(model: Callable[[], nn.Module], devices: list[str]) -> None:
    reference = copy.deepcopy(mine := model())
    pipe = split(mine, devices, "gpipe")
    for step in range(4):
        value = torch.randn(ROWS, WIDTH)
        found = pipe(value.to(devices[0] if step % 2 else CPU))
        outputs = list(found) if isinstance(found, tuple) else [found]
        loss(outputs).backward()
        gradients = [p.grad for p in mine.parameters() if p.grad is not None]
        assert_close([*(output.detach() for output in outputs), *gradients], plain(reference, value))
        mine.zero_grad(set_to_none=True)


@pytest.mark.parametrize("loss_fn", [own, nn.MSELoss()])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_training_step_on_a_device(devices: list[str], schedule: str, loss_fn: Any) -> None:
    reference = copy.deepcopy(mine := Skips())
    pipe = split(mine, devices, schedule)
    for step in range(4):
        value, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        place = devices[0] if step % 2 else CPU
        total = pipe.train_step(value.to(place), target=target.to(place), loss_fn=loss_fn)
        expected = loss_fn(reference(value), target)
        expected.backward()
        gradients = [[p.grad for p in owner.parameters()] for owner in (mine, reference)]
        assert_close([total, *gradients[0]], [expected.detach(), *gradients[1]])
        for owner in (mine, reference):
            owner.zero_grad(set_to_none=True)


def test_memory_that_is_free_early_is_not_used_early() -> None:
    device = torch.device("cuda:0")
    source, target = lane(device), lane(device)
    for number in range(20):
        with source.active():
            value = torch.full((1 << 20,), float(number), device=device)
        (moved,) = ops.transfer((value,), source, target)
        with target.active():
            torch.cuda._sleep(2_000_000)
            total = moved.sum()
        del value, moved
        with source.active():
            torch.full((1 << 20,), -1.0, device=device)
        ops.leave(caller_lane(device), (source, target), (total,))
        assert total.item() == number * (1 << 20)
