"""What a forward neither reads nor sets may change from call to call: it is not recorded anew, whatever it is."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.trainer: Any = SimpleNamespace(step=0, loop=SimpleNamespace(done=False, metrics={}))
        self.losses: list[float] = []
        self.scale = 1.0

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) * self.factor()


class Steps(Plain):
    def factor(self) -> float:
        return 1.0 + self.trainer.step


class Absent(Plain):
    def factor(self) -> float:
        return getattr(self, "extra", 1.0)


class All(Plain):
    def factor(self) -> float:
        return sum(value for value in vars(self).values() if isinstance(value, float))


class Closure(Plain):
    def __init__(self) -> None:
        super().__init__()
        trainer = self.trainer
        self.closure = lambda: 1.0 + trainer.step

    def factor(self) -> float:
        return self.closure()

    def __deepcopy__(self, memo: Any) -> Closure:
        made = Closure()
        made.load_state_dict(self.state_dict())
        return made


class Own(Plain):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def factor(self) -> float:
        return self.scale


class Train(Plain):
    def factor(self) -> float:
        return self.scale if self.training else 1.0


class Resets(Plain):
    """Sets an attribute that it never reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.losses = []
        return super().forward(x)


def step(model: nn.Module, number: int) -> None:
    """What a loop leaves in a model between two steps."""
    model.trainer.step = number
    model.trainer.loop.done = number == 3
    model.trainer.loop.metrics[f"loss{number}"] = number
    model.losses.append(float(number))


def extra(model: nn.Module, number: int) -> None:
    model.extra = 1.0 + number


def scale(model: nn.Module, number: int) -> None:
    model.scale = 1.0 + number


def runs_of(code: Any, act: Callable[[], Any]) -> int:
    """Return how often a function's own code runs: a pipe runs it to record, and no more."""
    counted = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal counted
        counted += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return counted


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    if output.requires_grad:
        output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def both(kind: type[Plain]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind()
    return copy.deepcopy(model), autosplit(model, devices=["cpu"] * 2, chunks=2)


def test_a_trainer_that_counts_is_no_reason_to_record_anew() -> None:
    plain, pipe = both(Plain)
    counts = []
    for number in range(5):
        x = torch.randn(4, 6)
        step(plain, number), step(pipe, number)
        counts.append(runs_of(Plain.forward.__code__, lambda x=x: trained(pipe, x)))
        torch.testing.assert_close(trained(pipe, x), trained(plain, x))
    assert counts[0] > 0
    assert counts[1:] == [0] * 4
    assert pipe.losses == plain.losses


def test_what_another_mode_reads_leaves_the_recordings_of_the_first() -> None:
    plain, pipe = both(Train)
    counts = []
    for mode in (False, True, False, True, False):
        plain.train(mode), pipe.train(mode)
        x = torch.randn(4, 6)
        counts.append(runs_of(Plain.forward.__code__, lambda x=x: pipe(x)))
        torch.testing.assert_close(pipe(x), plain(x))
    assert min(counts[:2]) > 0
    assert counts[2:] == [0] * 3


@pytest.mark.parametrize(
    ("kind", "change"),
    [(Steps, step), (Closure, step), (Absent, extra), (All, scale), (All, extra), (Own, scale), (Train, scale)],
)
def test_what_is_read_is_followed(kind: type[Plain], change: Callable[[nn.Module, int], None]) -> None:
    plain, pipe = both(kind)
    for number in (None, 1, 2, 1):
        x = torch.randn(4, 6)
        if number is not None:
            change(plain, number), change(pipe, number)
        torch.testing.assert_close(trained(pipe, x), trained(plain, x))


def test_an_attribute_that_is_only_set_is_set_in_each_call() -> None:
    plain, pipe = both(Resets)
    for number in range(4):
        step(plain, number), step(pipe, number)
        x = torch.randn(4, 6)
        torch.testing.assert_close(pipe(x), plain(x))
        assert pipe.losses == plain.losses == []
