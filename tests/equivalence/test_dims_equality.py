"""Few recordings serve all lengths; keywords, scalars, dtypes, modes and objects make others under the same plan."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import autosplit, kept, recorded
from tests.equivalence.equality import LANES, Batch, assert_equal_runs, forward_backward, train_step
from tests.models.lengths import CASES, Case, made
from tests.models.three_layers import WIDTH, Model
from tests.pairwise import in_turn


def _pipe(model: nn.Module, lanes: str = "inline", chunks: int = 3) -> Any:
    return autosplit(model, devices=2, chunks=chunks, lanes=lanes)


def _calls(case: Case, count: int, *, low: int = 4, high: int = 14) -> list[Batch]:
    draws = random.Random(0)
    return [
        case.batch(draws.choice((2, 3, 5, 7)), *(draws.randint(low, high) for _ in range(case.lengths)))
        for _ in range(count)
    ]


@in_turn(share=(0, 2), rest=False, name=list(CASES), lanes=LANES)
def test_every_length_is_equal(name: str, lanes: str) -> None:
    torch.manual_seed(0)
    model = CASES[name].make().double()
    pipe = _pipe(model, lanes)
    for batch in _calls(CASES[name], 4):
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    assert made(pipe) == 2
    pipe.unsplit()


def test_training_steps_on_many_lengths() -> None:
    model = CASES["causal"].make().double()
    pipe = autosplit(model, devices=2, chunks=3, schedule="1f1b")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    for batch in _calls(CASES["causal"], 4):
        target = batch.args[0].roll(-1, 1)
        actual = train_step(pipe, batch, target=target, loss_fn=loss)
        plain = forward_backward(model, batch, loss=lambda output, target=target: loss(output, target))
        assert_equal_runs(actual, type(plain)({}, plain.loss, plain.gradients, plain.buffers))
    assert made(pipe) == 2
    pipe.unsplit()


def branching(model: Any, value: Tensor) -> Tensor:
    """Send short sequences one way, long ones another."""
    value = model.a(value)
    return model.b(value.relu() if value.shape[1] > 16 else value)


def counting(model: Any, value: Tensor) -> Tensor:
    """Take the length out of torch: every length is another program."""
    weights = torch.tensor([1.0 / (1 + place) for place in range(value.shape[1])], dtype=value.dtype)
    return model.b(model.a(value) * weights[:, None])


def _lengths(*lengths: int) -> list[Batch]:
    return [Batch((torch.randn(4, length, WIDTH, dtype=torch.float64),)) for length in lengths]


@pytest.mark.parametrize(
    ("make", "batches", "recordings"),
    [
        (CASES["causal"].make, [CASES["causal"].batch(4, length) for length in (10, 20, 64, 33)], 2),
        (lambda: Model(branching), _lengths(5, 9, 40, 20, 16, 17, 3, 33, 60, 12, 18), 5),
        # three attempts to generalise are in vain, then none is made
        (lambda: Model(counting), 2 * _lengths(5, 9, 14, 20, 16), 5 + 3),
        pytest.param(
            CASES["translator"].make,
            [CASES["translator"].batch(4, *both) for both in ((9, 9), (12, 12), (8, 11), (20, 5), (7, 7))],
            3,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a slice of a whole buffer is tried once", "a branch", "left torch", "one symbol becomes two"],
)
def test_recordings_of_many_lengths(make: Callable[[], nn.Module], batches: list[Batch], recordings: int) -> None:
    model = make().double()
    pipe = _pipe(model)
    for batch in batches:
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
    assert made(pipe) == recordings
    pipe.unsplit()


@pytest.mark.slow
def test_dropped_recordings_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_KEPT", 3)
    model = Model(counting)
    pipe = _pipe(model)
    pipe(torch.randn(4, 3, WIDTH, dtype=torch.float64))
    recordings = pipe._core.recordings
    ((first,),) = recordings.kept.values()
    watched = [weakref.ref(value) for value in (first, *first.programs.values(), *first.lowered.stages)]
    del first
    for length in range(4, 9):
        pipe(torch.randn(4, length, WIDTH, dtype=torch.float64))
    gc.collect()
    assert len(recordings.kept) == 3
    assert len(pipe._core.compiled) <= 5  # the kept ones, the empty one, and the one that is shown
    assert [reference() for reference in watched] == [None] * len(watched)
    assert recordings.tree is None  # sizes that do not generalise are no reason to give up recording


# -- keywords, scalars, dtypes, modes, objects that forward reads ----------------------------------------------------
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


def test_a_number_that_never_repeats_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_NUMBERS", 3)
    model = Keywords().double()
    pipe = autosplit(model, devices=2, chunks=3, lanes="inline")
    for step in range(6):
        batch = Batch((_value(),), {"scale": 1.0 + step})
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
        assert (pipe._core.recordings.tree is not None) == (step >= 3)
    assert made(pipe) == 3
