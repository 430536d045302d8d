"""Microbatches that the caller cut, in one schedule: losses, gradients, buffers and draws of the loop over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosplit import InputError, Sample, autosplit
from autosplit.runtime.step.train_cells import TrainCells
from autosplit.schedule.action import Action
from tests.pairwise import mostly_slow

SIZES = (2, 3, 2, 4)
TOLERANCE = 1e-12


class Routing(nn.Module):
    """Rows meet in its loss, and it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x).relu()
        gate = self.gate(x).softmax(-1)
        logits = self.head(self.drop(self.second(x) * gate[:, :1]) + x)
        return {"loss": F.cross_entropy(logits, y) + gate.mean(0).square().sum(), "logits": logits}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.second, self.mean, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.mean(self.second(self.norm(self.first(x)))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Tied(nn.Module):
    """A tied table and a value that a step makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(4, 8), nn.Parameter(torch.ones(8))
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = torch.tanh(self.scale)
        logits = self.head(x + self.table(y) * scale + self.second(self.first(x).relu()) * scale)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Choosing(nn.Module):
    """Two recordings, by the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).relu()
        logits = self.head(hidden * 0.5 if (x > 2).any() else hidden)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Counting(Choosing):
    """Its calls change Python state."""

    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": F.cross_entropy(self.head(self.first(x).relu()), y) * self.calls}


class Reading(Choosing):
    """No graph can follow it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).relu()
        for _ in range(int(hidden.detach().sum() * 1000) % 5):
            hidden = hidden * 1.01
        return {"loss": F.cross_entropy(self.head(hidden), y)}


def rows(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return values, torch.randint(4, (size,), generator=generator)


def assert_as_in_a_loop(
    make: Callable[[], nn.Module],
    step: Callable[[Any, Any], torch.Tensor],
    loss: Callable[[Any, Any], Any],
    **options: Any,
) -> Any:
    """Compare steps of a pipe, ``step(pipe, microbatches)``, with loops of the plain model's ``loss``."""
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    pipe = autosplit(model, **({"devices": 2, "chunks": 4} | options))
    for number in range(2):
        microbatches = [rows(size, 10 * number + index) for index, size in enumerate(SIZES)]
        torch.manual_seed(number)
        expected = sum(_backward(loss(plain, pair)) for pair in microbatches)
        after = torch.get_rng_state()
        torch.manual_seed(number)
        assert step(pipe, microbatches).item() == pytest.approx(expected, rel=TOLERANCE)
        assert torch.equal(torch.get_rng_state(), after)
        for (name, found), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, other.grad, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
        for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    return pipe


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


def own(model: Any, pair: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*pair)["loss"] / len(SIZES)
    return loss


def in_one_schedule(pipe: Any, microbatches: Any) -> torch.Tensor:
    loss: torch.Tensor = pipe.train_step(microbatches=microbatches)
    return loss


@pytest.mark.filterwarnings("ignore:.*collapsed.*")
@pytest.mark.parametrize(
    "make", mostly_slow([Routing, Norms, Tied, Choosing, Counting, Reading], Routing, Norms, Choosing)
)
def test_models(make: Callable[[], nn.Module]) -> None:
    assert_as_in_a_loop(make, in_one_schedule, own)


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [
            {"schedule": "gpipe", "recompute": "always"},
            {"schedule": "zb_h1"},
            {"schedule": "interleaved", "recompute": "block"},
            {"schedule": "zb_v", "lanes": "inline"},
            {"schedule": "1f1b", "recompute": "except_last"},
            {"devices": 1, "lanes": "inline"},
            {"devices": 3, "replicas": [2, 1]},
        ],
        {"schedule": "zb_h1"},
        {"devices": 3, "replicas": [2, 1]},
    ),
)
def test_schedules(options: dict[str, Any]) -> None:
    assert_as_in_a_loop(Tied, in_one_schedule, own, **options)


def test_whole_statistics() -> None:
    assert_as_in_a_loop(Norms, in_one_schedule, own, batch_norm="full")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_the_callers(reduction: str) -> None:
    def smooth(output: Any, target: Any) -> torch.Tensor:
        return F.cross_entropy(output["logits"], target, label_smoothing=0.1) + output["logits"].mean(0).square().sum()

    def step(pipe: Any, microbatches: Any) -> torch.Tensor:
        samples = [Sample(x, y=y) for x, y in microbatches]
        targets = [y for _, y in microbatches]
        loss: torch.Tensor = pipe.train_step(
            microbatches=samples, target=targets, loss_fn=smooth, loss_reduction=reduction
        )
        return loss

    def loss(model: Any, pair: Any) -> Any:
        return smooth(model(*pair), pair[1]) / (len(SIZES) if reduction == "mean" else 1)

    assert_as_in_a_loop(Norms, step, loss)


def test_inputs_of_the_pipe_get_gradients() -> None:
    pairs = [rows(size, index) for index, size in enumerate(SIZES)]
    model = Tied().double()
    pipe = autosplit(copy.deepcopy(model), devices=2, chunks=4)
    for pair in pairs:
        own(model, (pair[0].requires_grad_(), pair[1])).backward()
    expected = [x.grad for x, _ in pairs]
    for x, _ in pairs:
        x.grad = None
    pipe.train_step(microbatches=[{"x": x, "y": y} for x, y in pairs])
    for (x, _), gradient in zip(pairs, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_first_step_plans_for_all_microbatches() -> None:
    pipe = autosplit(Tied().double(), devices=2, chunks=4)
    pipe.train_step(microbatches=[rows(1, index) for index in range(4)])
    assert pipe.plan.chunks == 4
    assert [note.reason for note in pipe.recordings] == ["the first call"]


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 6)])
def test_a_stage_holds_what_its_schedule_says(schedule: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held, act = [0], TrainCells.act

    def count(cells: TrainCells, action: Action) -> None:
        act(cells, action)
        if action.stage == 0:
            held.append(held[-1] + (1 if action.kind == "F" else -1))

    monkeypatch.setattr(TrainCells, "act", count)
    pipe = autosplit(Tied().double(), devices=2, chunks=6, schedule=schedule)
    pipe.train_step(microbatches=[rows(2, index) for index in range(6)])
    assert (held[-1], max(held)) == (0, most)


def test_one_that_raises_adds_nothing() -> None:
    model = Tied().double()
    pipe = autosplit(model, devices=2, chunks=4)
    x, y = rows(2, 0)
    pipe.train_step(microbatches=[(x, y)])
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(IndexError):
        pipe.train_step(microbatches=[(x, y), (x, y + 4)])
    assert all(map(torch.equal, before, (parameter.grad for parameter in model.parameters())))


def test_what_does_not_fit_is_refused() -> None:
    pipe = autosplit(Tied().double(), devices=2, chunks=4)
    pair = rows(2, 0)
    for arguments, match in [
        (((), {"microbatches": []}), "0 microbatches"),
        (((pair[0],), {"microbatches": [pair]}), "positional inputs"),
        (((), {"microbatches": [pair], "target": [1, 2], "loss_fn": F.cross_entropy}), "1 microbatches and 2 targets"),
        (((), {"microbatches": [pair], "loss_reduction": "rows"}), "loss_reduction"),
    ]:
        with pytest.raises(InputError, match=match):
            pipe.train_step(*arguments[0], **arguments[1])


class Keeps(nn.Module):
    """A layer whose result, or state, hangs on the calls before."""

    largest: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.rows = kind, 0
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "buffer":
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        if self.kind == "reads" and x.mean() > -100:
            self.largest.mul_(0.9).add_(x.detach().abs().max())
        if self.kind == "rows":
            self.rows = max(self.rows, x.shape[0])
            return x / self.rows
        return x / self.largest


@pytest.mark.parametrize("kind", ["buffer", "reads", "rows"])
def test_calls_that_hang_on_those_before_run_one_after_the_other(kind: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Keeps(kind), nn.Linear(4, 4)).double()

    plain, pipe = made(), autosplit(made(), devices=["cpu"] * 2, chunks=2)
    for rows in ([2, 5, 1], [9, 2], [3, 5, 9]):
        batches = [torch.randn(count, 4, dtype=torch.float64) for count in rows]
        losses = []
        for batch in batches:
            losses.append((plain(batch) ** 2).mean() / len(batches))
            losses[-1].backward()
        step = pipe.train_step(microbatches=batches, loss_fn=lambda y: (y**2).mean())
        torch.testing.assert_close(step, sum(losses).detach())  # type: ignore[union-attr]
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(pipe[2].largest, plain[2].largest)  # type: ignore[index]
        assert pipe[2].rows == plain[2].rows  # type: ignore[index]
