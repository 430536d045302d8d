"""A training step keeps, moves and merges only the outputs that its loss uses."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import InputError, autosplit
from autosplit.runtime.loss.outputs import Placeholder
from autosplit.runtime.transport import SharedMemory
from autosplit.schedule.entry import Route

X = torch.randn(8, 6, dtype=torch.float64)


class Cache:
    """What each layer made."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Net(nn.Module):
    """Returns a value per layer beside its result, and with labels a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the result, what each layer made, and the loss."""
        cache, scale = Cache(), torch.ones(3, dtype=torch.float64)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            cache.kept.append(x.repeat(1, 50))
        loss = None if y is None else nn.functional.mse_loss(x, y)
        return {"loss": loss, "out": x, "cache": cache, "scale": scale}


def gradients(model: nn.Module) -> list[Any]:
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


class Watch:
    """Notes the bytes of what reaches the last stage for the loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        plain = SharedMemory.recv

        def recv(transport: SharedMemory, route: Route) -> Any:
            message = plain(transport, route)
            if route.loss and not route.backward:
                self.bytes += sum(t.numel() * t.element_size() for t in message if t is not None)
            return message

        monkeypatch.setattr(SharedMemory, "recv", recv)


@pytest.mark.parametrize("lanes", ["threads", "inline"])
@pytest.mark.parametrize("layer", [None, 0, 2])
def test_what_a_loss_uses(lanes: str, layer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        extra = 0.0 if layer is None else output["cache"].kept[layer].square().mean()
        return (output["out"] - target).square().mean() + extra

    model, target = Net(), torch.randn(8, 6, dtype=torch.float64)
    pipe = autosplit(model, devices=2, chunks=4, sample=X, lanes=lanes, schedule="1f1b", recompute="never")
    watch = Watch(monkeypatch)
    for _ in range(2):
        wanted = loss_fn(model(X), target)
        wanted.backward()
        expected = gradients(model)
        watch.bytes = 0
        torch.testing.assert_close(pipe.train_step(X, target=target, loss_fn=loss_fn), wanted.detach())
        torch.testing.assert_close(gradients(model), expected)
        assert watch.bytes == 0 or layer is not None


def test_the_models_own_loss_leaves_the_cache_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, y = Net(), torch.randn(8, 6, dtype=torch.float64)
    pipe = autosplit(model, devices=2, chunks=4, sample=(X, y), schedule="1f1b", recompute="never")
    watch = Watch(monkeypatch)
    wanted = model(X, y)["loss"]
    wanted.backward()
    expected = gradients(model)
    torch.testing.assert_close(pipe.train_step(X, y), wanted.detach())
    torch.testing.assert_close(gradients(model), expected)
    assert watch.bytes == 0


class Own(nn.Module):
    """A loss that uses the cache from some step on."""

    more = False

    def forward(self, output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        extra = output["cache"].kept[0].mean() if self.more or "MORE" in os.environ else 0.0
        assert output["cache"].kept[0].shape[1] == 300
        return (output["out"] - target).square().mean() + extra


def test_a_loss_that_uses_more_later_is_another_one() -> None:
    model, loss = Net(), Own()
    pipe = autosplit(model, devices=2, chunks=4, sample=X)
    for loss.more in (False, True, False):
        model.zero_grad()
        wanted = loss(model(X), X)
        wanted.backward()
        expected = gradients(model)
        model.zero_grad()
        torch.testing.assert_close(pipe.train_step(X, target=X, loss_fn=loss), wanted.detach())
        torch.testing.assert_close(gradients(model), expected)


def test_a_loss_that_uses_more_later_unseen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = Net(), Own()
    pipe = autosplit(model, devices=2, chunks=4, sample=X)
    pipe.train_step(X, target=X, loss_fn=loss)
    model.zero_grad()
    monkeypatch.setenv("MORE", "")  # which no signature has
    with pytest.raises(InputError, match="did not use before"):
        pipe.train_step(X, target=X, loss_fn=loss)
    assert all(p.grad is None for p in model.parameters())
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Placeholder]
