"""State that a forward, a hook or a loss reads outside of the modules: followed where it counts, and nowhere else."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.errors import InputError

SKIPPED: set[int] = set()
TABLE = np.array([1.0, 2.0])
REDUCTION = ["mean"]
settings: Any = types.ModuleType("settings_of_a_script")
counter = loss = norm = 0
criterion: nn.Module = nn.MSELoss()


ACTIVATION: Any = torch.tanh
STEPS: dict[str, Any] = {"shift": lambda x: x + 1, "stretch": lambda x: x * 2}
HELD = {"module": settings}
bound: Any = lambda x, scale=1.0: x * scale  # noqa: E731


class Registry:
    active: ClassVar = ["a"]


class Net(nn.Module):
    """Has attributes of the names of globals that a loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.counter, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), 0, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.a(x).tanh())) * self.factor()

    def factor(self) -> float:
        return 1.0

    def training_step(self, x: Tensor) -> Tensor:
        """Reads a global, and no forward calls it."""
        return self(x).sum() * loss


class Sets(Net):
    def factor(self) -> float:
        return 2.0 if 1 in SKIPPED else 1.0


class ClassList(Net):
    def factor(self) -> float:
        return float(len(Registry.active))


class Array(Net):
    def factor(self) -> float:
        return float(TABLE[0])


class OfModule(Net):
    def factor(self) -> float:
        return settings.scale


class OfParameter(Net):
    def factor(self) -> float:
        return 2.0 if getattr(self.a.weight, "is_hot", False) else 1.0


def helper(x: Tensor) -> Tensor:
    return x * helper.scale  # type: ignore[attr-defined]


helper.scale = 1.0  # type: ignore[attr-defined]


class Activated(Net):
    """Calls an operator, a default, an attribute of a Python module that a dict holds, and steps of a dict in order."""

    def forward(self, x: Tensor) -> Tensor:
        for step in STEPS.values():
            x = step(x)
        return ACTIVATION(super().forward(x)) * HELD["module"].scale * bound(1.0)


class OfFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return helper(super().forward(x))


class Callback:
    """A hook of a class, and what its loop counts in it."""

    def __init__(self) -> None:
        self.scale, self.calls, self.step, self.log = 1.0, 0, 0, list[int]()

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.scale

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.calls += 1
        return out * self.scale


class Hooked(Net):
    """Hooks that read a callback, and a dict in which they count."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.callback, self.state = Callback(), {"calls": 0, "double": False}
        state = self.state

        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            state["calls"] += 1
            return out * 2 if state["double"] else out * 1

        hooks = {"method": self.callback.hook, "object": self.callback, "closure": hook}
        self.a.register_forward_hook(hooks[kind])


def scaled(factor: float) -> Callable[..., Tensor]:
    return lambda module, args, out: out * factor


def halved(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out / 2


def centred(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out - out.mean(0, keepdim=True)


def through(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def rehooked(model: Any, hook: Any) -> None:
    model.a._forward_hooks.clear()
    model.a.register_forward_hook(hook)


def with_skipped(model: Any, step: int) -> None:
    SKIPPED.symmetric_difference_update({1} if step in (1, 3) else ())


def counts(model: Any, step: int) -> None:
    """What the loop of a script sets beside a model."""
    global counter, norm, loss
    counter, norm, loss = step, step, step


def set_module(model: Any, step: int) -> None:
    settings.norm, settings.scale = step, 1.0 + (step == 2)


def set_function(model: Any, step: int) -> None:
    helper.scale = 1.0 + (step == 2)  # type: ignore[attr-defined]


def set_activation(model: Any, step: int) -> None:
    global ACTIVATION
    ACTIVATION = (torch.tanh, torch.relu)[step == 2]


def set_default(model: Any, step: int) -> None:
    global bound
    bound = lambda x, scale=1.0 + (step == 2): x * scale  # noqa: E731


def reorder(model: Any, step: int) -> None:
    first, last = ("shift", "stretch") if step != 2 else ("stretch", "shift")
    for name in (first, last):
        STEPS[name] = STEPS.pop(name)


def set_callback(model: Any, step: int) -> None:
    model.callback.step = step
    model.callback.log.append(step)
    model.callback.scale = 1.0 + (step == 2)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], int]] = {
    "globals with names of attributes": (Net, counts, 1),
    "a set": (Sets, with_skipped, 2),
    "a list of a class": (ClassList, lambda m, i: Registry.active.__setitem__(slice(None), ["a"] * (1 + i % 2)), 2),
    "an array": (Array, lambda m, i: TABLE.__setitem__(0, 1.0 + i % 2), 2),
    "an attribute of a Python module": (OfModule, set_module, 2),
    "an attribute of a function": (OfFunction, set_function, 2),
    "an attribute of a parameter": (OfParameter, lambda m, i: setattr(m.a.weight, "is_hot", i in (1, 2)), 2),
    "an operator": (Activated, set_activation, 2),
    "a default": (Activated, set_default, 2),
    "an attribute of a Python module in a dict": (
        Activated,
        lambda m, i: setattr(settings, "scale", 1.0 + (i == 2)),
        2,
    ),
    "the order of a dict": (Activated, reorder, 2),
    "hooks of one factory": (Net, lambda m, i: rehooked(m, scaled(1.0 + i % 2)), 2),
    "partial hooks": (Net, lambda m, i: rehooked(m, functools.partial(through, (halved, centred)[i % 2])), 2),
    "a flag beside a counter": (lambda: Hooked("closure"), lambda m, i: m.state.update(double=i in (1, 3)), 2),
    "a method of a callback": (lambda: Hooked("method"), set_callback, 2),
    "an object as a hook": (lambda: Hooked("object"), set_callback, 2),
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    set_module(None, 0), set_function(None, 0), SKIPPED.clear()
    set_activation(None, 0), set_default(None, 0), reorder(None, 0)
    Registry.active[:], TABLE[0], REDUCTION[0] = ["a"], 1.0, "mean"


def both(build: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    return plain, build().double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6).double(), torch.randn(8, 6).double()


def check(plain: Any, pipe: Any, loss_fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    for model in (plain, pipe):
        model.zero_grad()
    expected = loss_fn(plain(x), y)
    expected.backward()
    torch.testing.assert_close(pipe.train_step(x, target=y, loss_fn=loss_fn), expected.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_what_counts_is_followed_and_nothing_is_recorded_in_vain(name: str) -> None:
    build, change, recordings = CASES[name]
    plain, model = both(build)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    x, y = batch()
    for step in range(5):
        for each in dict.fromkeys((plain, model) if vars(plain).keys() & {"state"} or "hook" in name else (model,)):
            change(each, step)
        if name == "an attribute of a parameter":
            change(plain, step)
        check(plain, pipe, nn.MSELoss(), x, y)
    assert pipe._core.recordings.made == recordings


def mean_or_sum(out: Tensor, target: Tensor) -> Tensor:
    return getattr((out - target).square(), REDUCTION[0])()


def by_global(out: Tensor, target: Tensor) -> Tensor:
    return criterion(out, target)


class Both(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.first, self.second = nn.MSELoss(reduction=reduction), nn.L1Loss(reduction=reduction)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return self.first(out, target) + self.second(out, target) / 2


class Called:
    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return getattr((out - target).square(), self.reduction)()


def of_list(reduction: str) -> Any:
    REDUCTION[0] = reduction
    return mean_or_sum


def of_global(reduction: str) -> Any:
    global criterion
    criterion = nn.MSELoss(reduction=reduction)
    return by_global


def of_closure(reduction: str) -> Any:
    inner = nn.MSELoss(reduction=reduction)
    return lambda out, target: inner(out, target)


LOSSES: dict[str, Callable[[str], Any]] = {
    "a criterion": lambda reduction: nn.MSELoss(reduction=reduction),
    "a module of criteria": Both,
    "a callable": Called,
    "a list": of_list,
    "a global": of_global,
    "a closure": of_closure,
    "a partial": lambda reduction: functools.partial(nn.functional.mse_loss, reduction=reduction),
    "a method": lambda reduction: Both(reduction).forward,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_known_by_what_it_is(name: str) -> None:
    plain, model = both(Net)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    for step in range(6):
        check(plain, pipe, LOSSES[name](("mean", "sum")[step % 2]), *batch())
    assert pipe._core.recordings.made == 1
    assert len(pipe._core.proofs._kept) <= 2, "one answer for the mean and one for the sum"


def test_a_flag_that_has_a_hook_use_another_parameter_is_refused() -> None:
    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.on = nn.Parameter(torch.ones(8)), [False]
            self.a.register_forward_hook(lambda module, args, out: out * self.scale if self.on[0] else out)

    plain, model = both(Reads)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    x, y = batch()
    check(plain, pipe, nn.MSELoss(), x, y)
    model.on[0] = True
    with pytest.raises(InputError, match="computes with a parameter of shape"):
        pipe.train_step(x, target=y, loss_fn=nn.MSELoss())


COUNTED = [0]


class CountsInTraining(Net):
    """Counts its calls in a global, which evaluation reads or not."""

    reads = True

    def factor(self) -> float:
        if self.training:
            COUNTED[0] += 1
            return 1.0
        return float(COUNTED[0]) if self.reads else 1.0


@pytest.mark.parametrize("reads", [True, False])
def test_a_global_that_training_calls_count_and_evaluation_reads(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountsInTraining, "reads", reads)
    plain, model = both(CountsInTraining)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    for number in range(1, 4):
        COUNTED[0] = 2 * number - 2
        for mode in (True, True, False):
            plain.train(mode), pipe.train(mode)
            x, _ = batch()
            actual = pipe(x)
            now = COUNTED[0]
            torch.testing.assert_close(actual, plain(x), rtol=1e-12, atol=1e-12)
            COUNTED[0] = now
        assert COUNTED[0] == 2 * number
    assert pipe._core.recordings.made == (4 if reads else 2), "evaluation is recorded where it is another"


def test_tensors_that_a_forward_appends_to_a_list_outside() -> None:
    kept: list[Tensor] = []

    class Appends(Net):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(x.detach() * 2)
            return super().forward(x)

    plain, model = both(Appends)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    for _ in range(3):
        x, _ = batch()
        torch.testing.assert_close(pipe(x), plain(x), rtol=1e-12, atol=1e-12)
    assert len(kept) == 6
    for first, second in zip(kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close(first, second)
