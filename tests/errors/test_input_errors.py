"""Batches that cannot be used, and models whose forward cannot be split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, Sample, autosplit
from tests.equivalence.equality import LANES
from tests.models.three_layers import Tripled

Unchanged = Callable[..., AbstractContextManager[None]]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("planned", [True, False])
def test_an_empty_batch(planned: bool, unchanged: Unchanged) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, sample=numbers(4, 3) if planned else None)
    with unchanged(model, numbers(4, 3)), pytest.raises(InputError, match=r"(?i)0 rows|empty"):
        pipe(numbers(0, 3))
    torch.testing.assert_close(pipe(numbers(4, 3)), model(numbers(4, 3)))


class Boom(RuntimeError):
    """An error of the model's own."""


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


class Lookup(nn.Module):
    """Raises at run time when an index is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(4, 4), nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(value)) + self.table(words))


@pytest.mark.parametrize("lanes", LANES)
def test_a_forward_that_raises_at_run_time_keeps_its_error_and_leaves_the_pipe_usable(
    lanes: str, unchanged: Unchanged
) -> None:
    model = Lookup()
    value, words = numbers(8, 4), torch.arange(8) % 5
    pipe = autosplit(model, devices=["cpu"] * 3, chunks=4, lanes=lanes, sample=(value, words))
    wrong = words.clone()
    wrong[5] = 77
    for call in (pipe, lambda *args: pipe.train_step(*args, target=value, loss_fn=F.mse_loss)):
        with unchanged(model, value, words), pytest.raises(IndexError, match="out of range") as caught:
            call(value, wrong)
        assert "table" in text_of(caught.value)
        torch.testing.assert_close(pipe(value, words), model(value, words))


class Refuse(Tripled):
    """Refuses large gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.abs().max() > 1e6:
            raise Boom("no way back")
        return gradient


class OneWay(nn.Module):
    """Calls a function whose backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(Refuse.apply(torch.tanh(self.first(value))))


@pytest.mark.parametrize("lanes", LANES)
def test_a_backward_that_raises_keeps_its_error(lanes: str) -> None:
    model, value = OneWay(), numbers(8, 4)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes)
    with pytest.raises(Boom, match="no way back"):
        (pipe(value).sum() * 1e9).backward()
    with pytest.raises(Boom, match="no way back"):
        pipe.train_step(value, target=value * 1e9, loss_fn=nn.MSELoss(reduction="sum"))
    results = []
    for module in (pipe, model):
        module.zero_grad()
        module(value).sum().backward()
        results.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_an_error_at_planning_prints_nothing_beside_it(capfd: pytest.CaptureFixture[str]):
    pipe = autosplit(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), devices=2, chunks=2)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipe(torch.zeros(8, 4))
    assert capfd.readouterr() == ("", "")


class Named(nn.Module):
    """Takes two positional inputs and two by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor, other: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return self.last(torch.tanh(self.first(value)) * scale + other)


UNFIT: dict[str, tuple[Sample, str]] = {
    "one that is missing": (Sample(numbers(4, 3)), r"missing 1 required positional argument: 'other'"),
    "an unknown name": (Sample(numbers(4, 3), numbers(4, 4), ratio=2.0), r"unexpected keyword argument 'ratio'"),
    "too many": (Sample(numbers(4, 3), numbers(4, 4), numbers(4, 4)), r"takes 3 positional arguments but 4 were given"),
    "one twice": (Sample(numbers(4, 3), numbers(4, 4), value=numbers(4, 3)), r"multiple values for argument 'value'"),
}


@pytest.mark.parametrize("lanes", LANES)
def test_a_pipe_is_usable_after_a_call_that_does_not_fit(lanes: str) -> None:
    model = Named()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2, lanes=lanes)
    for _ in range(2):
        for sample, reason in UNFIT.values():
            with pytest.raises(TypeError, match=reason):
                pipe(*sample.args, **sample.kwargs)
        torch.testing.assert_close(pipe(numbers(4, 3), numbers(4, 4)), model(numbers(4, 3), numbers(4, 4)))


@pytest.mark.parametrize("step", [True, False])
def test_a_hook_that_computes_with_another_stages_parameter(*, step: bool) -> None:
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), numbers(8, 4)
    first, last = model[0], model[3]
    hook = last.register_forward_hook(lambda module, inputs, output: output @ first.weight)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, sample=x)

    def square(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()

    def run() -> None:
        pipe.train_step(x, target=x, loss_fn=square) if step else square(pipe(x), x).backward()

    with pytest.raises(InputError, match="register the parameter in that module too"):
        run()
    assert first.weight.grad is None
    hook.remove()
    last.other = first.weight
    last.register_forward_hook(lambda module, inputs, output: output @ module.other)
    run()
    found = first.weight.grad
    model.zero_grad()
    square(model(x), x).backward()
    torch.testing.assert_close(found, first.weight.grad)
