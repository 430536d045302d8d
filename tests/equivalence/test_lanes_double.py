"""Gradients of gradients: exact on both kinds of lanes, or on threads one clear error that names the other kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import LANES, probe_loss
from tests.equivalence.side_by_side import as_plain, assert_equal, both, check, grads, value_of
from tests.models.named import CASES, WIDTH
from tests.models.three_layers import Model

REFUSED = "lanes='inline'"


def second_order(module: nn.Module, value: Tensor) -> Sequence[Any]:
    """Return first gradients and, of their squares, second ones."""
    wanted = [value, *module.parameters()]
    first = torch.autograd.grad(probe_loss(module(value)), wanted, create_graph=True, allow_unused=True)
    total = torch.stack([g.pow(2).sum() for g in first if g is not None]).sum()
    return [*first, *torch.autograd.grad(total, wanted, allow_unused=True)]


def make(build: Callable[[], nn.Module], lanes: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return autosplit(build().double(), devices=["cpu"] * 3, chunks=4, lanes=lanes)


@both
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "shared weight",
        "nested skips",
        "hub",
        "repeated block",
        "attention",
        "lstm batch first",
        "weight norm",
        "no_grad region",
        "own autograd function",
        "unused parameters",
    ],
)
def test_second_order_equals_the_plain_model(name: str, lanes: str) -> None:
    check(lambda module: second_order(module, CASES[name].batch(9).args[0]), name, lanes, tolerance=1e-10)


@as_plain("nested skips", tolerance=1e-10)
def test_gradient_penalty(module: nn.Module) -> Sequence[Any]:
    value = value_of()
    loss = probe_loss(module(value))
    (gradient,) = torch.autograd.grad(loss, [value], create_graph=True)
    (loss + (gradient.norm(dim=1) - 1).pow(2).mean()).backward()
    return [value.grad, *grads(module)]


@as_plain("shared weight", tolerance=1e-10)
def test_hooks_of_parameters_see_each_order_once(module: nn.Module) -> Sequence[Any]:
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append(name) or gradient * 2)
    return [*second_order(module, value_of()), *sorted(seen)]


def normed() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def dropping() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def counting() -> nn.Module:
    """A counter that scales the value: state once per step."""

    def body(model: Any, value: Tensor) -> Tensor:
        model.buffer_steps += 1
        return model.c(torch.tanh(model.a(value) * (1 + 0.1 * model.buffer_steps)))

    return Model(body, buffer_steps=lambda: torch.zeros(()))


@pytest.mark.parametrize("build", [normed, dropping, counting])
def test_running_again_repeats_draws_and_leaves_buffers(build: Callable[[], nn.Module]) -> None:
    found = []
    for lanes in LANES:
        pipe = make(build, lanes)
        pipe(value_of(gradient=False))
        torch.manual_seed(5)
        own = [id(buffer) for buffer in pipe.buffers()]
        value = value_of()
        loss = probe_loss(pipe(value))
        before, state = [buffer.clone() for buffer in pipe.buffers()], torch.get_rng_state()
        (gradient,) = torch.autograd.grad(loss, [value], create_graph=True)
        second = torch.autograd.grad(gradient.pow(2).sum(), list(pipe.parameters()), allow_unused=True)
        assert_equal(list(pipe.buffers()), before, tolerance=0)
        assert [id(buffer) for buffer in pipe.buffers()] == own
        assert torch.equal(torch.get_rng_state(), state)
        found.append([loss, gradient, *second, *pipe.buffers()])
    assert_equal(found[1], found[0], tolerance=1e-10)


def lagging() -> nn.Module:
    """The output depends on a running mean that the forward then moves."""

    def body(model: Any, value: Tensor) -> Tensor:
        value = model.a(value)
        output = model.c(torch.tanh(value - model.buffer_mean))
        with torch.no_grad():
            model.buffer_mean.mul_(0.9).add_(value.mean(0) * 0.1)
        return output

    return Model(body, buffer_mean=lambda: torch.zeros(WIDTH))


def test_state_that_moved_since_the_forward_is_refused_on_threads() -> None:
    pipe = make(lagging, "threads")
    value = value_of()
    loss = probe_loss(pipe(value))
    before = pipe.get_buffer("buffer_mean").clone()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(loss, [value], create_graph=True)
    assert torch.equal(pipe.get_buffer("buffer_mean"), before)
    loss.backward()
    inline = make(lagging, "inline")
    again = value_of()
    probe_loss(inline(again)).backward()
    assert_equal([value.grad, *grads(pipe)], [again.grad, *grads(inline)])
    second_order(inline, value_of())


def test_an_input_that_the_model_writes_to_is_refused_on_threads_and_stays() -> None:
    pipe = make(lambda: Model(lambda m, x, scale: m.c(torch.tanh(m.a(x)) * scale.add_(1))), "threads")
    value, scale = value_of(), torch.ones(9, WIDTH, dtype=torch.float64)
    loss = probe_loss(pipe(value, scale))
    assert torch.equal(scale, torch.full_like(scale, 2))
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(loss, [value], create_graph=True)
    assert torch.equal(scale, torch.full_like(scale, 2))


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("what", ["parameter", "input"])
def test_a_change_in_place_since_the_forward_is_refused_on_threads(what: str, gradient: bool) -> None:
    pipe = make(dropping, "threads")
    value = value_of(gradient=gradient)
    parameters = list(pipe.parameters())
    loss = probe_loss(pipe(value))
    with torch.no_grad():
        (value if what == "input" else parameters[0]).mul_(1)  # the same values: only the version tells
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(loss, parameters, create_graph=True)


@both
def test_casts_of_weights_do_not_outlive_the_backward(lanes: str) -> None:
    pipe = autosplit(CASES["chain"].build().float(), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    value = value_of().detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(value)
    torch.autograd.grad(output.float().pow(2).sum(), [value], create_graph=True)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not pipe(value).any()


@both
def test_second_order_by_autocast(lanes: str) -> None:
    plain = CASES["nested skips"].build().float()
    pipe = autosplit(CASES["nested skips"].build().float(), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    found = []
    for module in (plain, pipe):
        value = value_of().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = module(value)
        (gradient,) = torch.autograd.grad(output.float().pow(2).sum(), [value], create_graph=True)
        gradient.pow(2).sum().backward()
        found.append([gradient, *grads(module)])
    assert_equal(found[1], found[0], tolerance=0.05)  # bfloat16: 8 bits
