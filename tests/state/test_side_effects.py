"""What a forward leaves in Python is what the plain model leaves, and the model is a pipeline all the same."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.pipelined import PipelinedModule
from tests.models.three_layers import WIDTH, Model, numbers
from tests.pairwise import in_turn

ROWS = (6, 6, 8, 6)


class Block(nn.Module):
    """A layer that does to its own attributes what it is told."""

    def __init__(self, does: Callable[[Any, Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(WIDTH, WIDTH), does
        self.calls, self.first, self.rows = 0, True, 0
        self.feat: Tensor | None = None
        self.log: list[Any] = []
        self.held: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        other = self.does(self, x, hidden)
        return hidden if other is None else other


class Kept(list[Any]):
    """A list with attributes, of which one is in a slot."""

    __slots__ = ("__dict__", "slot")


def counts(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.calls += 1


def drops_a_flag(block: Any, x: Tensor, hidden: Tensor) -> None:
    if block.first:
        block.first = False


def goes_another_way_first(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    if not block.first:
        return hidden
    block.first = False
    return hidden * 2


def alternates(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    block.calls += 1
    return hidden if block.calls % 2 else -hidden


def keeps(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.feat = hidden


def keeps_its_input(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.feat = x


def keeps_detached(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.held["hidden"] = hidden.detach()


def keeps_in_a_slot(block: Any, x: Tensor, hidden: Tensor) -> None:
    kept = Kept()
    kept.slot = kept.extra = hidden
    block.feat = kept


def logs_numbers(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.log.append((len(x), "rows"))
    block.rows = x.shape[0]


def logs_tensors(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.log.append(hidden.detach().mean())


def fills_a_cache(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    if block.feat is None:
        block.feat = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
    return hidden * block.feat


def stops_counting(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.calls = min(block.calls + 1, 4)


def scales_by_what_it_sets(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    scaled, block.rows = hidden * (1 + block.rows), 2
    return scaled


def sets_what_was_not_there(block: Any, x: Tensor, hidden: Tensor) -> Tensor:
    if not hasattr(block, "width"):
        block.width, block.log = x.shape[1], [x.shape[0]]
    return hidden / block.width


def deletes(block: Any, x: Tensor, hidden: Tensor) -> None:
    vars(block).pop("rows", None)


EFFECTS = (counts, drops_a_flag, goes_another_way_first, alternates, keeps, keeps_its_input, keeps_detached)
EFFECTS += (logs_numbers, logs_tensors, fills_a_cache, stops_counting, scales_by_what_it_sets)
EFFECTS += (sets_what_was_not_there, deletes, keeps_in_a_slot)


class Root(Block):
    """Blocks that are plain, or the root itself does it."""

    def __init__(self, does: Any, *, inner: bool) -> None:
        super().__init__(lambda block, x, hidden: None if inner else does(block, x, hidden))
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(does if inner else lambda block, x, hidden: None) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        equal = type(one) is type(other) and one.shape == other.shape and one.requires_grad == other.requires_grad
        return equal and torch.allclose(one, other, rtol=0, atol=1e-12)
    if isinstance(one, float):
        return type(one) is type(other) and math.isclose(one, other, rel_tol=1e-12)
    if isinstance(one, Kept):
        return type(one) is type(other) and same([one.slot, one.extra, *one], [other.slot, other.extra, *other])
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(part, other[key]) for key, part in one.items())
    if isinstance(one, (nn.Module, Callable)):  # type: ignore[arg-type]
        return type(one) is type(other)
    return type(one) is type(other) and bool(one == other)


def assert_left_alike(plain: nn.Module, model: nn.Module) -> None:
    """Assert that two models have the same attributes, hooks, classes, parameters, gradients and buffers."""
    for (path, one), (_, other) in zip(plain.named_modules(), model.named_modules(), strict=True):
        assert type(one) is type(other)
        assert list(one.__dict__) == list(other.__dict__), path
        for name, value in one.__dict__.items():
            assert same(value, other.__dict__[name]), (path, name)
    for (name, one_p), (_, other_p) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert same(one_p.grad, other_p.grad), name


def split(model: nn.Module) -> PipelinedModule:
    return autosplit(model, devices=["cpu"] * 2, chunks=2)


def batch(rows: int, seed: int) -> Tensor:
    return numbers(rows, WIDTH, seed=seed, gradient=False)


@in_turn(rest=False, does=EFFECTS, inner=[True, False])
def test_calls_leave_what_the_plain_model_leaves(does: Any, inner: bool) -> None:
    plain = Root(does, inner=inner)
    model = copy.deepcopy(plain)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x = batch(rows, seed)
        expected, got = plain(x), pipe(x)
        assert same(expected, got)
        losses = [out.square().sum() for out in (expected, got)]
        if does is keeps:  # what is kept has the history that it has in the plain model
            owners = (plain.blocks[0], model.blocks[0]) if inner else (plain, model)
            losses = [loss + owner.feat.square().sum() for loss, owner in zip(losses, owners, strict=True)]
        for loss in losses:
            loss.backward()
        assert_left_alike(plain, model)
    assert pipe._core.recordings.tree is None, "a graph follows it"
    assert not pipe.plan.class_flops.get("full")


@in_turn(rest=False, does=EFFECTS, inner=[False, True])
def test_steps_leave_what_the_plain_model_leaves(does: Any, inner: bool) -> None:
    plain = Root(does, inner=inner)
    model = copy.deepcopy(plain)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x, y = batch(rows, seed), batch(rows, seed + 10)
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        assert same(loss.detach(), pipe.train_step(x, target=y, loss_fn=F.mse_loss))
        assert_left_alike(plain, model)
    assert pipe._core.recordings.tree is None, "a graph follows it"


def test_a_loss_may_read_what_the_model_keeps() -> None:
    plain = Root(keeps, inner=True)
    model = copy.deepcopy(plain)
    pipe, x, y = split(model), batch(6, 0), batch(6, 1)

    def loss_of(owner: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, target: F.mse_loss(out, target) + owner.blocks[0].feat.square().mean()

    loss = loss_of(plain)(plain(x), y)
    loss.backward()
    assert same(loss.detach(), pipe.train_step(x, target=y, loss_fn=loss_of(model)))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(one.grad, other.grad)


# -- outside of the modules ---------------------------------------------------------------------------------------
def chain(model: Any, x: Tensor) -> Tensor:
    return model.c(torch.tanh(model.b(torch.tanh(model.a(x)))))


def counter() -> tuple[Any, Any]:
    count = 0

    def body(model: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return chain(model, x)

    return body, lambda: count


def average() -> tuple[Any, Any]:
    mean = torch.zeros(WIDTH, dtype=torch.float64)

    def body(model: Any, x: Tensor) -> Tensor:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * model.a(x).detach().mean(0)
        return chain(model, x) + mean

    return body, lambda: mean


def average_in_place() -> tuple[Any, Any]:
    mean = torch.zeros(WIDTH, dtype=torch.float64)

    def body(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean.mul_(0.9).add_(model.a(x).mean(0), alpha=0.1)
        return chain(model, x) + mean

    return body, lambda: mean


def ids() -> tuple[Any, Any]:
    found = itertools.count()

    def body(model: Any, x: Tensor) -> Tensor:
        next(found)
        return chain(model, x)

    return body, lambda: repr(found)


def ring() -> tuple[Any, Any]:
    found = itertools.cycle([1.0, 2.0, 3.0])
    return lambda model, x: chain(model, x) * next(found), lambda: None


def dice() -> tuple[Any, Any]:
    die, old = [random.Random(0)], numpy.random.RandomState(0)
    state = lambda: (die[0].getstate(), repr(old.get_state()))  # noqa: E731
    return lambda model, x: chain(model, x) * die[0].random() * float(old.rand()), state


def log() -> tuple[Any, Any]:
    def body(model: Any, x: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
        seen.append(chain(model, x))
        body.calls = getattr(body, "calls", 0) + 1  # type: ignore[attr-defined]
        return seen[-1]

    state = lambda: (body.__defaults__[0], body.calls)  # type: ignore[index, attr-defined]  # noqa: E731
    body.__defaults__ = ([],)
    return body, state


@pytest.mark.parametrize("made", [counter, average, average_in_place, ids, ring, dice, log])
def test_state_outside_of_the_modules_is_what_the_plain_model_leaves(made: Any) -> None:
    (body, state), (own, own_state) = made(), made()
    plain, model = Model(body), Model(own)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x = batch(rows, seed)
        assert same(plain(x), pipe(x))
        assert same(state(), own_state())


# -- parameters ---------------------------------------------------------------------------------------------------
def momentum(model: Any, x: Tensor) -> Tensor:
    model.c.weight.data = 0.9 * model.c.weight.data + 0.1 * model.a.weight.data
    return model.b(torch.tanh(model.a(x))) + model.c(x).detach()


def momentum_in_place(model: Any, x: Tensor) -> Tensor:
    for own, other in zip(model.c.parameters(), model.a.parameters(), strict=True):
        own.data.mul_(0.9).add_(other.data, alpha=0.1)
    return model.b(torch.tanh(model.a(x))) + model.c(x).detach()


def ties(model: Any, x: Tensor) -> Tensor:
    model.c.weight = model.b.weight
    return model.c(torch.tanh(model.b(torch.tanh(model.a(x)))))


@pytest.mark.parametrize("body", [momentum, momentum_in_place, ties])
def test_parameters_that_a_forward_sets_are_the_plain_models(body: Any) -> None:
    plain, model = Model(body), Model(body)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x = batch(rows, seed)
        expected, got = plain(x), pipe(x)
        assert same(expected, got)
        expected.sum().backward()
        got.sum().backward()
        assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert same(one.detach(), other.detach()), name
            assert same(one.grad, other.grad), name


def test_a_hook_that_a_forward_sets_is_there_afterwards() -> None:
    def sets(block: Any, x: Tensor, hidden: Tensor) -> None:
        if block.first:
            block.first = False
            block.layer.register_forward_hook(lambda module, args, out: out + 1)

    plain = Root(sets, inner=True)
    model = copy.deepcopy(plain)
    pipe = split(model)
    for seed, rows in enumerate(ROWS):
        x = batch(rows, seed)
        assert same(plain(x), pipe(x))
    assert [len(b.layer._forward_hooks) for b in model.blocks] == [1, 1, 1]
