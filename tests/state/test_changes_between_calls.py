"""What a forward depends on in roundabout ways changes between two calls: the pipe gives the plain model's answer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.pairwise import in_turn


class Config:
    def __init__(self) -> None:
        self.scale = 1.0


class Table(dict[str, float]):
    """A dict of a class of the user's own."""


def scaled(factors: list[float], x: Tensor) -> Tensor:
    return x * factors[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls, self.last = 1.0, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x * self.scale
        return self.last


class Base(nn.Module):
    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.config, self.other, self.table = Config(), Config(), Table(scale=1.0)
        self.other.scale = 2.0
        self.current = self.config
        self.reference, self.proxy = weakref.ref(self.config), weakref.proxy(self.config)
        self.part = functools.partial(scaled, [1.0])
        self.bytes, self.deep = bytearray([1]), {"a": [{"b": [1.0]}]}
        self.listed = [Scaled()]
        object.__setattr__(self, "hidden", Scaled())
        self.norm = nn.LayerNorm(6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = self.heads[0]
        self.register_buffer("shift", torch.ones(6))
        self.tensor, self.bias, self.act, self.acts = torch.tensor(2.0), None, torch.tanh, [torch.tanh]
        self.settings = {"square": False, "act": torch.tanh, "scale": self.tensor}
        self.space = SimpleNamespace(act=torch.tanh, scale=self.tensor)


class Derived(Base):
    def __init__(self, last: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self, self.b(self.a(x).tanh()))


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """Return what sets an attribute of a model, or an entry of one: ``table/scale``."""

    def change(model: Any) -> None:
        path_of_owner, separator, name = path.rpartition("/" if "/" in path else ".")
        owner = functools.reduce(getattr, filter(None, path_of_owner.split(".")), model)
        if separator == "/":
            owner[int(name) if name.isdecimal() else name] = value
        else:
            setattr(owner, name, value)

    return change


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "base class": (lambda own, h: h * own.strength, lambda own: setattr(Base, "strength", 3.0)),
    "weak reference": (lambda own, h: h * own.reference().scale, setting("config.scale", 3.0)),
    "weak proxy": (lambda own, h: h * own.proxy.scale, setting("config.scale", 3.0)),
    "partial": (lambda own, h: own.part(h), lambda own: own.part.args[0].__setitem__(0, 3.0)),
    "subclass of dict": (lambda own, h: h * own.table["scale"], setting("table/scale", 3.0)),
    "bytes": (lambda own, h: h * own.bytes[0], setting("bytes/0", 3)),
    "four levels deep": (
        lambda own, h: h * own.deep["a"][0]["b"][0],
        lambda own: own.deep["a"][0]["b"].__setitem__(0, 3.0),
    ),
    "another object": (
        lambda own, h: h * own.current.scale * own.config.scale * own.other.scale,
        lambda own: setattr(own, "current", own.other),
    ),
    "module in a list": (lambda own, h: own.listed[0](h), lambda own: setattr(own.listed[0], "scale", 3.0)),
    "hidden module": (lambda own, h: own.hidden(h), setting("hidden.scale", 3.0)),
    "vars of a layer": (lambda own, h: h + vars(own.norm)["eps"], setting("norm.eps", 1.0)),
    "norm_first": (lambda own, h: own.layer(h[:, None])[:, 0], setting("layer.norm_first", True)),
    "another head": (lambda own, h: own.head(h), lambda own: setattr(own, "head", own.heads[1])),
    "buffer that requires a gradient": (lambda own, h: h * own.shift, lambda own: own.shift.requires_grad_()),
    "dtype of a buffer": (
        lambda own, h: h if own.shift.dtype is torch.float32 else -h,
        lambda own: setattr(own.shift, "data", own.shift.data.double()),
    ),
    "hook on a container": (
        lambda own, h: own.layer(h[:, None])[:, 0],
        lambda own: own.layer.register_forward_hook(lambda module, given, output: output * 2),
    ),
    "hook before a container": (
        lambda own, h: own.layer(h[:, None])[:, 0],
        lambda own: own.layer.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    ),
    "tensor": (lambda own, h: h * own.tensor, setting("tensor", torch.tensor(5.0))),
    "function": (lambda own, h: own.act(h), setting("act", torch.relu)),
    "function in a list": (lambda own, h: own.acts[0](h), setting("acts/0", torch.exp)),
    "flag in a dict": (lambda own, h: h**2 if own.settings["square"] else h, setting("settings/square", True)),
    "function in a dict": (lambda own, h: own.settings["act"](h), setting("settings/act", torch.exp)),
    "tensor in a dict": (lambda own, h: h * own.settings["scale"], setting("settings/scale", torch.tensor(3.0))),
    "function in an object": (lambda own, h: own.space.act(h), setting("space.act", torch.sigmoid)),
    "tensor in an object": (lambda own, h: h * own.space.scale, setting("space.scale", torch.tensor(3.0))),
    "none becomes a tensor": (lambda own, h: h if own.bias is None else h + own.bias, setting("bias", torch.ones(6))),
    "forward": (lambda own, h: own.layer(h[:, None])[:, 0], setting("layer.forward", lambda value: value * 3)),
}


def answers(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    tensors = (*model.parameters(), *model.buffers())
    for tensor in tensors:
        tensor.grad = None
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(tensor.grad for tensor in tensors)]


@in_turn(rest=False, name=list(CASES), training=[True, False])
def test_a_change_between_two_calls(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    last, change = CASES[name]
    monkeypatch.setattr(Base, "strength", 1.0)
    torch.manual_seed(0)
    plain, model = Derived(last).train(training), Derived(last).train(training)
    model.load_state_dict(plain.state_dict())
    pipe = autosplit(model, ["cpu", "cpu"], 2)
    for number in range(3):
        x = torch.randn(4, 6)
        torch.testing.assert_close(answers(pipe, x), answers(plain, x))
        if number == 0:
            change(plain), change(model)
        if number == 1:
            made = pipe._core.recordings.made
    assert pipe._core.recordings.made == made


def test_a_module_that_is_not_registered_keeps_what_a_call_leaves_in_it() -> None:
    plain, model = (Derived(lambda own, h: own.hidden(h) * own.hidden.calls) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    pipe = autosplit(model, ["cpu", "cpu"], 2)
    for number in range(1, 5):
        x = torch.randn(4, 6)
        torch.testing.assert_close(pipe(x), plain(x))
        assert model.hidden.calls == number
        torch.testing.assert_close(model.hidden.last, plain.hidden.last)
