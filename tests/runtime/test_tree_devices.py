"""Operands of a model's own Python meet on one device; "meta" stands for a second one where there is no GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autosplit.runtime.tree import Together
from tests.equivalence.equality import Run, assert_equal_runs
from tests.models.own_python import CASES, caller, left, rows, seed, split

CPU, META = torch.device("cpu"), torch.device("meta")


class Model(nn.Module):
    """Two layers, a parameter and a buffer of its own, and a tie."""

    def __init__(self, body: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.second.to(META)
        self.third.bias = nn.Parameter(self.third.bias.detach().to(META))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def run(body: Callable[[Model, Tensor], Any]) -> tuple[Model, Any]:
    model = Model(body)
    return model, Together(model, [CPU, META]).call(model, torch.ones(2, 4))


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.second(net.first(x)),
        lambda net, x: net.second(input=net.first(x)),
        lambda net, x: net.second(net.first(x)) + x,  # a skip follows
        lambda net, x: net.third(net.first(x)),  # so does a tied weight
        lambda net, x: torch.cat([x, net.second(x)]),
        lambda net, x: torch.stack([net.first(x), net.second(x)])[1],
        lambda net, x: x.to(net.second(x)),
    ],
)
def test_values_move_forwards(body: Callable[[Model, Tensor], Tensor]) -> None:
    _, output = run(body)
    assert output.device == META
    assert output.requires_grad or output.grad_fn is None


def test_what_an_operation_changes_in_a_copy_changes_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(net: Model, x: Tensor) -> Tensor:
        monkeypatch.setattr(Tensor, "to", lambda tensor, device: tensor.clone())  # on the CPU, so that there are values
        with torch.no_grad():
            return fill(net.mean, net.second.bias)

    model, _ = run(body)
    assert model.mean.tolist() == [7.0] * 4


def fill(first: Tensor, second: Tensor) -> Tensor:
    """Change the first operand, as a kernel may that is not named like that."""
    operands = first, second
    if torch.overrides.has_torch_function(operands):
        return torch.overrides.handle_torch_function(fill, operands, first, second)
    return first.fill_(7.0)


def test_an_operation_in_place_stays_where_its_target_is() -> None:
    def body(net: Model, x: Tensor) -> Tensor:
        y = net.second(x)
        with torch.no_grad():
            y.copy_(net.first(x))
            y += net.first(x)
            y[0] = net.mean
        return y

    _, output = run(body)
    assert output.device == META


# -- on a device -----------------------------------------------------------------------------------------------------
def on_cpu(run: Run) -> Run:
    """Return a run's tensors in host memory."""
    return Run(**pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), vars(run)))


def without_rounding(run: Run, plain: Run) -> Run:
    """Return a run without gradients that are zero but for rounding in the plain model, as before a batch norm."""
    largest = max(float(gradient.abs().max()) for gradient in plain.gradients.values() if gradient is not None)
    zero = {name for name, own in plain.gradients.items() if own is not None and own.abs().max() <= 1e-14 * largest}
    for name in zero:
        gradient = run.gradients[name]
        assert gradient is not None, name
        assert gradient.abs().max() <= 1e-12 * largest, name
    return replace(run, gradients={name: own for name, own in run.gradients.items() if name not in zero})


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu", "cuda:0")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_call_on_devices_is_the_plain_models(name: str, training: bool, devices: tuple[str, ...]) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    plain = case.model().double().train(training)
    twin = copy.deepcopy(plain)
    run, plan = split(twin, case.batch(10, 0), stages=len(devices), devices=[torch.device(d) for d in devices])
    assert {str(p.device) for p in twin.parameters()} == set(plan.devices)
    for step in range(3):
        args = case.batch(8, step)
        seed(step)
        expected = left(plain, plain, args)
        seed(step)
        found = left(twin, caller(run), args)
        if name != "layer drop" or not training:  # the devices' generators are not the CPU's
            mine, theirs = on_cpu(found[0]), on_cpu(expected[0])
            assert_equal_runs(without_rounding(mine, theirs), without_rounding(theirs, theirs))


@pytest.mark.cuda
def test_an_optimizer_made_before_goes_on_where_the_parameters_are() -> None:
    torch.manual_seed(3)
    plain = CASES["tied"].model().double()
    twin = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, twin)]
    call: Callable[..., Tensor] = twin
    for step in range(3):
        if step == 1:
            call = caller(split(twin, rows(8, 0), stages=2, devices=[CPU, torch.device("cuda", 0)])[0])
        for forward, optimizer in zip((plain, call), optimizers, strict=True):
            optimizer.zero_grad()
            forward(*rows(8, step)).square().mean().backward()
            optimizer.step()
        assert all(p.grad is None or p.grad.device == p.device for p in twin.parameters())
    for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.cpu(), theirs, rtol=1e-9, atol=1e-11)
