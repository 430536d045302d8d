"""Losses and targets that cannot be used: what is said, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, autosplit

ROWS, WIDTH = 7, 5
Y = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
Unchanged = Callable[..., AbstractContextManager[None]]


class Centre(nn.Module):
    """A loss with a running centre, which every call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre.lerp_(output.detach().mean(0), 0.1)
        return F.mse_loss(output, self.centre.expand_as(output))


def _adaptive(first: Tensor, second: Tensor) -> Tensor:
    """Return twice the first loss; its gradient has a weight that depends on the whole batch."""
    return first + second * (first / second).detach()


def _normed(output: Tensor) -> Tensor:
    """Return the output, whose gradient is scaled to a norm of one."""
    output = output * 1
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / gradient.norm())
    return output


CASES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "no reduction": (lambda o, t: o - t, Y, r"scalar \(0-dim\) tensor, it returned a tensor of shape \[7, 5\]"),
    "one value in a list": (lambda o, t: (o - t).mean().reshape(1), Y, r"scalar.*shape \[1\]"),
    "a number": (lambda o, t: float(F.mse_loss(o, t)), Y, "scalar.*a float"),
    "nothing": (lambda o, t: None, Y, "scalar.*a NoneType"),
    "a dict without a loss": (lambda o, t: {"mse": F.mse_loss(o, t)}, Y, "scalar.*'mse' and no tensor 'loss'"),
    "a tuple that begins with a number": (lambda o, t: (3, o.sum()), Y, "scalar.*does not begin with a tensor"),
    "a root": (lambda o, t: F.mse_loss(o, t).sqrt(), Y, "neither a mean nor a sum.*loss_reduction"),
    "a sum divided by the targets of a microbatch": (
        lambda o, t: F.nll_loss(o, t, reduction="sum") / (t != -100).sum(),
        torch.tensor([-100, -100, -100, 2, 3, 4, 0]),
        r"neither a mean nor a sum.*reduction='mean' and ignore_index=.*counted in the whole target",
    ),
    "divided by itself": (
        lambda o, t: F.mse_loss(o, t) / F.mse_loss(o, t).detach(),
        Y,
        "its gradient is none.*reduction",
    ),
    "an adaptive weight": (lambda o, t: _adaptive((o - t).abs().mean(), F.mse_loss(o, t)), Y, "its gradient is none"),
    "a straight-through penalty": (
        lambda o, t: F.mse_loss(o, t) + o.max() - o.max().detach(),
        Y,
        "its gradient is none",
    ),
    "a hook on its input": (lambda o, t: F.mse_loss(_normed(o), t), Y, "its gradient is none"),
    "a random loss": (lambda o, t: F.mse_loss(F.dropout(o), t), Y, "draws random numbers.*loss_reduction"),
    "a loss with a state": (Centre(), Y, "its own buffer 'centre'.*loss_reduction"),
    "a target in the closure": (
        lambda o, t: F.mse_loss(o, Y),
        Y,
        "^loss_fn raises UserWarning: Using a target size.*fails on microbatch 0, 2 of 7 rows.*target=",
    ),
    "fewer targets": (F.mse_loss, Y[:6], r"shape \[6, 5\], the batch 7 rows"),
    "more targets": (F.mse_loss, torch.cat([Y, Y]), r"shape \[14, 5\], the batch 7 rows"),
    "fewer classes": (F.cross_entropy, torch.zeros(8, dtype=torch.long), r"shape \[8\], the batch 7 rows"),
    "one of several": (lambda o, t: F.mse_loss(o, t["y"]), {"y": Y, "z": Y[:3]}, r"shape \[3, 5\], the batch 7 rows"),
    "an array": (lambda o, t: F.mse_loss(o, torch.from_numpy(t)), Y.numpy(), r"numpy array of shape \[7, 5\]"),
}


@cache
def _models() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    return model, autosplit(model, devices=["cpu"] * 2, chunks=4, sample=Y)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_or_target_that_cannot_be_used_changes_nothing(name: str, unchanged: Unchanged) -> None:
    loss_fn, target, message = CASES[name]
    model, pipe = _models()
    with unchanged(model), pytest.raises(InputError, match=message):
        pipe.train_step(Y, target=target, loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())
