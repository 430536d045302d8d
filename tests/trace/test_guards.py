"""Guards: a value read that follows from the inputs is asked again of every batch before a recording is used for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.recording.recording import Refusal
from tests.equivalence.equality import LANES, Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, numbers

Body = Callable[..., Any]


def any_masked(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.tanh(model.a(x))
    if mask.any():
        hidden = hidden.masked_fill(mask[:, None], -1.0)
    return model.c(torch.tanh(model.b(hidden)))


def longest(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    hidden = torch.tanh(model.a(x))[:, : lengths.max().item()]
    return model.c(torch.tanh(model.b(hidden))).sum(1)


def first_of_list(model: Any, x: Tensor, steps: Tensor) -> Tensor:
    hidden = model.a(x)
    for count in steps.tolist():
        hidden = torch.tanh(model.b(hidden)) * count
    return model.c(hidden)


def all_equal(model: Any, x: Tensor, ids: Tensor) -> Tensor:
    hidden = torch.tanh(model.a(x))
    return model.c(model.b(hidden) if torch.equal(ids, torch.zeros_like(ids)) else -model.b(hidden))


def counted(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.b(model.a(x)))
    return model.c(hidden) * (2.0 if int(model.buffer_step) >= 3 else 1.0)


def scaled(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.b(model.a(x)))
    return model.c(hidden * model.gain) if float(model.gain.detach()) > 1 else model.c(hidden)


def mask(rows: int, *masked: int) -> Tensor:
    return torch.tensor([row in masked for row in range(rows)])


def flags(rows: int, *masked: int, seed: int = 0) -> Batch:
    return Batch((numbers(rows, WIDTH, seed=seed), mask(rows, *masked)))


def pipe_of(model: nn.Module, **options: Any) -> Any:
    return autosplit(copy.deepcopy(model), **{"devices": ["cpu"] * 2, "chunks": 3, **options})


def made(pipe: Any) -> int:
    return pipe._core.recordings.made


def assert_calls_equal(model: nn.Module, pipe: Any, batches: Sequence[Batch]) -> list[int]:
    """Assert equality batch by batch; return how many recordings had been made after each."""
    counts = []
    for batch in batches:
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))
        counts.append(made(pipe))
    return counts


def recorded(model: nn.Module, batch: Batch) -> Trace:
    return trace(model, Sample(*(value.detach() for value in batch.args)))


@pytest.mark.parametrize("lanes", LANES)
def test_a_violated_guard_records_anew_once_and_the_way_back_costs_nothing(lanes: str) -> None:
    model = Model(any_masked)
    pipe = pipe_of(model, lanes=lanes)
    batches = [flags(7), flags(7, 6, seed=1), flags(7, seed=2), flags(7, 0, 3, seed=3), flags(7), flags(7, 1)]
    batches += [flags(9, 8), flags(9), flags(2, 0), flags(1), flags(1, 0), flags(12, 11), flags(12)]
    assert assert_calls_equal(model, pipe, batches) == [1] + [2] * 12
    assert pipe.plan.rung == "recorded"
    assert pipe.plan.whole == ()


@pytest.mark.parametrize("operation", [torch.cumsum, torch.logcumsumexp, torch.flip])
def test_another_value_chooses_an_operation_that_mixes_rows(operation: Callable[..., Tensor]) -> None:
    """The operation has the name of that in the first recording, which treats rows alone."""

    def along(model: Any, x: Tensor, flag: Tensor) -> Tensor:
        dim = 0 if flag.any() else 1
        return model.c(operation(model.a(x), (dim,) if operation is torch.flip else dim))

    model = Model(along)
    assert assert_calls_equal(model, pipe_of(model), [flags(8), flags(8, 1)]) == [1, 2]


def test_a_guard_in_a_submodule_leaves_it_entered() -> None:
    model = Model(lambda m, x, k: m.c(m.inner(m.a(x), k)), inner=lambda: Model(any_masked))
    found = recorded(model, flags(7, 2))
    assert found.whole == {}
    assert found.guard is not None
    assert [(answer.name, answer.value) for answer in found.guard.answers] == [("inner#0/bool_0", True)]
    names = [info.name for _, info in found.graph.compute_nodes()]
    assert "inner.a#0" in names
    assert not any("any" in name or "read" in name for name in names), "what only a read needs is in no stage"
    assert {info.node_class for _, info in found.graph.compute_nodes()} == {NodeClass.MICRO}
    pipe = pipe_of(model)
    assert assert_calls_equal(model, pipe, [flags(7), flags(7, 1), flags(5), flags(5, 4)]) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (first_of_list, [torch.tensor([1, 2]), torch.tensor([3, 2]), torch.tensor([1, 2])]),
        (all_equal, [torch.zeros(7), torch.ones(7), torch.zeros(7)]),
    ],
)
def test_other_ways_to_read(body: Body, seconds: list[Tensor]) -> None:
    model = Model(body)
    pipe = pipe_of(model, batch_dims=(0, None if len(seconds[0]) == 2 else 0))
    batches = [Batch((numbers(7, WIDTH, seed=seed), second)) for seed, second in enumerate(seconds)]
    assert assert_calls_equal(model, pipe, batches) == [1, 2, 2]


def test_a_buffer_that_the_caller_changes() -> None:
    model = Model(counted, buffer_step=lambda: torch.zeros((), dtype=torch.int64))
    pipe = pipe_of(model)
    counts = []
    for step in (0, 1, 2, 3, 4, 0):
        for each in (model, pipe.unsplit()):
            each.buffer_step.fill_(step)
        counts += assert_calls_equal(model, pipe, [Batch((numbers(7, WIDTH),))])
    assert counts[-1] <= 6
    assert pipe.plan.rung == "recorded"


def test_a_small_parameter_that_an_optimizer_changes() -> None:
    model = Model(scaled, gain=lambda: nn.Parameter(torch.tensor(0.5)))
    pipe = pipe_of(model)
    counts = []
    for gain in (0.5, 1.5, 0.5, 1.5):
        for each in (model, pipe.unsplit()):
            with torch.no_grad():
                each.gain.fill_(gain)
        counts += assert_calls_equal(model, pipe, [Batch((numbers(7, WIDTH),))])
    assert counts == [1, 2, 2, 2]


def test_train_step_asks_the_guard_too() -> None:
    model = Model(any_masked)
    pipe = pipe_of(model)
    for batch in (flags(7), flags(7, 6), flags(7)):
        target = numbers(7, WIDTH, seed=9, gradient=False)
        model.zero_grad()
        pipe.zero_grad()
        loss = pipe.train_step(*batch.fresh().args, target=target, loss_fn=nn.MSELoss())
        plain = F.mse_loss(model(*batch.args), target)
        plain.backward()
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-12, atol=1e-14)
        for mine, other in zip(pipe.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13)
    assert made(pipe) == 2


def in_place(model: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x.add_(1.0)
    return model.c(model.a(x)) if x.sum() > 0 else model.c(model.b(x))


def written(model: Any, x: Tensor) -> Tensor:
    model.buffer_step.add_(1)
    return model.c(model.a(x)) if model.buffer_step > 2 else model.c(model.b(x))


EXPENSIVE: dict[str, tuple[Body, str]] = {
    "a layer": (lambda m, x: m.c(m.a(x)) if m.b(x).mean() > 0 else m.a(x), "depends on a layer"),
    "a large parameter": (lambda m, x: m.c(m.a(x)) if m.large.sum() > 0 else m.a(x), "depends on large parameters"),
    "much computation": (
        lambda m, x: m.c(m.a(x)) if x.new_ones(1 << 13, 1 << 12).sum() > 0 else m.a(x),
        "depends on much computation",
    ),
    "random numbers": (lambda m, x: m.c(m.a(x)) if torch.rand(()) > 0.5 else m.a(x), "depends on random numbers"),
    "in place": (in_place, "depends on values that are changed in place"),
    "a buffer that is written": (written, "depends on values that are changed in place"),
    "numpy": (lambda m, x: m.c(m.a(x)) * float(x.detach().numpy().mean()), "takes a tensor's values out of torch"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_is_no_guard_runs_by_its_own_python(name: str) -> None:
    body, reason = EXPENSIVE[name]
    parts = {"large": lambda: nn.Parameter(torch.ones(65, 64)), "buffer_step": lambda: torch.zeros(())}
    model = Model(body, **parts)
    with pytest.raises(Refusal, match=reason) as caught:
        recorded(copy.deepcopy(model), Batch((numbers(7, WIDTH),)))
    assert "the model's own forward" in str(caught.value)
    assert "test_guards.py:" in str(caught.value)
    assert "torch.where" in str(caught.value) or name == "numpy"
    if name == "random numbers":
        return
    pipe = pipe_of(model)
    batches = [Batch((numbers(count, WIDTH, seed=seed),)) for seed, count in enumerate((7, 7, 4))]
    assert assert_calls_equal(model, pipe, batches) == [0] * 3
    assert pipe.plan.rung == "module tree"
    assert any(reason in note for note in pipe.plan.notes)


def test_a_recording_with_a_guard_is_verified_with_its_answers() -> None:
    """The check runs on two rows of the sample, on which the read would give something else."""
    model = Model(longest)
    batch = Batch((numbers(5, 5, WIDTH), torch.tensor([1, 1, 2, 2, 5])))
    found = recorded(model, batch)
    assert found.guard is not None
    assert [answer.value for answer in found.guard.answers] == [5]
    inputs = [value.detach() for value in batch.args]
    assert found.guard.holds(inputs, 5)
    assert not found.guard.holds([inputs[0], torch.ones(5, dtype=torch.int64)], 5)
    assert not found.guard.holds([inputs[0], torch.tensor([1.5, 2.0, 1.0, 2.0, 2.0])], 5)


@pytest.mark.parametrize("rows", [3, 1])
def test_a_guard_that_compares_with_the_number_of_rows(rows: int) -> None:
    def body(model: Any, x: Tensor, k: Tensor) -> Tensor:
        return model.c(torch.tanh(model.a(x))) if k.sum() > len(x) / 2 else model.c(model.b(x))

    model = Model(body)
    pipe = pipe_of(model)
    batches = [flags(7), flags(7, 1, 2, 3, 4), flags(rows, *range(rows)), flags(rows)]
    counts = assert_calls_equal(model, pipe, batches)
    assert counts[-1] == 2


@pytest.mark.slow
def test_another_value_at_another_length_is_another_recording() -> None:
    model = Model(masked_mean)
    pipe = autosplit(model, ["cpu", "cpu"], 2)
    for length, padded in ((3, False), (5, True), (5, False), (7, True), (7, False)):
        x, mask = numbers(4, length, WIDTH), torch.ones(4, length, dtype=torch.bool)
        mask[0, 2:] = not padded
        torch.testing.assert_close(pipe(x, mask), model(x, mask), rtol=1e-12, atol=1e-12)


def masked_mean(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.tanh(model.b(torch.tanh(model.a(x))))
    return model.c(hidden.mean(1) if mask.all() else (hidden * mask[..., None]).mean(1))
