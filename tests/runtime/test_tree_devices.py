"""Operands of a model's own Python meet on one device; "meta" stands for a second one where there is no GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.runtime import tree
from autosplit.runtime.tree import Moves
from autosplit.trace.module_tree import ForwardInterceptors
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


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, torch.device]]:
    """Move by ``Tensor.to``, as no lane knows meta; return what was moved where."""
    seen: list[tuple[Tensor, torch.device]] = []

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        seen.append((tensor, device))
        return tensor.to(device)

    monkeypatch.setattr(tree, "moved", moved)
    return seen


def run(body: Callable[[Model, Tensor], Any], x: Tensor | None = None) -> tuple[Model, Any]:
    model = Model(body)
    stages = {"first": 0, "second": 1, "third": 1}
    own = Moves([CPU, META])
    doors = ForwardInterceptors(model, stages)

    def guest(path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return own.run(stages[path], plain, args, kwargs)

    args, _ = own.inputs(((torch.ones(2, 4) if x is None else x,), {}))
    with doors.up(), doors.visited(guest), own.entered():
        return model, model(*args)


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.second(net.first(x)),
        lambda net, x: net.second(input=net.first(x)),
        lambda net, x: net.second(net.first(x)) + x,  # a skip follows
        lambda net, x: net.second(x) * net.shift,  # so does a parameter
        lambda net, x: F.linear(net.second(x), net.first.weight, net.shift),
        lambda net, x: net.third(net.first(x)),  # a tied weight comes to where it is used
        lambda net, x: torch.cat([x, net.second(x)]),
        lambda net, x: torch.stack([net.first(x), net.second(x)])[1],
        lambda net, x: x.to(net.second(x)),
    ],
)
@pytest.mark.usefixtures("moves")
def test_values_move_forwards(body: Callable[[Model, Tensor], Tensor]) -> None:
    _, output = run(body)
    assert output.device == META
    assert output.requires_grad or output.grad_fn is None


@pytest.mark.usefixtures("moves")
def test_a_unit_runs_on_its_own_device() -> None:
    _, output = run(lambda net, x: net.first(x))
    assert output.device == CPU
    torch.autograd.backward(output.sum())


def test_a_parameter_is_copied_once_per_call(moves: list[tuple[Tensor, torch.device]]) -> None:
    model, _ = run(lambda net, x: net.third(net.third(x)) @ net.first.weight)
    assert [device for tensor, device in moves if tensor is model.first.weight] == [META]


def test_what_an_operation_changes_in_a_copy_changes_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    twice: list[Tensor] = []

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        copied = tensor.clone()  # on the CPU, so that there are values to look at
        twice.append(copied)
        return copied

    monkeypatch.setattr(tree, "moved", moved)

    def body(net: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            marker = torch.empty(4, device=META)
            torch.add(net.shift.detach(), 1.0, out=net.mean)
            return fill(net.mean, marker)

    model, _ = run(body)
    assert len(twice) == 1
    assert model.mean.tolist() == [7.0] * 4


def fill(first: Tensor, second: Tensor) -> Tensor:
    """Change the first operand, as a kernel may that is not named like that."""
    operands = first, second
    if torch.overrides.has_torch_function(operands):
        return torch.overrides.handle_torch_function(fill, operands, first, second)
    return first.fill_(7.0)


@pytest.mark.usefixtures("moves")
def test_an_operation_in_place_stays_where_its_target_is() -> None:
    def body(net: Model, x: Tensor) -> Tensor:
        y = net.first(x)
        with torch.no_grad():
            y.copy_(net.first(x))
            net.mean += net.first(x)[0]
            y[0] = net.mean
        return y

    _, output = run(body)
    assert output.device == CPU


def test_inputs_from_elsewhere_come_to_the_first_stage(moves: list[tuple[Tensor, torch.device]]) -> None:
    elsewhere, here = torch.ones(2), torch.ones(2, device=META)
    assert Moves([META]).inputs(([elsewhere], {"a": 1}))[0][0].device == META
    assert Moves([META]).inputs(((elsewhere, here), {}))[0][0] is elsewhere  # as lengths on the CPU
    assert [(tensor is elsewhere, device) for tensor, device in moves] == [(True, META)]


def test_with_one_device_nothing_is_moved_or_entered() -> None:
    own = Moves([CPU])
    given = ((torch.ones(2, 2),), {})
    assert own.inputs(given) is given
    with own.entered():
        assert not torch.overrides._get_current_function_mode_stack()


# -- on a device -----------------------------------------------------------------------------------------------------
def on_cpu(run: Run) -> Run:
    """Return a run's tensors in host memory."""
    return Run(**pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), vars(run)))


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
            assert_equal_runs(on_cpu(found[0]), on_cpu(expected[0]))


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
