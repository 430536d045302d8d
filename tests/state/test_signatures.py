"""Calls that differ in what a forward may ask for besides shapes: the pipe gives the plain model's answer each time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autosplit import autosplit
from autosplit.errors import InputError

CONFIG = {"scale": 1.0}


class Settings:
    scale = 1.0


def activation(value: Tensor) -> Tensor:
    return value.tanh()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class OwnGradient(Plain):
    """Differentiates by itself and reads values: it runs by its own Python."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.a(x).tanh().sum(), x)
        return self.b(self.a(x + slope).tanh()) + slope.numpy().mean()


class Statistics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        h = h if self.mean is None else h - self.mean
        return self.b(h * getattr(self.a, "factor", 1.0))


class Outside(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(activation(self.a(x))) * CONFIG["scale"] * Settings.scale


class Layout(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 6) if x.is_contiguous() else x.reshape(len(x), 6) * 2
        return self.b(self.a(x).tanh())


class IsParameter(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if isinstance(x, nn.Parameter) else 1)


class Attention(Plain):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h if memory is x else h + self.a(memory).tanh())


class Inference(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_inference_mode_enabled() else 1)


def models(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = build().double()
    return copy.deepcopy(model), autosplit(model, devices=["cpu"] * 2, chunks=3)


def check(plain: nn.Module, pipe: Any, *args: Tensor) -> None:
    torch.testing.assert_close(pipe(*args), plain(*args), rtol=1e-12, atol=1e-12)
    target = torch.zeros(7, 3).double()
    if torch.is_grad_enabled():
        for module in (plain, pipe):
            module.zero_grad()
        nn.functional.mse_loss(plain(*args), target).backward()
        pipe.train_step(*args, target=target, loss_fn=nn.functional.mse_loss)
        for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(7, *shape, generator=torch.Generator().manual_seed(seed)).double()


def test_buffers_and_attributes_that_come_and_go() -> None:
    plain, pipe = models(Statistics)
    check(plain, pipe, rows(6))
    for value in (torch.ones(8).double(), None):
        plain.mean = pipe.mean = value
        check(plain, pipe, rows(6))
    for factor in (3.0, torch.full((8,), 2.0).double()):
        plain.a.factor = pipe.a.factor = factor
        check(plain, pipe, rows(6))
    del plain.a.factor, pipe.a.factor
    check(plain, pipe, rows(6))


def test_values_outside_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, pipe = models(Outside)
    check(plain, pipe, rows(6))
    monkeypatch.setitem(CONFIG, "scale", 2.0)
    check(plain, pipe, rows(6))
    monkeypatch.setattr(Settings, "scale", 3.0)
    check(plain, pipe, rows(6))
    monkeypatch.setitem(globals(), "activation", torch.relu)
    check(plain, pipe, rows(6))
    monkeypatch.setitem(globals(), "CONFIG", {"scale": 5.0})
    check(plain, pipe, rows(6))
    CONFIG["scale"] = 7.0
    check(plain, pipe, rows(6))


def test_the_layout_of_an_input() -> None:
    plain, pipe = models(Layout)
    for value in (rows(2, 3), rows(3, 2).transpose(1, 2), rows(2, 6)[:, :, ::2], rows(2, 3, seed=1)):
        check(plain, pipe, value)


def test_an_input_that_is_a_parameter() -> None:
    plain, pipe = models(IsParameter)
    for value in (rows(6), nn.Parameter(rows(6)), rows(6, seed=1)):
        check(plain, pipe, value)


def test_one_tensor_given_twice() -> None:
    plain, pipe = models(Attention)
    x, memory = rows(6), rows(6, seed=1)
    for args in ((x, x), (x, memory), (memory, memory), (x, x.clone())):
        check(plain, pipe, *args)


def test_inference_mode() -> None:
    plain, pipe = models(Inference)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            check(plain, pipe, rows(6))


def test_a_counter_of_operations_counts_the_call_alone() -> None:
    plain, pipe = models(Plain)
    with FlopCounterMode(display=False) as expected:
        plain(rows(6))
    for _ in range(2):
        with FlopCounterMode(display=False) as counted:
            pipe(rows(6))
        assert counted.get_total_flops() == expected.get_total_flops()


TRACERS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "vmap": (lambda pipe, x: torch.func.vmap(pipe)(x.expand(2, *x.shape)), "once without it"),
    "jacobian": (lambda pipe, x: torch.func.jacrev(pipe)(x), "once without it"),
    "jit": (lambda pipe, x: torch.jit.trace(pipe, x), "trace the model"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", TRACERS)
def test_a_first_call_under_a_tracer_is_refused(name: str) -> None:
    call, message = TRACERS[name]
    plain, pipe = models(Plain)
    with pytest.raises(InputError, match=message):
        call(pipe, rows(6))
    check(plain, pipe, rows(6))


def _widened(model: Plain) -> None:
    model.b.weight.data, model.b.bias.data = torch.ones(5, 8).double(), torch.ones(5).double()


def test_a_parameter_that_grew_beside_its_old_gradient() -> None:
    plain, pipe = models(Plain)
    check(plain, pipe, rows(6))
    for model in (plain, pipe):
        _widened(model)
    torch.testing.assert_close(pipe(rows(6)), plain(rows(6)), rtol=1e-12, atol=1e-12)


def test_a_first_call_beside_an_old_gradient_of_another_size() -> None:
    plain, pipe = models(OwnGradient)
    for model in (plain, pipe.unsplit()):
        nn.functional.mse_loss(model(rows(6)), torch.zeros(7, 3).double()).backward()
        _widened(model)
    torch.testing.assert_close(pipe(rows(6)), plain(rows(6)), rtol=1e-12, atol=1e-12)
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def scaled(value: Tensor) -> Tensor:
    return value.tanh() * Settings.scale


def test_a_class_attribute_that_a_held_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.activation = scaled

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.activation(self.a(x)))

    plain, pipe = models(Held)
    check(plain, pipe, rows(6))
    monkeypatch.setattr(Settings, "scale", 3.0)
    check(plain, pipe, rows(6))


def test_a_tensor_that_is_no_parameter_and_is_used_twice_gets_its_gradient() -> None:
    class Twice(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.full((6,), 0.5, dtype=torch.float64).requires_grad_()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.factor * self.factor)

    model = Twice().double()
    autosplit(model, ["cpu", "cpu"], 2)(rows(6)).sum().backward()
    found, model.factor.grad = model.factor.grad, None
    model(rows(6)).sum().backward()
    torch.testing.assert_close(found, model.factor.grad, rtol=1e-12, atol=1e-12)
