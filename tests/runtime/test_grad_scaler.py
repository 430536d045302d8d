"""Lower precision in training: scaled losses, and sums under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autosplit import autosplit
from autosplit.runtime.loss.proof import prove
from tests.equivalence.equality import LANES, difference
from tests.models.named import numbers

ROWS, WIDTH = 7, 6
PADDED = torch.tensor([1, 2, -100, -100, -100, 0, 5])
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Any]] = {
    "mse": (F.mse_loss, numbers(ROWS, WIDTH, seed=1)),
    "cross entropy, padded": (F.cross_entropy, PADDED),
    "an own mean": (lambda o, t: (o - t).abs().pow(3).mean(), numbers(ROWS, WIDTH, seed=1)),
}


class _Loop:
    """A training loop with a scaler of its own; ``step`` returns the unscaled loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        scaled = self.backward(x, target)
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return scaled / scale

    def backward(self, x: Tensor, target: Tensor) -> Tensor:
        if hasattr(self.model, "train_step"):
            step = self.model.train_step(x, target=target, loss_fn=lambda o, t: self.scaler.scale(self.loss_fn(o, t)))
            assert isinstance(step, Tensor)
            return step
        scaled = self.scaler.scale(self.loss_fn(self.model(x), target))
        scaled.backward()
        return scaled.detach()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_scaled_step_is_the_plain_one_and_an_overflow_is_skipped_by_both(name: str, lanes: str) -> None:
    loss_fn, target = LOSSES[name]
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4, lanes=lanes)
    loops = [_Loop(pipe, loss_fn), _Loop(plain, loss_fn)]
    fine, scales = numbers(ROWS, WIDTH), []
    bad = fine.clone()
    bad[5] = torch.inf
    for x in (fine, fine, fine, bad, fine):
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        mine, theirs = (loop.step(x, target) for loop in loops)
        if x is fine:
            assert difference(mine, theirs) <= 1e-12
        else:
            assert all(torch.equal(b, p) for b, p in zip(before, plain.parameters(), strict=True)), "plain skips"
        assert loops[0].scaler.get_scale() == loops[1].scaler.get_scale()
        scales.append(loops[1].scaler.get_scale())
        for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert difference(one.detach(), other.detach()) <= 1e-12
    assert scales == [4096, 8192, 8192, 4096, 4096], "the scale has grown and fallen"


class CudaSums(TorchFunctionMode):
    """Has sums of bfloat16 come out in float32 where nothing else is asked for, as autocast has it on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.sum, torch.sum) and args[0].dtype == torch.bfloat16 and "dtype" not in kwargs:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


@pytest.fixture
def cuda_sums() -> Any:
    with CudaSums():
        yield


@pytest.mark.usefixtures("cuda_sums")
def test_a_loss_in_bfloat16_is_proved() -> None:
    output = torch.randn(8, 4, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randn(8, 4, dtype=torch.bfloat16)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).float().abs().pow(1.5).mean()

    def rows(microbatch: int | None) -> Tensor:
        return output if microbatch is None else output[4 * microbatch : 4 * microbatch + 4]

    assert prove(loss_fn, rows, target, [target[:4], target[4:]], [4, 4], [output]) == ["mean"]
