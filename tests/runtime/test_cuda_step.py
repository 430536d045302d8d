"""What lanes with streams log in the pipe's call, its backward and training steps, in every schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.backward import donate_gradients
from autosplit.runtime.step import leaves
from tests.pairwise import in_turn
from tests.runtime import lane_models
from tests.runtime.happens_before import Keep, Op, Wait, is_before, problems
from tests.runtime.lane_models import MODELS, ROWS, WIDTH, Chain, Frozen, Positions, Skips, assert_close, loss, plain
from tests.runtime.recorded_pipe import RecordedPipe

pytestmark = pytest.mark.usefixtures("double")

PLACES = lane_models.PLACES | {
    "from a card to the CPU": (["cuda:0", "cpu"], "cuda:0"),
    "CPU lanes under a card": (["cpu", "cpu"], "cuda:0"),
}
SCHEDULES = ["gpipe", "1f1b"]

STEP_PLACES = ["one card", "back and forth", "from the CPU", "CPU and cards", "from a card to the CPU"]


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
STEP_CASES = CASES | {
    model.__name__: (model, lambda: torch.randn(ROWS, WIDTH), lambda: own) for model in (Chain, Positions, Frozen)
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


@in_turn(place=list(PLACES), model=MODELS)
def test_a_call_and_its_backward(model: Callable[[], nn.Module], place: str) -> None:
    run = RecordedPipe(own_model := model(), *PLACES[place], wants_gradient=True)
    value = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = [*plain(copy.deepcopy(own_model), value), value.grad]
    for _ in range(2):
        assert_close(run.call(value, loss), expected)
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []


@pytest.mark.parametrize("place", ["two cards", "CPU and cards", "from a card to the CPU"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients(mode: Callable[[], Any], place: str) -> None:
    run = RecordedPipe(model := Several(), *PLACES[place])
    value = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        with mode():
            assert_close(run.outputs(value), model(value))
    assert problems(run.streams.log) == []


@in_turn(case=list(STEP_CASES), place=STEP_PLACES, schedule=[*SCHEDULES, "zb_h1", "interleaved", "zb_v"])
def test_a_training_step(case: str, place: str, schedule: str) -> None:
    make, target_of, loss_of = STEP_CASES[case]
    model, target, loss_fn = make(), target_of(), loss_of()
    reference = copy.deepcopy(model), *others_of(plain_loss := copy.deepcopy(loss_fn))
    wants = case in ("torch's mean", "several outputs")
    others = others_of(loss_fn)
    where = PLACES[place if schedule in (*SCHEDULES, "zb_h1") else "two cards"]  # else they have two stages each
    run = RecordedPipe(model, *where, schedule=schedule, others=others, wants_gradient=wants)
    value = torch.randn(ROWS, WIDTH, requires_grad=wants)
    expected = plain_step(reference, value, target, plain_loss)
    for _ in range(2):
        assert_close(run.train(value, target, loss_fn), expected)
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []


def test_an_optimizer_between_steps() -> None:
    run = RecordedPipe(model := Skips(), *PLACES["back and forth"], schedule="1f1b")
    reference = copy.deepcopy(model)
    for _ in range(3):
        value, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        expected = plain_step((reference,), value, target, own)
        assert_close(run.train(value, target, own), expected)
        with run.recording(), torch.no_grad():
            for changed in (model, reference):
                for parameter in changed.parameters():
                    parameter.mul_(0.9)
    assert problems(run.streams.log) == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_gradients_are_held_until_the_caller_has_read_them(forgotten: bool) -> None:
    run = RecordedPipe(Chain(), *PLACES["one card"])
    run.streams.forget = lambda entry: forgotten and entry.stream.startswith("caller") and isinstance(entry, Keep)
    last = run.lanes[-1]
    with run.recording():
        mine = run.streams.put(torch.ones(1), last.device)
        last.wait(last.here().record())
    run.train(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.MSELoss())
    with run.recording(), last.active():
        mine + 1
    assert any("caller cuda:0 still uses" in problem for problem in problems(run.streams.log)) == forgotten


def test_gradients_for_two_cards_reach_leaves_on_their_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    one_root = mock.Mock(side_effect=lambda tensors, gradients, lanes: [donate_gradients(tensors, gradients)])
    monkeypatch.setattr(leaves, "roots_by_device", one_root)
    run = RecordedPipe(Chain(), *PLACES["two cards"])
    run.train(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.MSELoss())
    assert one_root.called
    assert run.engine.mismatches


def operations(run: RecordedPipe, name: str) -> list[Op]:
    return [entry for entry in run.streams.log if isinstance(entry, Op) and entry.name == name]


def test_lanes_of_one_card_wait_and_do_not_copy() -> None:
    run = RecordedPipe(Skips(), *PLACES["one card"])
    run.call(torch.randn(ROWS, WIDTH), loss)
    assert operations(run, "copy") == operations(run, "stage") == []
    waits = [(e.stream, run.streams.recorded_on[e.event]) for e in run.streams.log if isinstance(e, Wait)]
    assert {("compute1", "compute0"), ("compute2", "compute1"), ("compute2", "compute0")} <= set(waits)


def test_copies_overlap_with_the_compute_on_both_sides() -> None:
    run = RecordedPipe(Chain(), ["cuda:0", "cuda:1", "cuda:2"], "cuda:0", chunks=4)
    run.call(torch.randn(ROWS, WIDTH), loss)
    log, layers = run.streams.log, operations(run, "aten::addmm")
    first, middle = ([op for op in layers if op.stream == stream] for stream in ("compute0", "compute1"))
    copies = [op for op in operations(run, "copy") if op.stream == "outbound0"]
    each, own = len(first) // 4, len(middle) // 4
    assert len(first) == 4 * each > 0
    assert len(middle) == 4 * own > 0
    assert len(copies) >= 4
    for microbatch in range(3):
        last, following = first[each * microbatch + each - 1], first[each * (microbatch + 1)]
        assert is_before(log, last, copies[microbatch])
        assert log.index(following) < log.index(copies[microbatch])
        assert not is_before(log, following, copies[microbatch])
    assert log.index(middle[own]) < log.index(copies[2])
    assert not is_before(log, middle[0], copies[2])


@pytest.mark.parametrize("forgotten", [False, True])
def test_outputs_are_held_until_the_caller_has_read_them(forgotten: bool) -> None:
    run = RecordedPipe(Chain(), *PLACES["two cards"])
    run.streams.forget = lambda entry: forgotten and entry.stream.startswith("caller") and isinstance(entry, Keep)
    last = run.lanes[-1]
    with run.recording(), torch.no_grad():
        own = run.streams.put(torch.ones(1), last.device)
        last.wait(last.here().record())
        output = run.pipe(run.put(torch.randn(ROWS, WIDTH)))
        read = output * 1
        del output
        with last.active():
            own + 1
    assert read.shape == (ROWS, WIDTH)
    assert any("caller cuda:1 still uses" in problem for problem in problems(run.streams.log)) == forgotten
