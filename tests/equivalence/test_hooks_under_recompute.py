"""Hooks that only observe: once per microbatch, whatever runs again in the backward; the model's own once per step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from autosplit import autosplit
from tests.equivalence.equality import LANES

Seen = list[Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
    return nn.Sequential(*blocks).double().train()


def seen_in_steps(how: str, register: Callable[[nn.Module, Seen], Any], **options: Any) -> tuple[Seen, Seen]:
    """Return what a hook sees in two steps of the plain model, and of the pipe."""
    plain, x = model(), torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    split = deepcopy(plain)
    logs: tuple[Seen, Seen] = ([], [])
    register(plain, logs[0])
    register(split, logs[1])
    pipe = autosplit(split, devices=2, chunks=3, **options)
    for _ in range(2):
        F.mse_loss(plain(x), x.detach()).backward()
        if how == "train_step":
            pipe.train_step(x, target=x.detach(), loss_fn=F.mse_loss)
        else:
            F.mse_loss(pipe(x), x.detach()).backward()
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)
    return logs


@pytest.mark.parametrize("how", ["call", "train_step"])
@pytest.mark.parametrize("lanes", LANES)
def test_an_observing_hook_does_not_see_the_second_run(lanes: str, how: str) -> None:
    def register(net: nn.Module, seen: Seen) -> None:
        net[1][1].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        net[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))

    plain, pipe = seen_in_steps(how, register, lanes=lanes, recompute="always")
    assert sum(map(len, pipe)) == sum(map(len, plain)) == 2 * 2 * 6
    torch.testing.assert_close(sum(t.sum() for t in pipe), sum(t.sum() for t in plain))


@pytest.mark.parametrize("lanes", LANES)
def test_a_hook_that_computes_runs_again(lanes: str) -> None:
    def register(net: nn.Module, seen: Seen) -> None:
        net[1][1].register_forward_hook(lambda module, args, output: output * 2)

    seen_in_steps("train_step", register, lanes=lanes, recompute="always")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("recompute", ["always", "block"])
@pytest.mark.parametrize("make", [nn.utils.weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.4)])
def test_a_hook_that_makes_a_weight_runs_again(make: Callable[[nn.Module], Any], recompute: str) -> None:
    """As ``torch.nn.utils`` has it: a plain attribute, made before each forward."""
    plain, split = model(), model()
    for net in (plain, split):
        torch.manual_seed(1)
        make(net[1][0])
    pipe, x = autosplit(split, devices=2, chunks=3, recompute=recompute), torch.randn(6, 6, dtype=torch.float64)
    for _ in range(2):
        F.mse_loss(plain(x), x).backward()
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)
