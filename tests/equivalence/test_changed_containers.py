"""Lists and dicts of the caller's that a forward changes: they are left as the plain model leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.models.three_layers import WIDTH, Model, numbers


def entry(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["mask"] = (batch["x"][:, :1] > 0).to(batch["x"])
    return model.b(torch.tanh(model.a(batch["x"])) * batch["mask"])


def replaced(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] * 2
    return model.b(torch.tanh(model.a(batch["x"])))


def nested(model: Any, batch: dict[str, Any]) -> Tensor:
    batch.setdefault("seen", []).append(batch["x"].sum(1))
    batch.pop("y")
    return model.b(torch.tanh(model.a(batch["x"])))


def appended(model: Any, values: list[Tensor]) -> Tensor:
    values.append(values[0] * 2)
    return model.b(torch.tanh(model.a(values[0])))


def mixed(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] - batch["x"].mean(0)
    return model.b(torch.tanh(model.a(batch["x"])))


BODIES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any]]] = {
    "an entry": (entry, lambda x: {"x": x}),
    "another value": (replaced, lambda x: {"x": x}),
    "a nested list, and an entry less": (nested, lambda x: {"x": x, "y": x[:, 0]}),
    "an element": (appended, lambda x: [x]),
    "a value of all rows": (mixed, lambda x: {"x": x}),
}


@pytest.mark.filterwarnings("ignore:2 devices were given")
@pytest.mark.parametrize("name", BODIES)
def test_the_callers_list_or_dict_is_changed_as_by_the_model(name: str) -> None:
    body, made = BODIES[name]
    model = Model(body)
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=3)
    value = numbers(7, WIDTH, gradient=False)
    with pytest.warns(UserWarning, match="forward changes a list or dict that it is given"):
        assert_given(model, pipe, made, value)
    assert_given(model, pipe, made, value)
    own, mine = made(value), made(value)
    loss = F.mse_loss(model(own), value)
    torch.testing.assert_close(pipe.train_step(mine, target=value, loss_fn=F.mse_loss), loss.detach())
    assert_same(mine, own)


def assert_given(model: nn.Module, pipe: nn.Module, made: Callable[[Tensor], Any], value: Tensor) -> None:
    own, mine = made(value), made(value)
    assert_same(pipe(mine), model(own))
    assert_same(mine, own)


def assert_same(mine: Any, own: Any) -> None:
    torch.testing.assert_close(mine, own, rtol=1e-12, atol=1e-12)
