"""Everything that a caller may ask of autograd, on both kinds of lanes: the answer is the plain model's."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import probe_loss
from tests.equivalence.side_by_side import as_plain, assert_equal, both, check, grads, pair, value_of
from tests.models.named import WIDTH, numbers
from tests.models.three_layers import Model
from tests.pairwise import in_turn

# -- what is differentiated ------------------------------------------------------------------------------------------


@as_plain("nested skips")
def test_values_of_the_callers_graph_before_and_behind_the_pipe(module: nn.Module) -> Sequence[Any]:
    value = value_of()
    before = torch.tanh(value * 2)
    output = module(before)
    behind = output.pow(2)
    return torch.autograd.grad(probe_loss(behind), [behind, output, before, value, *module.parameters()])


class Doubled(nn.Module):
    """The sum of two weights: autograd gives both one tensor as their gradient. Its hook keeps it one node."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(numbers(WIDTH, WIDTH, seed=seed)) for seed in (1, 2))
        self.register_forward_hook(lambda *_: None)

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.one + self.other)


@pytest.mark.parametrize("step", [False, True], ids=["call", "train_step"])
@both
def test_two_parameters_with_one_gradient(step: bool, lanes: str) -> None:
    plain = nn.Sequential(Doubled(), nn.Tanh(), Doubled())
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4, lanes=lanes)
    target = numbers(9, WIDTH, seed=3)
    F.mse_loss(plain(value_of()), target).backward()
    if step:
        pipe.train_step(value_of(), target=target, loss_fn=F.mse_loss)
    else:
        F.mse_loss(pipe(value_of()), target).backward()
    assert_equal(grads(pipe), grads(plain))


def mixed(model: Any, value: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Outputs with and without a gradient: a value, its largest entry's place, a frozen part, a detached one."""
    hidden = torch.tanh(model.a(value))
    beside = model.b(other)
    return model.c(hidden) * beside, hidden.argmax(1), beside, hidden.detach() * 2, hidden


@both
def test_outputs_without_gradients(lanes: str) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        outputs = module(value_of(), value_of(seed=1, gradient=False))
        probe_loss(outputs).backward()
        return [*(o.requires_grad for o in outputs), *outputs, *grads(module)]

    plain, model = Model(mixed), Model(mixed)
    for each in (plain, model):
        each.b.requires_grad_(False)
    assert_equal(run(autosplit(model, devices=["cpu"] * 3, chunks=4, lanes=lanes)), run(plain))


# -- several calls, several backwards --------------------------------------------------------------------------------
@as_plain("shared weight")
def test_a_graph_that_is_kept_gives_the_same_bits_again(module: nn.Module) -> Sequence[Any]:
    found = []
    value = value_of()
    loss = probe_loss(module(value))
    for keep in (True, True, False):
        module.zero_grad()
        value.grad = None
        loss.backward(retain_graph=keep)
        found.append([value.grad.clone(), *grads(module)])
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(later, found[0], strict=True))
    return found[0]


@both
def test_a_loss_that_is_kept_after_its_backward_does_not_keep_the_batch(lanes: str) -> None:
    pipe = pair("nested skips", lanes)[1]
    value = value_of(gradient=False)
    batch, loss = weakref.ref(value), pipe(value).sum()
    loss.backward()
    del value
    assert batch() is None
    assert loss.grad_fn is not None


@pytest.mark.parametrize("create", [False, True])
@both
def test_a_second_backward_of_a_freed_graph_says_retain_graph(create: bool, lanes: str) -> None:
    plain, pipe = pair("shared weight", lanes)
    for module in (plain, pipe):
        value = value_of()
        loss = probe_loss(module(value))
        loss.backward()
        before = [value.grad.clone(), *grads(module)]
        with pytest.raises(RuntimeError, match=r"backward through the .* a second time.*retain_graph=True"):
            torch.autograd.grad(loss, [value], create_graph=create)
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()
        assert_equal([value.grad, *grads(module)], before, tolerance=0)


@pytest.mark.parametrize("order", ["ab", "ba", "sum"])
@both
def test_two_forwards_before_their_backwards(order: str, lanes: str) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        values = {"a": value_of(), "b": value_of(7, seed=2)}
        losses = {name: probe_loss(module(value)) * (1 + len(value)) for name, value in values.items()}
        if order == "sum":
            (losses["a"] + losses["b"]).backward()
        else:
            for name in order:
                losses[name].backward()
        return [*(value.grad for value in values.values()), *grads(module)]

    check(run, "shared weight", lanes)


@as_plain("shared weight")
def test_the_output_lives_on_after_the_backward_and_may_be_changed(module: nn.Module) -> Sequence[Any]:
    value = value_of()
    output = module(value)
    changed = output.mul(1)
    changed.mul_(2).add_(1)
    output.mul_(3)
    (probe_loss(changed) + probe_loss(output)).backward()
    output.detach().zero_()
    changed.detach().add_(1)
    return [output, changed, value.grad, *grads(module)]


@pytest.mark.parametrize("what", ["parameter", "input"])
@both
def test_a_change_in_place_between_forward_and_backward_is_an_error(what: str, lanes: str) -> None:
    plain, pipe = pair("shared weight", lanes)
    for module in (plain, pipe):
        given = value_of() * 1
        loss = probe_loss(module(given))
        with torch.no_grad():
            (given if what == "input" else next(module.parameters())).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    if lanes == "threads":
        assert grads(pipe) == [None] * len(grads(pipe))  # nothing is handed over before all of it is known


# -- frozen parts and modes ------------------------------------------------------------------------------------------
FROZEN = {"all": "0123", "first": "01", "middle": "12", "last": "3"}


@in_turn(frozen=list(FROZEN), gradient=(True, False))
@both
def test_frozen_stages_and_unfreezing_later(frozen: str, gradient: bool, lanes: str) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name[0] not in FROZEN[frozen])
        found: list[Any] = []
        for _ in range(2):
            value = value_of(gradient=gradient)
            output = module(value)
            if output.requires_grad:
                probe_loss(output).backward()
            found += [output.requires_grad, value.grad, *grads(module)]
            module.requires_grad_(True)
        return found

    check(run, "chain", lanes)


@as_plain("shared weight")
def test_frozen_between_forward_and_backward(module: nn.Module) -> Sequence[Any]:
    value = value_of()
    loss = probe_loss(module(value))
    module.requires_grad_(False)
    loss.backward()
    module.requires_grad_(True)
    return [value.grad]
