"""The lane of a CUDA device on a device: late work and memory that is free early change no number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.runtime import ops
from autosplit.runtime.lanes import caller_lane, lane
from tests.runtime.lane_models import MODELS, ROWS, WIDTH, assert_close, loss, plain
from tests.runtime.lane_programs import Program

pytestmark = pytest.mark.cuda
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Late(nn.Module):
    """A stage whose work starts late, forward and backward: who does not wait for it reads what was there before."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *args: Any) -> Any:
        torch.cuda._sleep(2_000_000)
        sent = self.stage(*args)
        for tensor in (tensor for bundle in sent.values() for tensor in bundle if tensor.requires_grad):
            tensor.register_hook(lambda gradient: torch.cuda._sleep(2_000_000))
        return sent


@pytest.mark.parametrize("devices", [["cuda:0"] * 3, ["cpu", "cuda:0"], ["cuda:0", "cpu", "cuda:0"]])
@pytest.mark.parametrize("model", MODELS)
def test_equal_to_the_plain_model_on_a_device(model: Callable[[], nn.Module], devices: list[str]) -> None:
    places = [torch.device(device) for device in devices]
    own = model()
    reference = copy.deepcopy(own)
    program = Program(own, (torch.zeros(ROWS, WIDTH),), [lane(d) for d in places], chunks=3, devices=places, wrap=Late)
    for step in range(5):
        value = torch.randn(ROWS, WIDTH)
        place = places[0] if step % 2 else CPU
        outputs = program(value.to(place), caller=caller_lane(place))
        loss(outputs).backward()
        gradients = [p.grad for p in own.parameters() if p.grad is not None]
        assert_close([*(output.detach() for output in outputs), *gradients], plain(reference, value))
        own.zero_grad(set_to_none=True)


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
