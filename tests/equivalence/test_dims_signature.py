"""What makes another recording under the same plan: keywords, scalars, dtypes, modes, objects that forward reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit, recorded
from tests.equivalence.equality import Batch, assert_equal_runs, difference, forward_backward
from tests.models.lengths import CASES, made


class Keywords(nn.Module):
    """Takes tensors, None, flags, text and numbers, by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, value: Tensor, other: Tensor | None = None, flag: bool = False, kind: str = "none", scale: float = 1.0
    ) -> Tensor:
        value = self.first(value)
        if other is not None:
            value = value + other
        if flag:
            value = value.relu()
        value = self.second(value) * scale
        return self.third(value.tanh() if kind == "tanh" else value)


def _value() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


def test_every_set_of_keywords_runs_under_one_plan() -> None:
    model = Keywords().double()
    pipe = autosplit(model, devices=2, chunks=3, lanes="inline")
    calls = [
        Batch((_value(),)),
        Batch((), {"value": _value()}),
        Batch((_value(), _value())),
        Batch((_value(),), {"other": _value()}),
        Batch((_value(),), {"other": None}),
        Batch((_value(), None, True)),
        Batch((_value(),), {"flag": True, "kind": "tanh"}),
        Batch((_value(),), {"kind": "tanh", "flag": True}),
        Batch((_value(),), {"scale": 2}),
        Batch((_value(),), {"scale": 2.0}),
        Batch((_value(),), {"scale": 0.5}),
    ]
    plans = set()
    for batch in (*calls, *calls):
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
        plans.add(id(pipe.plan))
    assert len(plans) == 1
    assert made(pipe) <= len(calls)


def test_dtype_and_modes_record_anew_under_one_plan() -> None:
    model = CASES["padded"].make()
    pipe = autosplit(model, devices=2, chunks=2, lanes="inline")
    batch = CASES["padded"].batch(4, 9)
    plan: Any = None
    for change in (
        lambda: None,
        lambda: pipe.double(),
        lambda: pipe.eval(),
        lambda: [p.requires_grad_(False) for p in model.words.parameters()],
    ):
        change()
        actual, plain = forward_backward(pipe, batch), forward_backward(model, batch)
        assert_equal_runs(actual, plain, dtype=next(model.parameters()).dtype)
        plan = plan or pipe.plan
        assert pipe.plan is plan
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = model(*batch.args, **batch.kwargs), pipe(*batch.args, **batch.kwargs)
    assert difference(found["classes"], expected["classes"]) < 1e-2  # bfloat16's rounding, by microbatch
    assert pipe.plan is plan


@dataclass
class Inner:
    """A part of a configuration."""

    gain: float = 2.0


@dataclass
class Config:
    """What the model reads at every call."""

    relu: bool = False
    steps: int = 1
    widths: tuple[int, ...] = (4, 4)
    inner: Inner = field(default_factory=Inner)


class Configured(nn.Module):
    """Reads an object's attributes in forward; a child holds the same object."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.child = nn.Sequential(nn.Linear(4, 4))
        self.child.config = config

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for _ in range(self.config.steps):
            value = self.child(value)
        value = value.relu() if self.config.relu else value
        return self.second(value) * self.config.inner.gain * self.config.widths[0]


@pytest.mark.parametrize("make", [Config, lambda: SimpleNamespace(relu=False, steps=1, widths=[4, 4], inner=Inner())])
def test_a_changed_configuration_records_anew(make: Any) -> None:
    config = make()
    model = Configured(config).double()
    pipe = autosplit(model, devices=2, chunks=3, lanes="inline")
    changes = [("relu", True), ("steps", 2), ("widths", type(config.widths)((3, 4)))]
    batch = Batch((_value(),))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    for number, (name, value) in enumerate(changes, start=2):
        setattr(config, name, value)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
        assert made(pipe) == number
    config.inner.gain = 3.0
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    assert made(pipe) == len(changes) + 2
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    assert made(pipe) == len(changes) + 2


def test_lengths_are_generalised_beside_other_keywords() -> None:
    """Kinds of calls with other numbers of inputs are kept at the same time."""
    model = CASES["padded"].make().double()
    pipe = autosplit(model, devices=2, chunks=2, lanes="inline")
    for length in (9, 6, 12, 20):
        padded = CASES["padded"].batch(4, length)
        for batch in (padded, Batch(padded.args), Batch(padded.args, {"scale": 2.0})):
            assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    assert made(pipe) == 6


def test_a_number_that_never_repeats_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_KEPT", 3)
    model = Keywords().double()
    pipe = autosplit(model, devices=2, chunks=3, lanes="inline")
    for step in range(6):
        batch = Batch((_value(),), {"scale": 1.0 + step})
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
        assert (pipe._core.recordings.tree is not None) == (step >= 3)
    assert made(pipe) == 3
