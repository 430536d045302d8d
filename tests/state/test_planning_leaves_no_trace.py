"""Recording, planning and checking leave no trace in Python state, wherever it lives, and call no observer's hook."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.models.three_layers import WIDTH, Model, numbers

X = numbers(6, WIDTH, gradient=False)
CALLS = 0
LOG: list[str] = []


class Hits:
    """Counts on the class and on the instance."""

    total = 0

    def __init__(self) -> None:
        self.own = 0

    def hit(self) -> None:
        Hits.total += 1
        self.own += 1


HITS = Hits()


def plain(model: Any, x: Tensor) -> Tensor:
    return model.c(torch.relu(model.b(torch.relu(model.a(x)))))


def counts_globally(model: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    LOG.append("call")
    HITS.hit()
    return plain(model, x)


@functools.lru_cache
def table(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64)


def cached(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) + table(WIDTH)


def test_state_outside_of_the_modules_is_as_before() -> None:
    autosplit(Model(counts_globally), devices=["cpu"] * 2, chunks=2, sample=X)
    assert (CALLS, LOG, Hits.total, HITS.own) == (0, [], 0, 0)


def test_a_function_that_caches_tensors_keeps_none_of_a_recording() -> None:
    table.cache_clear()
    model = Model(cached)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2, sample=X)
    assert type(table(WIDTH)) is Tensor
    torch.testing.assert_close(pipe(X), model(X), rtol=1e-12, atol=1e-12)


def everything(model: nn.Module) -> Iterator[Any]:
    for path, module in model.named_modules():
        yield path, type(module), list(module.__dict__)
        for name, value in module.__dict__.items():
            yield name, id(value), [*value.items()] if isinstance(value, dict) else value


class Inner(nn.Module):
    """Changes what it can of itself: attributes, hooks, its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.log = nn.Linear(WIDTH, WIDTH).double(), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.first = x.shape
        if self.calls == 1:
            self.layer.register_forward_hook(lambda module, args, out: None)
            self.__class__ = Other
        return self.layer(x)


class Other(Inner):
    """What the class is from the first call on."""


def test_modules_are_as_before() -> None:
    model = Model(lambda m, x: m.c(m.inner(m.a(x))), inner=Inner)
    before = list(everything(model))
    autosplit(model, devices=["cpu"] * 2, chunks=2, sample=X)
    assert list(everything(model)) == before


def test_no_hook_of_an_observer_is_called_while_planning() -> None:
    seen: list[Any] = []
    backward: list[Any] = []

    def observe(module: nn.Module, args: Any, out: Any) -> None:
        seen.append(type(out))

    def observe_gradient(module: nn.Module, given: Any, made: Any) -> None:
        backward.append(made)

    model = Model(plain)
    model.a.register_forward_hook(observe)
    model.b.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    model.c.register_full_backward_hook(observe_gradient)
    every = nn.modules.module.register_module_forward_hook(observe)
    try:
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=2, sample=X)
    finally:
        every.remove()
    assert seen == []
    assert backward == []
    pipe(X).sum().backward()
    assert seen.count(Tensor) == seen.count(1) == len(backward) == 2
