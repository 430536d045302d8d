"""Counts of a fixed number of values are recorded: a counter beside a layer leaves that in its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit import autosplit
from tests.models.three_layers import WIDTH, Model

ROWS = 8
COUNTERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "an addition": lambda own, taken: own.count.add_(torch.bincount(taken, minlength=WIDTH)),
    "a method": lambda own, taken: own.count.add_(taken.bincount(minlength=WIDTH)),
    "weights": lambda own, taken: own.count.add_(torch.bincount(taken, taken + 0.5, minlength=WIDTH)),
    "an average": lambda own, taken: own.count.copy_(0.9 * own.count + 0.1 * torch.bincount(taken, None, WIDTH)),
}


def counting(count: Callable[[Any, Tensor], Any]) -> Model:
    """A layer that counts which of its columns is the largest."""

    def body(own: Any, x: Tensor) -> Tensor:
        h = own.a(x)
        with torch.no_grad():
            count(own, h.argmax(1))
        return own.c(torch.tanh(own.b(h)))

    model = Model(body)
    model.register_buffer("count", torch.zeros(WIDTH).double())
    return model


@pytest.mark.parametrize("name", COUNTERS)
def test_counts_beside_a_layer_leave_it_in_microbatches(name: str) -> None:
    plain, pipe = counting(COUNTERS[name]), autosplit(counting(COUNTERS[name]), devices=["cpu"] * 2, chunks=4)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH).double()
        torch.testing.assert_close(pipe(x), plain(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    assert pipe.plan is not None
    assert pipe.plan.class_flops["micro"] == 1.0


def test_counts_beyond_the_recorded_number_are_refused_by_name() -> None:
    model = Model(lambda own, x, n: own.c(x) * torch.bincount(n, minlength=3).sum())
    pipe, x, n = autosplit(model, devices=["cpu"] * 2, chunks=4), torch.randn(ROWS, WIDTH).double(), torch.arange(ROWS)
    torch.testing.assert_close(pipe(x, n % 3), model(x, n % 3), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"bincount has 8 counts where minlength=3 was recorded"):
        pipe(x, n)
    longer = autosplit(model, devices=["cpu"] * 2, chunks=4)
    torch.testing.assert_close(longer(x, n), model(x, n), rtol=1e-12, atol=1e-12)
