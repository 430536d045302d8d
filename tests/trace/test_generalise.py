"""One recording for many lengths: what is found, under which conditions, and when there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.trace.graph import Length
from autosplit.trace.ladder import Trace, trace, widen
from autosplit.trace.shapes.generalise import Domain

Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """A layer, a table, a plain attribute, and a forward that is told."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(40, 4))
        self.told = forward
        self.number = 7
        self.held = torch.arange(40.0)

    def forward(self, value: Tensor) -> Tensor:
        return self.told(self, value)


def wide_of(forward: Forward, *lengths: int, rows: int = 5) -> Trace | None:
    """Record at the first length, generalise with the second at hand."""
    model = Model(forward)
    first, second = (torch.randn(rows, length, 4) for length in lengths)
    base = trace(model, Sample(first))
    symbol = Length("dim0", ((0, 1),))
    return widen(model, base, Sample(second), lengths=(symbol,), before=[tuple(first.shape)])


def domain_of(forward: Forward, *lengths: int, rows: int = 5) -> Domain:
    """Return the domain of what `wide_of` returns."""
    wide = wide_of(forward, *lengths, rows=rows)
    assert wide is not None
    assert wide.domain is not None
    return wide.domain


def _branch(model: Any, value: Tensor) -> Tensor:
    return model.inner(value).relu() if value.shape[1] > 20 else model.inner(value)


def test_a_branch_on_the_length_bounds_the_domain() -> None:
    low, high = domain_of(_branch, 5, 9), domain_of(_branch, 30, 25)
    assert [low.holds(3, {"dim0": n}) for n in (2, 20, 21, 300)] == [True, True, False, False]
    assert [high.holds(3, {"dim0": n}) for n in (2, 20, 21, 300)] == [False, False, True, True]


def test_lengths_on_two_sides_of_a_branch_have_no_common_recording() -> None:
    assert wide_of(_branch, 5, 30) is None
    assert wide_of(_branch, 30, 5) is None


def test_a_table_bounds_the_domain() -> None:
    domain = domain_of(lambda model, x: model.inner(x) + model.table[: x.shape[1]], 5, 9)
    assert domain.holds(3, {"dim0": 39})
    assert not domain.holds(3, {"dim0": 41})


def test_one_row_is_not_in_the_domain_before_it_was_asked() -> None:
    domain = domain_of(lambda model, x: model.inner(x), 5, 9)
    assert domain.holds(2, {"dim0": 8})
    assert not domain.holds(1, {"dim0": 8})
    assert not domain.holds(2, {"dim0": 1})


def test_one_row_at_hand_puts_one_row_in_the_domain() -> None:
    domain = domain_of(lambda model, x: model.inner(x).sum(1), 5, 9, rows=1)
    assert domain.holds(1, {"dim0": 8})
    assert domain.holds(2, {"dim0": 8})


def test_one_row_that_goes_another_way_has_no_common_recording() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.inner(x).relu() if x.shape[0] == 1 and x.shape[1] > 7 else model.inner(x)

    assert wide_of(forward, 5, 9, rows=1) is None
    assert wide_of(forward, 5, 9, rows=2) is not None


GENERAL: dict[str, Forward] = {
    "half": lambda model, x: model.inner(x[:, : x.shape[1] // 2]),
    "ceil": lambda model, x: model.inner(x[:, : math.ceil(x.shape[1] / 3)]),
    "both ends": lambda model, x: model.inner(x[:, x.shape[1] // 2 :]) * (x.shape[0] * x.shape[1]),
    "a float": lambda model, x: model.inner(x) / x.shape[1] ** 0.5,
    "a mean by hand": lambda model, x: model.inner(x).sum(1) * (1 / x.shape[1]),
    "the larger": lambda model, x: model.inner(x) + model.table[: max(x.shape[1], 3)],
    "flat": lambda model, x: model.inner(x.reshape(-1, 4)).view(x.shape[0], x.shape[1], -1),
    "squares": lambda model, x: (model.inner(x) @ x.transpose(1, 2)).reshape(x.shape[0], x.shape[1] ** 2),
    "a range": lambda model, x: model.inner(x) + torch.arange(x.shape[1])[:, None],
    "a table held": lambda model, x: model.inner(x) + model.held[: x.shape[1], None],
    "heads": lambda model, x: model.inner(x).view(*x.shape[:2], 2, 2).transpose(1, 2).flatten(2),
    "windows": lambda model, x: model.inner(x).unfold(1, 3, 2).sum(-1),
    "padding": lambda model, x: F.pad(model.inner(x), (0, 0, 1, 2)),
}


@pytest.mark.parametrize("name", GENERAL)
def test_numbers_at_another_length_are_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = Model(GENERAL[name])
    values = [torch.randn(5, length, 4) for length in (6, 9)]
    base = trace(model, Sample(values[0]))
    wide = widen(model, base, Sample(values[1]), lengths=(Length("dim0", ((0, 1),)),), before=[tuple(values[0].shape)])
    assert wide is not None
    assert wide.domain is not None
    covered = [length for length in range(2, 40) if wide.domain.holds(4, {"dim0": length})]
    assert len(covered) > 30
    for length in covered[::5]:
        value = torch.randn(4, length, 4)
        found = torch.fx.Interpreter(wide.graph.root, graph=wide.graph.graph).run(4, length, value)[0]
        assert torch.equal(found, model(value)), length
        output = next(iter(reversed(wide.graph.graph.nodes))).args[0][0]
        assert output.meta["autosplit"].tensors[0].shape_at(4, {"dim0": length}) == tuple(found.shape)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: Callable[[], int]) -> Tensor:
        ctx.count = count()
        return value * ctx.count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.count, None


SPECIAL: dict[str, Forward] = {
    "int": lambda model, x: model.inner(x) * int(x.shape[1]),
    "math": lambda model, x: model.inner(x) / math.sqrt(x.shape[1]),
    "numpy": lambda model, x: model.inner(x) * float(np.sqrt(x.shape[1])),
    "a list": lambda model, x: model.inner(x) + torch.tensor([float(i) for i in range(x.shape[1])])[:, None],
    "len": lambda model, x: model.inner(x) * len(x[0]),
    "steps": lambda model, x: torch.stack([model.inner(step) for step in x.unbind(1)], 1),
    "text": lambda model, x: model.inner(x) * (2.0 if str(x.shape[1]) == "13" else 3.0),
    "formatted": lambda model, x: model.inner(x) * (2.0 if f"{x.shape[1]}" == "13" else 3.0),
    "a key": lambda model, x: model.inner(x) * {13: 2.0}.get(x.shape[1], 3.0),
    "a function": lambda model, x: _Times.apply(model.inner(x), lambda: x.shape[1]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_length_that_leaves_torch_is_recorded_alone(name: str) -> None:
    assert wide_of(SPECIAL[name], 6, 9) is None


def test_a_model_that_counts_from_the_first_length_has_no_common_recording() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        if not hasattr(model, "first"):
            model.first = x.shape[1]
        return model.inner(x) * (x.shape[1] - model.first)

    model = Model(forward)
    first, second = torch.randn(5, 6, 4), torch.randn(5, 9, 4)
    model(first)
    base = trace(model, Sample(first))
    wide = widen(model, base, Sample(second), lengths=(Length("dim0", ((0, 1),)),), before=[tuple(first.shape)])
    assert wide is not None
    found = torch.fx.Interpreter(wide.graph.root, graph=wide.graph.graph).run(5, 9, second)[0]
    assert torch.equal(found, model(second))
