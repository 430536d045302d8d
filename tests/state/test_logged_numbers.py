"""Numbers that a forward reads of its values and keeps are the whole batch's, as in the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.state.test_side_effects import ROWS, Root, assert_left_alike, batch, same, split


def logs_a_mean(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.log.append(hidden.mean().item())


def logs_a_float(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.held["norm"] = float(hidden.detach().norm())


def logs_now_and_then(block: Any, x: Tensor, hidden: Tensor) -> None:
    if block.calls % 2 == 0:
        block.rows = x.mean().item()
    block.calls += 1


def logs_outside(block: Any, x: Tensor, hidden: Tensor) -> None:
    OUTSIDE.append(hidden.max().item())


OUTSIDE: list[float] = []
LOGS = (logs_a_mean, logs_a_float, logs_now_and_then, logs_outside)


def outside_after(call: Any) -> tuple[Any, list[float]]:
    OUTSIDE.clear()
    return call(), list(OUTSIDE)


@pytest.mark.filterwarnings("ignore:2 devices were given")
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("does", LOGS)
def test_calls_and_steps_log_what_the_plain_model_logs(does: Any, inner: bool) -> None:
    plain = Root(does, inner=inner)
    model = copy.deepcopy(plain)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x, y = batch(rows, seed), batch(rows, seed + 10)
        expected, log = outside_after(lambda x=x: plain(x))
        got, own_log = outside_after(lambda x=x: pipe(x))
        assert same(expected, got)
        assert same(log, own_log)
        assert_left_alike(plain, model)
        F.mse_loss(plain(x), y).backward()
        pipe.train_step(x, target=y, loss_fn=F.mse_loss)
        assert_left_alike(plain, model)
    torch.testing.assert_close(pipe(x), plain(x))
