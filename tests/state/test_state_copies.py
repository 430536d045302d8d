"""Copies of a pipe: deepcopy, pickle, torch.save, and the optimizer that was made before the split."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import assert_same_bits, difference, forward_backward
from tests.models.named import CASES, numbers
from tests.pairwise import in_turn

NAMES = ("nested skips", "shared weight", "tiny gpt", "lstm batch first", "dataclass output")


def split(model: nn.Module) -> nn.Module:
    return autosplit(model, devices=["cpu"] * 3, chunks=4)


def through_pickle(pipe: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(pipe))


def through_torch_save(pipe: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


@in_turn(name=NAMES, way=list(COPIES), planned=[False, True])
def test_a_copy_is_equal_and_independent(name: str, way: str, planned: bool) -> None:
    case, duplicate = CASES[name], COPIES[way]
    pipe = split(case.build())
    batch = case.batch(10)
    if planned:
        forward_backward(pipe, batch)
    pipe.zero_grad(set_to_none=True)
    twin = duplicate(pipe)
    assert isinstance(twin, fx.GraphModule)
    assert twin.plan == pipe.plan
    assert (twin.plan is None) is not planned
    assert list(twin.state_dict()) == list(pipe.state_dict())
    assert not {id(parameter) for parameter in pipe.parameters()} & {id(parameter) for parameter in twin.parameters()}
    before = forward_backward(pipe, batch)
    assert_same_bits(forward_backward(twin, batch), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert_same_bits(forward_backward(pipe, batch), before)
    assert difference(forward_backward(twin, batch).loss, before.loss) > 1e-6


def test_a_copy_keeps_ties_and_the_model_inside_it() -> None:
    pipe = split(CASES["tiny gpt"].build())
    twin = copy.deepcopy(pipe)
    assert twin.head.weight is twin.table.weight
    assert dict(twin.unsplit().named_parameters()).keys() == dict(pipe.named_parameters()).keys()
    assert all(mine is theirs for mine, theirs in zip(twin.unsplit().parameters(), twin.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, *, count: int, first: int = 0) -> None:
    """Take ``count`` ordinary steps, each on a batch of its own."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        value, target = numbers(9, 6, seed=step), numbers(9, 6, seed=100 + step)
        F.mse_loss(module(value), target).backward()
        optimizer.step()


def assert_equal_parameters(module: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert difference(parameter.detach(), expected.detach()) <= 1e-11, name


@in_turn(kind=list(OPTIMIZERS), before=[0, 3])
def test_an_optimizer_made_before_the_split(kind: str, before: int) -> None:
    plain, model = CASES["shared weight"].build(), CASES["shared weight"].build()
    optimizers = [OPTIMIZERS[kind](module.parameters()) for module in (plain, model)]
    for module, optimizer in zip((plain, model), optimizers, strict=True):
        steps(module, optimizer, count=before)
    pipe = split(model)
    steps(plain, optimizers[0], count=4, first=before)
    steps(pipe, optimizers[1], count=4, first=before)
    assert_equal_parameters(pipe, plain)


class Adapter(nn.Module):
    """A layer with two more parameters beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Parameter(numbers(*shape).detach()) for shape in ((8, 2), (2, 8)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.base(value) + value @ self.down @ self.up


class Seeds(nn.Module):
    """Two layers; while ``seeds`` is set, no graph can follow the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.seeds = nn.Linear(8, 8), nn.Linear(8, 8), False
        self.double()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.seeds:
            torch.manual_seed(1)
        return self.last(torch.tanh(self.first(value)))


@pytest.mark.parametrize("seeds", [True, False])
def test_a_model_gets_other_parameters_after_its_plan(seeds: bool) -> None:
    model = Seeds()
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=3)
    value, target = numbers(7, 8), numbers(7, 8).detach()
    pipe.unsplit().seeds = seeds
    with pytest.warns(UserWarning, match="has collapsed") if seeds else contextlib.nullcontext():
        pipe(value)
    pipe.unsplit().seeds = False
    for each in (model, pipe):
        each.first = Adapter(each.first)
        each.register_parameter("unused", nn.Parameter(torch.ones(3)))
    loss = F.mse_loss(model(value.detach()), target)
    loss.backward()
    for copied in (pipe, copy.deepcopy(pipe), copy.copy(pipe), through_pickle(pipe)):
        copied.zero_grad()
        torch.testing.assert_close(copied.train_step(value.detach(), target=target, loss_fn=F.mse_loss), loss.detach())
        for mine, own in zip(copied.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-12, atol=1e-12)
