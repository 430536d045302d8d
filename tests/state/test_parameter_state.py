"""What hangs on a parameter: attributes, sums of gradients, hooks. Planning leaves none, steps leave the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.state.test_outside_state import Net, batch, both, check


class Fused(torch.autograd.Function):
    """Adds the gradient of a weight to an attribute of it, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradient.t() @ x)
        return gradient @ ctx.weight, None


class Accumulates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.weight.main_grad = torch.zeros(8, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b((Fused.apply(self.first(x).tanh(), self.a.weight) + self.a.bias).tanh()).tanh())


@pytest.mark.parametrize("step", [True, False])
def test_sums_of_gradients_on_a_parameter(step: bool) -> None:
    plain, model = both(Accumulates)
    x, y = batch()
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline", sample=x)
    assert not model.a.weight.main_grad.any()
    for _ in range(2):
        nn.functional.mse_loss(plain(x), y).backward()
        if step:
            pipe.train_step(x, target=y, loss_fn=nn.MSELoss())
        else:
            nn.functional.mse_loss(pipe(x), y).backward()
        torch.testing.assert_close(model.a.weight.main_grad, plain.a.weight.main_grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.b.weight.grad, plain.b.weight.grad, rtol=1e-12, atol=1e-12)


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.calls = getattr(self.a.weight, "calls", 0) + 1  # type: ignore[union-attr]
        return super().forward(x)


def test_a_counter_on_a_parameter_counts_calls_and_not_those_of_planning() -> None:
    plain, model = both(Counts)
    x, y = batch()
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline", sample=x)
    assert not hasattr(model.a.weight, "calls")
    for number in range(1, 4):
        check(plain, pipe, nn.MSELoss(), x, y)
        assert model.a.weight.calls == plain.a.weight.calls == number


class HooksItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.a.weight.register_hook(lambda gradient: gradient / 2)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The pipeline of HooksItself has collapsed")
def test_a_hook_that_a_forward_registers_on_its_parameter_is_there_once() -> None:
    plain, model = both(HooksItself)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    for _ in range(3):
        check(plain, pipe, nn.MSELoss(), *batch())
    assert len(model.a.weight._backward_hooks) == 1
