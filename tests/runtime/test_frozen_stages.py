"""Stages up to which nothing is trained run forwards only, those without trained weights make no weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.planning.timeline import simulated
from autosplit.schedule.lists import Actions
from tests.pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "double")

WIDTH, ROWS, LAYERS = 16, 10, 8
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "interleaved", "looped_bfs", "zb_v")


def model(*trained: int) -> nn.Sequential:
    """Return equal layers of which some are trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    for number, layer in enumerate(layers):
        layer.requires_grad_(number in trained)
    return layers


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def assert_steps_as_plain(pipe: Any, plain: nn.Module, value: Tensor, target: Tensor) -> Actions:
    """Run both in the ways that there are, compare gradients, and return what the lanes of the step performed."""
    plain.zero_grad(), pipe.zero_grad()
    F.mse_loss(plain(value), target).backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    step = pipe.profile_step(value, target=target, loss_fn=F.mse_loss)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], wanted)
    pipe.zero_grad()
    F.mse_loss(pipe(value), target).backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], wanted)
    return step.actions


def kinds(actions: Actions) -> dict[int, str]:
    """Return the kinds of actions of each stage."""
    texts = sorted({(entry.stage, entry.kind) for lane in actions for entry in lane if hasattr(entry, "kind")})
    return {stage: "".join(kind for other, kind in texts if other == stage) for stage, _ in texts}


def expected(pipe: Any, trained: Collection[int]) -> dict[int, str]:
    """Return the kinds of actions that stages need, by the layers that are trained."""
    whole, split = ("FIW", "BF") if pipe.plan.schedule.startswith("zb") else ("BF", "BF")
    weights = [any(name.startswith(f"{n}.0#") for n in trained for name in s.nodes) for s in pipe.plan.stages]
    flows = [any(weights[: stage + 1]) for stage in range(len(weights))]
    return {s: "F" if not flows[s] else whole if weights[s] else split for s in range(len(weights))}


@in_turn(schedule=SCHEDULES, lanes=("threads", "inline"), first=((6, 7), (3, 7)))
def test_what_is_planned_and_runs_makes_gradients_only_where_they_are_needed(
    schedule: str, lanes: str, first: tuple[int, ...]
) -> None:
    plain, value, target = model(*first), *batch()
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule=schedule, lanes=lanes, sample=value)
    performed = assert_steps_as_plain(pipe, plain, value, target)
    assert performed == pipe.plan.actions
    assert kinds(performed) == expected(pipe, first)
    assert simulated(pipe.plan).step_s == pytest.approx(pipe.plan.step_s - pipe.plan.overhead_s)
    silent = sum("B" not in each and "I" not in each for each in kinds(performed).values())
    assert ("no backward: nothing up to there is trained" in pipe.report()) == bool(silent)
    for layers in ((2, 7), range(LAYERS)):
        for net in (plain, pipe):
            for number in range(LAYERS):
                net.get_submodule(str(number)).requires_grad_(number in layers)
        assert kinds(assert_steps_as_plain(pipe, plain, value, target)) == expected(pipe, layers)


def test_an_input_that_wants_a_gradient_gets_it_through_frozen_stages() -> None:
    plain, (value, target) = model(7), batch()
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule="1f1b", sample=value)
    assert kinds(assert_steps_as_plain(pipe, plain, value, target))[0] == "F"
    first, other = (value.clone().requires_grad_() for _ in range(2))
    F.mse_loss(plain(first), target).backward()
    pipe.train_step(other, target=target, loss_fn=F.mse_loss)
    torch.testing.assert_close(other.grad, first.grad)
    assert set(kinds(assert_steps_as_plain(pipe, plain, other, target)).values()) == {"BF"}


def _asks(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def test_gradients_that_a_hook_asks_for_are_made_where_other_hooks_may_see_them() -> None:
    plain, (value, target), seen = model(7), batch(), []
    plain[0][0].register_forward_hook(_asks)
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule="1f1b", sample=value)
    assert kinds(assert_steps_as_plain(pipe, plain, value, target))[0] == "F"
    assert pipe.plan.stages[0].backward_s == 0.0
    for net in (plain, pipe):
        net.get_submodule("1.0").register_full_backward_hook(
            lambda module, grads, given: seen.append(given[0].shape[0])
        )
    assert set(kinds(assert_steps_as_plain(pipe, plain, value, target)).values()) == {"BF"}
    assert sum(seen) == 3 * ROWS


class Scaled(nn.Module):
    """A layer that holds a trained tensor which is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, requires_grad=True)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value) * self.scale)


def _with_a_tensor() -> nn.Module:
    layers = model(7)
    layers[1] = Scaled().requires_grad_(False)
    return layers


class Shared(nn.Module):
    """Frozen layers whose first weights are changed by a trained value that is computed once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = model(7), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        scale = torch.tanh(self.scale)
        for number, layer in enumerate(self.layers):
            value = layer(value * scale if number == 6 else value)
        return value


@pytest.mark.parametrize("make", [_with_a_tensor, Shared])
def test_what_is_trained_otherwise_counts(make: Callable[[], nn.Module]) -> None:
    plain, (value, target) = make(), batch()
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule="1f1b", sample=value)
    performed = kinds(assert_steps_as_plain(pipe, plain, value, target))
    assert performed[0] == ("F" if make is Shared else "BF")
    if make is not Shared:
        pipe.zero_grad()
        pipe.train_step(value, target=target, loss_fn=F.mse_loss)
        assert pipe.get_submodule("1").scale.grad.abs().sum() > 0


class Penalty(nn.Module):
    """A loss with a parameter, which also reads one of the model."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(WIDTH)), [weight]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target) + self.weight[0].square().mean()


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_a_loss_with_parameters_trains_them_behind_a_frozen_model(lanes: str) -> None:
    plain, (value, target) = model(), batch(12)
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule="zb_h1", lanes=lanes, sample=value)
    losses = [Penalty(net.get_submodule("7.0").weight) for net in (plain, pipe)]
    losses[0](plain(value), target).backward()
    pipe.train_step(value, target=target, loss_fn=losses[1], loss_reduction="mean")
    torch.testing.assert_close(losses[1].scale.grad, losses[0].scale.grad)


def test_frozen_stages_keep_nothing_as_planned() -> None:
    with torch.random.fork_rng():
        value = torch.randn(512, 64, dtype=torch.float32)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).float() for _ in range(8)]
    net = nn.Sequential(*layers)
    net[:6].requires_grad_(False)
    pipe = autosplit(net, devices=4, chunks=8, schedule="gpipe", sample=value)
    step = pipe.profile_step(value, target=value, loss_fn=F.mse_loss, memory=True)
    held = [memory.grown_bytes for memory in step.memory]
    states = [s.memory.parameter_bytes + s.memory.optimizer_bytes + s.memory.buffer_bytes for s in pipe.plan.stages]
    peaks = [stage.memory.peak_bytes - state for stage, state in zip(pipe.plan.stages, states, strict=True)]
    frozen = [stage.index for stage in pipe.plan.stages if stage.gradients == "none"]
    assert frozen[0] == 0
    assert all(pipe.plan.stages[stage].memory.activation_bytes == 0 for stage in frozen)
    assert held == pytest.approx(peaks, rel=0.12)  # a microbatch waits for a stage that is busy
    assert max(held[stage] for stage in frozen) < 0.2 * held[-1]


def test_microbatches_of_the_callers_pass_frozen_stages_forwards_only() -> None:
    plain, (value, target) = model(7), batch(12)
    pipe = autosplit(copy.deepcopy(plain), devices=4, chunks=4, schedule="1f1b", sample=value)
    F.mse_loss(plain(value), target).backward()
    pieces = {"microbatches": list(value.split(3)), "target": list(target.split(3))}
    pipe.train_step(**pieces, loss_fn=F.mse_loss)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
