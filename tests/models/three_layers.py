"""Small models of the traps: three linear layers, and a forward that each case brings along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.equality import Batch, difference

WIDTH = 6
Body = Callable[..., Any]


class Model(nn.Module):
    """Three linear layers, what a case adds, and a forward that the case brings along."""

    def __init__(self, body: Body, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, part in parts.items():
            value = part() if callable(part) else part
            if isinstance(value, Tensor) and name.startswith("buffer_"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.double()
        self._body = body

    def forward(self, *inputs: Any) -> Any:
        return self._body(self, *inputs)


class Tripled(torch.autograd.Function):
    """The value as it is, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def numbers(*shape: int, seed: int = 0, scale: float = 1.0, gradient: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) * scale).requires_grad_(gradient)


ROWS = Batch((numbers(7, WIDTH, gradient=False),))


def one_step(module: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor], target: Tensor) -> Tensor:
    """Return the plain loss after its backward."""
    loss = loss_fn(module(*batch.args), target)
    loss.backward()
    return loss.detach()


def assert_equal_steps(plain: nn.Module, pipe: Any, batch: Batch, loss_fn: Any, target: Tensor) -> None:
    """Assert that train_step gives the plain loss and gradients."""
    loss = pipe.train_step(*batch.args, target=target, loss_fn=loss_fn)
    assert difference(loss, one_step(plain, batch, loss_fn, target)) <= 1e-12
    for (name, mine), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), f"gradient of {name}"
        assert other.grad is None or difference(mine.grad, other.grad) <= 1e-12, f"gradient of {name}"
