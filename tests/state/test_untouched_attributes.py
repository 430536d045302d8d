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


class Deciding(nn.Module):
    """Reads a value, so that it runs by its own Python, and keeps something in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)
        self.log: list[float] = []
        self.calls, self.mixes, self.limit = 0, False, 4.0
        self.register_buffer("sums", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        self.log.append(x.sum().item())
        x = x * 2 if self.log[-1] > self.limit else x
        return x - x.mean(0) if self.mixes else x


class Counts(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.calls += 1
        if self.calls % 3 == 0:
            self.sums += x.detach().mean(0)  # type: ignore[operator]
            x = self.dropout(x)
        return x


class Around(nn.Module):
    def __init__(self, kind: type[Deciding]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), kind(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)) + self.inner.sums)


class LooksInside(Around):
    """Reads what another module keeps, before that is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if self.inner.log and self.inner.log[-1] > 0 else x)


class SharesInside(Around):
    """Reads what another module keeps by an attribute of its own."""

    def __init__(self, kind: type[Deciding]) -> None:
        super().__init__(kind)
        self.known = self.inner.log

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if self.known and self.known[-1] > 0 else x)


def keeps(model: Any, step: int) -> None:
    """Set nothing: the module alone changes its attributes."""


def sets_a_flag(model: Any, step: int) -> None:
    model.inner.mixes = step in (2, 3)


def sets_a_number(model: Any, step: int) -> None:
    model.inner.limit = 4.0 if step < 2 else -100.0


@pytest.mark.filterwarnings("ignore:The pipeline of")
@pytest.mark.parametrize(
    ("model", "kind", "between", "recordings"),
    [
        (Around, Deciding, keeps, 1),
        (Around, Deciding, sets_a_flag, 2),
        (Around, Deciding, sets_a_number, 2),
        (Around, Counts, keeps, 2),
        (LooksInside, Deciding, keeps, 5),
        (SharesInside, Deciding, keeps, 5),
    ],
    ids=["log", "flag", "number", "counter", "read by another", "shared with another"],
)
def test_what_a_module_that_runs_by_its_own_python_keeps(model: Any, kind: Any, between: Any, recordings: int) -> None:
    """It is not recorded anew for that; what the caller sets, and what recorded Python reads, is followed."""
    torch.manual_seed(0)
    split = model(kind).double()
    plain = copy.deepcopy(split)
    pipe = autosplit(split, devices=["cpu"] * 2, chunks=4, lanes="inline")
    for step in range(5):
        x = torch.linspace(step - 4, 1, 48, dtype=torch.float64).reshape(8, 6)
        for each in (plain, split):
            between(each, step)
        torch.manual_seed(step)
        expected = nn.functional.mse_loss(plain(x), x)
        expected.backward()
        torch.manual_seed(step)
        torch.testing.assert_close(pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss), expected.detach())
        torch.testing.assert_close(split.inner.log, plain.inner.log)
        torch.testing.assert_close(split.inner.sums, plain.inner.sums)
        assert split.inner.calls == plain.inner.calls
    for own, other in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert len(pipe.recordings) <= recordings
