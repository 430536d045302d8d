"""The pipe itself on recording streams: the call with its backward, and training steps, in every schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.happens_before import problems
from tests.runtime.lane_models import MODELS, ROWS, WIDTH, Skips, assert_close, loss, plain
from tests.runtime.recorded_pipe import RecordedPipe

PLACES = {
    "one card": (["cuda:0"] * 3, "cuda:0"),
    "two cards": (["cuda:0", "cuda:1"], "cuda:0"),
    "back and forth": (["cuda:1", "cuda:0", "cuda:1", "cuda:0"], "cuda:0"),
    "from the CPU": (["cuda:0", "cuda:1"], "cpu"),
    "CPU and cards": (["cpu", "cuda:0", "cpu", "cuda:1"], "cpu"),
    "ends on the CPU": (["cuda:0", "cuda:1", "cpu"], "cpu"),
    "from a card to the CPU": (["cuda:0", "cpu"], "cuda:0"),
    "CPU lanes under a card": (["cpu", "cpu"], "cuda:0"),
}
SCHEDULES = ["gpipe", "1f1b"]

place_of = pytest.mark.parametrize("place", PLACES)
schedule_of = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Several(nn.Module):
    """Outputs of the first and of the last stage, and an input that is an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tanh(self.layers[0](value))
        last = first
        for layer in self.layers[1:]:
            last = torch.tanh(layer(last))
        return last, first, value


class Scaled(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output * self.scale - target + self.shift) ** 2).mean()


def of_several(output: tuple[Tensor, ...], target: dict[str, Any]) -> Tensor:
    last, first, value = output
    return ((last - target["last"]) * first + value * target["power"][0]).pow(2).mean()


def own(output: Any, target: Tensor) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return (first - target).abs().pow(1.5).mean()


def classes() -> Tensor:
    return torch.tensor([0, 2, -100, 1, 2])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any]]] = {
    "torch's mean": (Skips, lambda: torch.randn(ROWS, WIDTH), nn.MSELoss),
    "counted": (Skips, classes, lambda: nn.CrossEntropyLoss(weight=torch.rand(WIDTH) + 0.5)),
    "counted function": (Skips, classes, lambda: nn.functional.cross_entropy),
    "of its own": (Skips, lambda: torch.randn(ROWS, WIDTH), lambda: own),
    "with parameters": (Skips, lambda: torch.randn(ROWS, WIDTH), Scaled),
    "several outputs": (
        Several,
        lambda: {"last": torch.randn(ROWS, WIDTH), "power": [torch.rand(()), "a note"]},
        lambda: of_several,
    ),
}


def plain_step(modules: tuple[nn.Module, ...], value: Tensor, target: Any, loss_fn: Any) -> list[Tensor]:
    """Return the loss and every gradient of the plain model; leave it without gradients."""
    value = value.detach().clone().requires_grad_(value.requires_grad)
    found = loss_fn(modules[0](value), target)
    found.backward()
    leaves = [*(p for module in modules for p in module.parameters()), value]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return [found.detach(), *gradients]


def others_of(loss_fn: Any) -> tuple[nn.Module, ...]:
    return (loss_fn,) if isinstance(loss_fn, nn.Module) else ()


@place_of
@pytest.mark.parametrize("model", MODELS)
def test_a_call_and_its_backward(model: Callable[[], nn.Module], place: str) -> None:
    run = RecordedPipe(own_model := model(), *PLACES[place])
    value = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = [*plain(copy.deepcopy(own_model), value), value.grad]
    for _ in range(2):
        assert_close(run.call(value, loss), expected)
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []


@place_of
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients(mode: Callable[[], Any], place: str) -> None:
    run = RecordedPipe(model := Several(), *PLACES[place])
    value = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        with mode():
            assert_close(run.outputs(value), model(value))
    assert problems(run.streams.log) == []


@schedule_of
@place_of
@pytest.mark.parametrize("case", CASES)
def test_a_training_step(case: str, place: str, schedule: str) -> None:
    make, target_of, loss_of = CASES[case]
    model, target, loss_fn = make(), target_of(), loss_of()
    reference = copy.deepcopy(model), *others_of(plain_loss := copy.deepcopy(loss_fn))
    run = RecordedPipe(model, *PLACES[place], schedule=schedule, others=others_of(loss_fn))
    value = torch.randn(ROWS, WIDTH, requires_grad=case in ("torch's mean", "several outputs"))
    expected = plain_step(reference, value, target, plain_loss)
    for _ in range(2):
        assert_close(run.train(value, target, loss_fn), expected)
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []


@schedule_of
@place_of
@pytest.mark.parametrize("model", MODELS)
def test_a_training_step_of_every_model(model: Callable[[], nn.Module], place: str, schedule: str) -> None:
    run = RecordedPipe(own_model := model(), *PLACES[place], schedule=schedule)
    value, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    expected = plain_step((copy.deepcopy(own_model),), value, target, own)
    for _ in range(2):
        assert_close(run.train(value, target, own), expected)
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []
