"""What training loops do around a step: autocast, clipping, accumulation, operations in place at cuts, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import PipelinedModule, autosplit
from tests.equivalence.side_by_side import assert_equal, grads
from tests.pairwise import in_turn

SCHEDULES = {"gpipe": {}, "1f1b": {}, "zb_h1": {}, "interleaved": {"virtual_stages": 2}, "zb_v": {"virtual_stages": 2}}
KINDS = [("inline", "1f1b"), ("inline", "zb_h1"), *(("threads", schedule) for schedule in SCHEDULES)]
WIDTH = 8


class InPlace(nn.Module):
    """Operations in place on what may have crossed a cut: a skip, a view of it, an input, and in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act = nn.ReLU(inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        near = self.first(value)
        far = self.second(near.tanh())
        near.add_(1.0)
        far.view(far.shape[0], 2, -1)[:, 0].mul_(0.5)
        far = F.dropout(self.act(self.third(self.act(far))), 0.0, self.training, inplace=True)
        near += far
        return self.last(near).sigmoid_()


def twice() -> nn.Module:
    """Two of them: operations in place hold values together, so that one has two parts that can be separated."""
    return nn.Sequential(InPlace(), InPlace())


def batch_of(rows: int = 9, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in "xy")  # type: ignore


def step(module: nn.Module, value: Tensor, target: Tensor) -> Tensor:
    """Forward, mean squared error and backward; gradients are added."""
    if isinstance(module, PipelinedModule):
        return module.train_step(value, target=target, loss_fn=F.mse_loss)
    loss = F.mse_loss(module(value), target)
    loss.backward()
    return loss.detach()


def pair(
    make: Callable[[], nn.Module], lanes: str, schedule: str = "1f1b", *, devices: int = 2, dtype: Any = torch.float64
) -> tuple[nn.Module, Any]:
    """The plain model and a pipe of the same numbers."""
    torch.manual_seed(0)
    model = make().to(dtype)
    asked = SCHEDULES[schedule]
    twin = copy.deepcopy(model)
    return model, autosplit(twin, devices=devices, chunks=4, lanes=lanes, schedule=schedule, **asked)


@in_turn(share=(0, 3), kind=KINDS)
def test_operations_in_place_at_cuts(kind: tuple[str, str]) -> None:
    lanes, schedule = kind
    model, pipe = pair(twice, lanes, schedule)
    value, target = batch_of()
    assert_equal([step(pipe, value, target), *grads(pipe)], [step(model, value, target), *grads(model)])
    found = []
    for module in (pipe, model):
        module.zero_grad()
        given = value.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        found.append([output.detach(), given.grad, *grads(module)])
    assert_equal(*found)


@pytest.mark.parametrize(
    ("lanes", "schedule", "precision"),
    [
        ("inline", "1f1b", torch.bfloat16),
        ("threads", "zb_h1", torch.bfloat16),
        ("threads", "zb_v", torch.float16),
        ("threads", "gpipe", torch.float16),
    ],
)
def test_steps_under_autocast(precision: torch.dtype, lanes: str, schedule: str) -> None:
    model, pipe = pair(twice, lanes, schedule, dtype=torch.float32)
    value, target = batch_of(dtype=torch.float32)
    with torch.autocast("cpu", dtype=precision):
        mine, plain = step(pipe, value, target), step(model, value, target)
    assert mine.dtype == plain.dtype
    assert_equal([mine, *grads(pipe)], [plain, *grads(model)], tolerance=3e-2)
    assert not torch.is_autocast_enabled("cpu")
