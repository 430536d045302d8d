"""A call like the last one gets the same signature without a walk; whatever a walk would notice is noticed."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autosplit.recorded import PythonRuns
from autosplit.trace.inputs.objects import call_apart
from autosplit.trace.inputs.python_state import OutsideValues
from autosplit.trace.inputs.signature import Key

FACTOR = 1.0
TABLE = {"a": [1, 2], "b": 2.0}
MARKED = "main_grad"


def power(value: Tensor, exponent: float = 1.0) -> Tensor:
    return value**exponent * FACTOR * TABLE["b"]


def cell(scale: float) -> Any:
    def scaled(value: Tensor) -> Tensor:
        return value * scale

    def set_(other: float) -> None:
        nonlocal scale
        scale = other

    return scaled, set_


class Slots:
    __slots__ = ("free", "scale", "steps")

    def __init__(self) -> None:
        self.scale, self.steps = 1.0, [1]


class Config:
    kind = "plain"

    def __init__(self) -> None:
        self.width, self.rope, self.names = 8, {"theta": 1e4, "inner": {"deep": 1}}, ["a", "b"]
        self.deep = types.SimpleNamespace(inner=types.SimpleNamespace(last=types.SimpleNamespace(value=[1])))


class OtherConfig(Config):
    pass


class Log(list[Any]):
    pass


class Part(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.scale, self.shape = config, 1.0, (1, (2, 3))
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class OtherPart(Part):
    pass


class Model(nn.Module):
    """Holds something of every kind."""

    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.parts = nn.ModuleList(Part(self.config) for _ in range(3))
        self.norm, self.spare = nn.BatchNorm1d(4), None
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("late", None)
        self.register_parameter("absent", None)
        self.array, self.set, self.queue = np.ones(3), {1, 2}, collections.deque([1])
        self.partial, self.slots, self.log = functools.partial(power, exponent=2.0), Slots(), Log([1])
        self.scaled, self.set_cell = cell(2.0)
        self.function, self.method, self.constant = power, self.config.names.append, torch.ones(2)
        self.held, self.nested, self.loose = [torch.ones(2)], {"list": [[1, [2, [3]]]]}, nn.Linear(2, 2)
        self.__dict__["loose"] = nn.Linear(2, 2)
        self.bytes, self.generator, self.counter = bytearray(b"ab"), random.Random(0), 0

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return power(self.scaled(x)) + getattr(self.absent, MARKED, 0.0)


def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * FACTOR


def other_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def observer(module: nn.Module, args: Any, output: Tensor) -> None:
    pass


def reorder(table: dict[Any, Any]) -> None:
    first = next(iter(table))
    table[first] = table.pop(first)


def put(target: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(target, name, make(getattr(target, name)))


def set_global(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: globals().__setitem__(name, value)


NOTICED: dict[str, Callable[[Model], Any]] = {
    "an attribute is another number": lambda m: put(m.parts[1], "scale", lambda s: s + 1),
    "an attribute is an equal number of another type": lambda m: put(m.parts[1], "scale", int),
    "an attribute is deleted": lambda m: delattr(m.parts[1], "scale"),
    "an attribute is added": lambda m: setattr(m.parts[1], "extra", 1),
    "a tuple is another": lambda m: setattr(m.parts[1], "shape", (1, (2, 4))),
    "a list has another entry": lambda m: m.config.names.__setitem__(0, "c"),
    "a list has one more": lambda m: m.config.names.append("c"),
    "a list in lists has one more": lambda m: m.nested["list"][0].append(4),
    "a nested config is another": lambda m: m.config.rope.__setitem__("theta", 2.0),
    "a config has another value": lambda m: setattr(m.config, "width", 9),
    "a config has one more": lambda m: setattr(m.config, "more", 9),
    "a config is of another class": lambda m: setattr(m.config, "__class__", OtherConfig),
    "a config has another dict": lambda m: setattr(m.config, "__dict__", {**vars(m.config), "width": 7}),
    "a namespace two levels down": lambda m: setattr(m.config.deep.inner, "last", 2),
    "a namespace as deep as the walk": lambda m: setattr(m.config.deep.inner.last, "value", 2),
    "a dict has another order": lambda m: reorder(m.config.rope),
    "a dict has an equal key of another type": lambda m: m.nested.update({1: 1}) or m.nested.update({1.0: 1}),
    "a set": lambda m: m.set.add(3),
    "a deque": lambda m: m.queue.append(3),
    "a list of the user's": lambda m: m.log.append(3),
    "an attribute of a list of the user's": lambda m: setattr(m.log, "extra", 3),
    "a slot": lambda m: setattr(m.slots, "scale", 2.0),
    "a slot that was free": lambda m: setattr(m.slots, "free", 2.0),
    "a list in a slot": lambda m: m.slots.steps.append(2),
    "an array": lambda m: m.array.__setitem__(0, 5.0),
    "bytes": lambda m: m.bytes.__setitem__(0, 5),
    "keywords of a partial": lambda m: m.partial.keywords.__setitem__("exponent", 3.0),
    "a closure": lambda m: m.set_cell(3.0),
    "a default": lambda m: setattr(power, "__defaults__", (2.0,)),
    "an attribute of a class": lambda m: setattr(Model, "bias", 2.0),
    "a method": lambda m: setattr(Part, "forward", lambda self, x: self.layer(x) * 2),
    "a global": set_global("FACTOR", 2.0),
    "a global list": lambda m: TABLE["a"].append(3),
    "a global dict": set_global("TABLE", {"a": [1, 2], "b": 5.0}),
    "a buffer of another shape": lambda m: setattr(m, "table", torch.ones(4)),
    "a buffer of another dtype": lambda m: setattr(m, "table", torch.ones(3, dtype=torch.float64)),
    "a buffer whose data are others": lambda m: setattr(m.table, "data", torch.ones(3).half()),
    "a buffer that requires a gradient": lambda m: m.table.requires_grad_(),
    "a buffer that was None": lambda m: setattr(m, "late", torch.ones(1)),
    "a buffer that is None": lambda m: setattr(m, "table", None),
    "a buffer that is nested": lambda m: setattr(m, "table", torch.nested.nested_tensor([torch.ones(1)])),
    "a parameter of another shape": lambda m: setattr(m.parts[0].layer, "bias", nn.Parameter(torch.ones(4, 1))),
    "a parameter that is None": lambda m: setattr(m.parts[0].layer, "bias", None),
    "a parameter that was None": lambda m: setattr(m, "absent", nn.Parameter(torch.ones(1))),
    "a frozen parameter": lambda m: m.parts[0].layer.weight.requires_grad_(False),
    "data of another dtype": lambda m: put(m.parts[0].layer.weight, "data", Tensor.double),
    "data of another shape": lambda m: put(m.parts[0].layer.weight, "data", lambda d: d[:2]),
    "data of another order": lambda m: put(m.parts[0].layer.weight, "data", lambda d: d[:, :2]),
    "all of another dtype": lambda m: m.double(),
    "a tie": lambda m: setattr(m.parts[0].layer, "weight", m.parts[1].layer.weight),
    "a parameter's attribute that code mentions": lambda m: setattr(m.parts[0].layer.weight, MARKED, 1.0),
    "a constant of another shape": lambda m: setattr(m, "constant", torch.ones(3)),
    "another constant": lambda m: setattr(m, "constant", torch.ones(2)),
    "a constant whose data are others": lambda m: setattr(m.constant, "data", torch.ones(3)),
    "another tensor in a list": lambda m: m.held.__setitem__(0, torch.ones(2)),
    "a tensor in a list whose data are others": lambda m: setattr(m.held[0], "data", torch.ones(3)),
    "a child is None": lambda m: setattr(m.parts[0], "drop", None),
    "a child was None": lambda m: setattr(m, "spare", nn.Identity()),
    "a child of another class": lambda m: m.parts.__setitem__(1, OtherPart(m.config)),
    "a module of another class": lambda m: setattr(m.parts[1], "__class__", OtherPart),
    "one more child": lambda m: m.parts.append(Part(m.config)),
    "a child gone": lambda m: m.parts.__delitem__(2),
    "a shared child": lambda m: m.parts.__setitem__(1, m.parts[0]),
    "children in another order": lambda m: reorder(m.parts[0]._modules),
    "a mode deep inside": lambda m: m.parts[2].drop.eval(),
    "eval mode": lambda m: m.eval(),
    "a hook": lambda m: m.parts[0].register_forward_hook(hook),
    "a hook that observes": lambda m: m.parts[0].register_forward_hook(observer),
    "a pre-hook": lambda m: m.parts[0].register_forward_pre_hook(lambda module, args: None),
    "a hook of the backward": lambda m: m.parts[0].register_full_backward_hook(lambda *_: None),
    "a module that is no child": lambda m: m.loose.register_buffer("more", torch.ones(1)),
    "a mode of a module that is no child": lambda m: m.loose.eval(),
    "tables of another module": lambda m: setattr(m.parts[0].layer, "__dict__", nn.Linear(4, 4, bias=False).__dict__),
    "another function": lambda m: setattr(m, "function", other_hook),
    "another code": lambda m: setattr(power, "__code__", (lambda value, exponent=1.0: value).__code__),
}
SAME: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda m: None,
    "values of parameters": lambda m: m.parts[0].layer.weight.data.add_(1),
    "gradients": lambda m: [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()],
    "values of buffers": lambda m: m.table.add_(1),
    "the same mode": lambda m: m.train(),
    "modes to and fro": lambda m: m.eval().train(),
    "a value deeper than the walk": lambda m: m.config.deep.inner.last.value.append(2),
    "the state of a generator": lambda m: m.generator.gauss(0, 1),
    "a like buffer": lambda m: setattr(m, "table", torch.zeros(3)),
    "a like parameter": lambda m: setattr(m.parts[0].layer, "weight", nn.Parameter(torch.zeros(4, 4))),
    "a like child": lambda m: m.parts.__setitem__(1, Part(m.config)),
    "an equal number": lambda m: put(m.parts[1], "scale", lambda s: float(str(s))),
    "an equal list": lambda m: put(m.config, "names", list),
    "an equal table": lambda m: setattr(m.parts[0].layer, "_parameters", dict(m.parts[0].layer._parameters)),
}
UNTOUCHED: dict[str, Callable[[Model], Any]] = {
    "a counter": lambda m: put(m, "counter", lambda c: c + 1),
    "an attribute set to and fro": lambda m: [put(m, "counter", lambda c, by=by: c + by) for by in (1, -1)],
    "another list": lambda m: m.queue.append(1),
}


@pytest.fixture(autouse=True)
def _globals_as_they_were() -> Iterator[None]:
    """Put back what changes of globals, classes and functions leave."""
    kept = {name: copy.deepcopy(globals()[name]) for name in ("FACTOR", "TABLE")}
    forward, code, defaults = Part.forward, power.__code__, power.__defaults__
    yield
    globals().update(kept)
    Model.bias, Part.forward = 0.0, forward  # type: ignore[method-assign]
    power.__code__, power.__defaults__ = code, defaults


def signature(runs: PythonRuns) -> Key:
    return runs.key_of(*call_apart((torch.ones(2, 4),), {}))


def walked(runs: PythonRuns) -> Key:
    """Return the signature that a walk gives that nothing was kept for."""
    runs = copy.copy(runs)
    runs.token, runs._outside, runs._keys = None, OutsideValues(), lambda *_: {}
    return signature(runs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", NOTICED)
def test_what_a_walk_notices_is_noticed(change: str) -> None:
    model = Model()
    runs = PythonRuns(model)
    before = signature(runs)
    assert signature(runs) is before
    NOTICED[change](model)
    after = signature(runs)
    assert after == walked(runs)
    assert after != before
    assert signature(runs) is after


@pytest.mark.parametrize("change", SAME)
def test_what_a_walk_does_not_notice_keeps_the_signature(change: str) -> None:
    model = Model()
    runs = PythonRuns(model)
    before = signature(runs)
    SAME[change](model)
    assert signature(runs) == walked(runs) == before


@pytest.mark.parametrize("change", UNTOUCHED)
def test_what_recordings_do_not_touch_needs_no_walk(change: str) -> None:
    model = Model()
    runs = PythonRuns(model)
    with runs.watched():
        model(torch.ones(2, 4))
    before, token = signature(runs), runs.token
    UNTOUCHED[change](model)
    assert signature(runs) is before
    assert runs.token is token


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("seed", range(20))
def test_signatures_of_many_changes_are_those_of_walks(seed: int) -> None:
    model, draw = Model(), random.Random(seed)
    runs = PythonRuns(model)
    changes = {**NOTICED, **SAME, **UNTOUCHED}
    for name in draw.choices(sorted(changes), k=30):
        with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError):  # gone by then
            changes[name](model)
        assert signature(runs) == walked(runs), name


def test_what_an_attribute_leaves_out_counts_in_another() -> None:
    model = Model()
    runs = PythonRuns(model)
    runs._leave_out({("", "config")})
    before = signature(runs)
    model.config.width = 9
    assert signature(runs) == walked(runs) != before
