"""What changes between calls: mode, gradients, batch, sequence length, frozen parameters, hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import (
    LANES,
    Batch,
    Run,
    assert_equal_gradients,
    assert_equal_runs,
    difference,
    forward_backward,
    probe_loss,
    train_step,
)
from tests.equivalence.named_models import CASES, flat, numbers, sequence, tokens

pytestmark = pytest.mark.parametrize("lanes", LANES)


def pair(name: str, lanes: str) -> tuple[nn.Module, nn.Module]:
    """Return the plain model and a pipe of the same numbers."""
    case = CASES[name]
    return case.build(), autosplit(case.build(), devices=["cpu"] * 3, chunks=4, lanes=lanes)


def test_no_grad_gives_the_same_outputs_without_a_graph(lanes: str) -> None:
    plain, pipe = pair("nested skips", lanes)
    (value,) = flat(9).args
    with torch.no_grad():
        output = pipe(value)
        assert difference(output, plain(value)) <= 1e-12
    assert not output.requires_grad
    assert_equal_runs(forward_backward(pipe, flat(9)), forward_backward(plain, flat(9)))


def test_inference_mode_as_the_first_call(lanes: str) -> None:
    plain, pipe = pair("residual chain", lanes)
    (value,) = flat(9).args
    with torch.inference_mode():
        assert difference(pipe(value), plain(value)) <= 1e-12
    assert_equal_runs(forward_backward(pipe, flat(9)), forward_backward(plain, flat(9)))


def test_another_sequence_length_is_recorded_again_under_the_same_plan(lanes: str) -> None:
    plain, pipe = pair("tiny gpt", lanes)
    plans = []
    for length in (6, 9, 3, 6):
        batch = Batch((tokens(8, length),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
        plans.append(pipe.plan)
    assert all(plan == plans[0] for plan in plans)


def test_another_number_of_rows_keeps_the_plan(lanes: str) -> None:
    plain, pipe = pair("lstm batch first", lanes)
    plans = []
    for rows in (8, 3, 1, 13):
        assert_equal_runs(forward_backward(pipe, sequence(rows)), forward_backward(plain, sequence(rows)))
        plans.append(pipe.plan)
    assert all(plan == plans[0] for plan in plans)


def test_inputs_that_start_or_stop_requiring_gradients(lanes: str) -> None:
    plain, pipe = pair("nested skips", lanes)
    for gradient in (False, True, False):
        batch = Batch((numbers(8, 6, gradient=gradient),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


@pytest.mark.parametrize("frozen", ["down.", "up.", "down.0.bias", ""])
def test_parameters_frozen_before_the_split_and_unfrozen_after(lanes: str, frozen: str) -> None:
    plain, model = CASES["nested skips"].build(), CASES["nested skips"].build()
    _freeze(plain, frozen)
    _freeze(model, frozen)
    pipe = autosplit(model, devices=["cpu"] * 3, chunks=4, lanes=lanes)
    batch, target = Batch((numbers(10, 6),)), numbers(10, 6, seed=1)
    if frozen:
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    plain.requires_grad_(True)
    pipe.requires_grad_(True)
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    _assert_equal_steps(pipe, plain, batch, target)
    _freeze(plain, "up.1")
    _freeze(pipe, "up.1")
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    _assert_equal_steps(pipe, plain, batch, target)


def test_parameter_hooks_fire_once_per_backward_and_see_the_whole_gradient(lanes: str) -> None:
    plain, pipe = pair("shared weight", lanes)
    calls: dict[str, int] = {}
    for module, counted in ((plain, False), (pipe, True)):
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name, counted=counted: _count(calls, name, gradient, counted))
    batch, target = flat(10), numbers(10, 6, seed=1)
    assert_equal_gradients(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert set(calls) == dict(plain.named_parameters()).keys()
    assert set(calls.values()) == {1}
    _assert_equal_steps(pipe, plain, batch, target)
    assert set(calls.values()) == {2}


def test_post_accumulate_hooks_fire_once_per_backward(lanes: str) -> None:
    plain, pipe = pair("shared weight", lanes)
    calls: dict[str, int] = {}
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    batch, target = flat(10), numbers(10, 6, seed=1)
    assert_equal_gradients(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert calls == dict.fromkeys(dict(plain.named_parameters()), 1)
    _assert_equal_steps(pipe, plain, batch, target)
    assert calls == dict.fromkeys(dict(plain.named_parameters()), 2)


def test_two_calls_before_one_backward(lanes: str) -> None:
    plain, pipe = pair("nested skips", lanes)
    results = []
    for module in (pipe, plain):
        module.zero_grad()
        first, second = flat(8).args[0], numbers(5, 6, seed=3)
        (probe_loss(module(first)) + probe_loss(module(second)) * 2).backward()
        results.append([parameter.grad for parameter in module.parameters()])
    for actual, expected in zip(*results, strict=True):
        assert difference(actual, expected) <= 1e-12


def test_autograd_grad_returns_the_plain_gradients(lanes: str) -> None:
    plain, pipe = pair("repeated block", lanes)
    found = []
    for module in (pipe, plain):
        value = flat(9).args[0]
        found.append(torch.autograd.grad(probe_loss(module(value)), [value, *module.parameters()]))
        assert all(parameter.grad is None for parameter in module.parameters())
    for actual, expected in zip(*found, strict=True):
        assert difference(actual, expected) <= 1e-12


def test_pipe_inside_a_larger_differentiable_program(lanes: str) -> None:
    plain, pipe = pair("dataclass output", lanes)
    grads = []
    for module in (pipe, plain):
        scale = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
        answer = module(numbers(9, 6) * scale)
        (answer.hidden.sum(0).pow(2).sum() + answer.logits.std()).backward()
        grads.append([scale.grad, *(parameter.grad for parameter in module.parameters())])
    for actual, expected in zip(*grads, strict=True):
        assert difference(actual, expected) <= 1e-12


def test_only_one_of_several_outputs_is_differentiated(lanes: str) -> None:
    plain, pipe = pair("dict output", lanes)
    batch = flat(9)
    for key in ("hidden", "logits"):
        expected = forward_backward(plain, batch, loss=lambda output, key=key: probe_loss(output[key]))
        actual = forward_backward(pipe, batch, loss=lambda output, key=key: probe_loss(output[key]))
        assert_equal_runs(actual, expected)


def test_partial_eval(lanes: str) -> None:
    plain, pipe = pair("residual chain", lanes)
    for module in (plain, pipe):
        module.get_submodule("blocks.1").eval()
    assert_equal_runs(forward_backward(pipe, flat(9)), forward_backward(plain, flat(9)))


def _freeze(module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(False)


def _count(calls: dict[str, int], name: str, gradient: Tensor, counted: bool) -> Tensor:
    if counted:
        calls[name] = calls.get(name, 0) + 1
    return gradient.clamp(-0.05, 0.05)  # not linear: only the whole gradient gives the plain result


def _assert_equal_steps(pipe: nn.Module, plain: nn.Module, batch: Batch, target: Tensor) -> None:
    expected = forward_backward(plain, batch, loss=lambda output: F.mse_loss(output, target))
    actual = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
    assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))
