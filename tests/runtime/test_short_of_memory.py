"""Memory that runs out in any action: the error says where, what was predicted, what helps; and the pipe goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime.step import cells
from autosplit.runtime.step.train_cells import TrainCells
from autosplit.runtime.transport import SharedMemory
from autosplit.schedule.action import Action
from tests.runtime.gates import CHUNKS, LANES, MARK, STAGES, Case, Gated, Gates, case_of, notes, raiser, split
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import PLACES, ROWS, WIDTH, Skips
from tests.runtime.recorded_pipe import RecordedPipe

lanes_of = pytest.mark.parametrize("lanes", LANES)


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def told(error: BaseException) -> str:
    (found,) = (note for note in notes(error) if note.startswith("out of memory"))
    return found


@pytest.mark.parametrize(
    ("how", "action"),
    [
        *(("1f1b", Action(stage, kind, m)) for stage, kind, m in ((0, "F", 0), (2, "B", CHUNKS - 1))),
        ("gpipe", Action(1, "B", 1)),
        ("call", Action(1, "F", 2)),
    ],
    ids=str,
)
@lanes_of
def test_any_action(lanes: str, how: str, action: Action) -> None:
    case = case_of(lanes, how)
    case.clear()
    with case.gates.at({action: raiser(full())}), pytest.raises(torch.OutOfMemoryError) as caught:
        case.run(how)
    text = told(caught.value)
    for part in (f"in {action}: stage {action.stage} is on cpu", "were predicted", "What would help", "called again"):
        assert part in text
    assert all(leaf.grad is None for leaf in case.leaves().values())
    case.assert_works()


def _nth(function: Callable[..., Any], number: int, error: Exception) -> Callable[..., Any]:
    """Return the function, which raises when it is called the n-th time."""
    calls = iter(range(10**6))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*args, **kwargs)

    return called


IN_STEP: dict[str, Callable[[Exception], AbstractContextManager[Any]]] = {
    "a transfer": lambda error: mock.patch.object(SharedMemory, "recv", _nth(SharedMemory.recv, 2, error)),
    "a gradient's transfer": lambda error: mock.patch.object(SharedMemory, "recv", _nth(SharedMemory.recv, 5, error)),
    "the sums": lambda error: mock.patch.object(cells, "accumulate", _nth(cells.accumulate, 0, error)),
    "the hand-over": lambda error: mock.patch.object(TrainCells, "hand_over", _nth(TrainCells.hand_over, 0, error)),
}


@pytest.mark.parametrize("where", IN_STEP)
@lanes_of
def test_other_places_of_a_step(lanes: str, where: str) -> None:
    case = case_of(lanes, "1f1b")
    for leaf in case.leaves().values():
        leaf.grad = torch.ones_like(leaf)
    with IN_STEP[where](full()), pytest.raises(torch.OutOfMemoryError) as caught:
        case.run("1f1b")
    assert "were predicted" in told(caught.value)
    assert all(
        torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in case.leaves().values() if leaf.grad is not None
    )
    case.assert_works()


class Early(Gated):
    """Gates in front of the blocks, where a stage that runs again passes them again."""

    def forward(self, value: Tensor, mark: Tensor) -> Tensor:
        for stage, block in enumerate(self.blocks):
            value = torch.tanh(block(self.gates.function.apply(value, mark, stage)))
        return value


@pytest.mark.parametrize(("lanes", "recompute"), [("inline", "always"), ("threads", "block")])
def test_a_stage_that_runs_again(lanes: str, recompute: str) -> None:
    case = Case(lanes=lanes, schedule="1f1b", model=Early)
    case.pipe = split(case.pipe.unsplit(), lanes=lanes, schedule="1f1b", recompute=(recompute,))
    case.run("1f1b")
    passes = iter(range(CHUNKS * STAGES))

    def second() -> None:
        if next(passes) == 1:
            raise full()

    with case.gates.at({Action(1, "F", 2): second}), pytest.raises(torch.OutOfMemoryError) as caught:
        case.run("1f1b")
    assert "in 1B2" in told(caught.value)
    assert any("stage 1 ran again" in note for note in notes(caught.value))
    case.assert_works()


class Watching(Gates):
    """Gates that remember the pieces of the batch that passed, without holding them."""

    __module__ = "threading"

    def visit(self, stage: int, kind: Any, mark: Tensor) -> None:
        if self.handlers is not None:
            self.seen.append(weakref.ref(mark))
        super().visit(stage, kind, mark)


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("kind", ["F", "B"])
@lanes_of
def test_the_step_is_freed_with_the_error(lanes: str, kind: Any) -> None:
    gates = Watching()
    gates.seen = []
    pipe = split(Gated(gates), lanes=lanes, schedule="1f1b")
    value = torch.randn(len(MARK), 6, dtype=torch.float64)

    def step() -> None:
        pipe.train_step(value, MARK, target=value, loss_fn=nn.MSELoss())

    step()

    def trip() -> None:
        raise full()

    with gates.at({Action(1, kind, 1): trip}):
        try:
            step()
        except torch.OutOfMemoryError:
            assert any(ref() is not None for ref in gates.seen)
    assert gates.seen
    assert all(ref() is None for ref in gates.seen)


@pytest.mark.parametrize("number", [0, 3, 7, 11])
@pytest.mark.parametrize("place", ["two cards", "CPU and cards"])
def test_a_copy_between_devices(place: str, number: int) -> None:
    torch.manual_seed(0)
    run = RecordedPipe(model := Skips(), *PLACES[place], schedule="1f1b")
    value, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    (nn.MSELoss()(model(value), target)).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    failing = mock.patch.object(run.streams, "copy", _nth(run.streams.copy, number, full()))
    with failing, pytest.raises(torch.OutOfMemoryError):
        run.train(value, target, nn.MSELoss())
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(run.train(value, target, nn.MSELoss())[1:], expected)
    torch.testing.assert_close(run.outputs(value)[0].cpu(), model(value))
    assert problems(run.streams.log) == []
