"""Which recording a call runs by: never a stale one; the least recently used goes first; `.stages` of the last call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit, kept
from autosplit.errors import InputError
from tests.equivalence.equality import LANES
from tests.models.three_layers import WIDTH, Model


class Acting(nn.Module):
    """Calls what its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act: Any = torch.relu
        self.mask = torch.ones(WIDTH)

    def forward(self, value: Tensor, steps: int = 1) -> Tensor:
        value = self.first(value) * self.mask
        for _ in range(steps):
            value = self.act(value)
        return self.last(value)


class Scale:
    """A callable with an attribute."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda value: value * factor


def value(rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "make"), [("act", scaled), ("act", Scale), ("mask", lambda factor: torch.full((WIDTH,), factor))]
)
def test_what_lies_at_a_reused_address_is_another_one(name: str, make: Callable[[float], Any]) -> None:
    model = Acting()
    pipe = autosplit(model, devices=2, chunks=2, recompute="never")
    for factor in range(1, 6):
        setattr(model, name, None)
        setattr(model, name, make(float(factor)))
        torch.testing.assert_close(pipe(value()), model(value()))


def test_the_least_recently_used_recording_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_KEPT", 2)
    model = Acting()
    pipe = autosplit(model, devices=2, chunks=2)

    def made_by(act: Any) -> int:
        before, model.act = pipe._core.recordings.made, act
        pipe(value())
        return pipe._core.recordings.made - before

    assert [made_by(act) for act in (torch.relu, torch.tanh, torch.relu)] == [1, 1, 0]
    assert [made_by(act) for act in (torch.exp, torch.relu, torch.tanh)] == [1, 0, 1]  # tanh was dropped for exp


@pytest.mark.parametrize("lanes", LANES)
def test_stages_are_those_of_the_last_call(lanes: str) -> None:
    pipe = autosplit(Acting(), devices=2, chunks=2, lanes=lanes)
    assert pipe.stages == ()
    pipe(value(), 1)
    first = pipe.stages
    pipe(value(), 2)
    second = pipe.stages
    pipe(value(), 1)
    assert pipe.stages == first != second
    pipe.train_step(value(), 2, target=value(), loss_fn=F.mse_loss)
    assert pipe.stages == second


def whole(model: Any, value: Tensor) -> Tensor:
    """Read a value at the root: no graph can follow it."""
    value = model.a(value)
    return model.b(value / 2 if value.norm().item() > 1e6 else value)


@pytest.mark.parametrize("route", ["graph", "hooks", "tree"])
def test_a_reduction_that_there_is_not_is_refused_on_every_route(route: str) -> None:
    model = Model(whole).float() if route == "tree" else Acting()
    pipe = autosplit(model, devices=2, chunks=2)
    if route == "hooks":
        pipe.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"loss_reduction='average' is not available.*auto.*mean.*sum"):
        pipe.train_step(value(), target=value(), loss_fn=F.mse_loss, loss_reduction="average")
    with pytest.raises(InputError, match="loss_reduction= without loss_fn="):
        pipe.train_step(value(), loss_reduction="mean")
