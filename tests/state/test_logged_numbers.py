"""Numbers that a forward reads of its values and keeps are the whole batch's, as in the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.pairwise import in_turn
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


def keeps_a_moving_average(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.rows = 0.9 * block.rows + 0.1 * (1 - hidden.mean().item()) ** 2 / len(x)
    block.log.append((hidden > 0).sum().item())


def logs_a_value_that_changes_later(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    changed = hidden + 1
    block.log.append(changed[0, 0].item())
    return changed.mul_(2)


OUTSIDE: list[float] = []
LOGS = (logs_a_mean, logs_now_and_then, logs_outside, keeps_a_moving_average)


def logs_what_is_large(block: Any, x: Tensor, hidden: Tensor) -> None:
    mean = hidden.mean().item()
    if mean > 0:
        block.log.append(mean)


def logs_text(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.log.append(f"{hidden.mean().item():.6f}")


def scales_by_a_number(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    block.rows = x.abs().max().item()
    return hidden / (1 + block.rows)


DECIDES = (logs_a_value_that_changes_later, logs_a_float, logs_what_is_large, logs_text, scales_by_a_number)


def outside_after(call: Any) -> tuple[Any, list[Any]]:
    OUTSIDE.clear()
    return call(), list(OUTSIDE)


def assert_logged_alike(does: Any, *, inner: bool) -> Any:
    """Compare calls and steps of a plain model and its pipe; return the pipe."""
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
    return pipe


@in_turn(rest=False, does=LOGS, inner=[True, False])
def test_numbers_that_are_only_kept_are_outputs_of_the_graph(does: Any, inner: bool) -> None:
    pipe = assert_logged_alike(does, inner=inner)
    assert pipe._core.recordings.tree is None, "a graph follows it"
    assert len(pipe.plan.stages) == 2
    assert pipe.plan.class_flops["micro"] > 0.9


@pytest.mark.filterwarnings("ignore:2 devices were given", "ignore:.*collapsed")
@in_turn(rest=False, does=DECIDES, inner=[False, True])
def test_numbers_that_are_used_are_read_on_the_whole_batch(does: Any, inner: bool) -> None:
    assert_logged_alike(does, inner=inner)
