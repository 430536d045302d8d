"""After a call or a step the caller's tensors, lists and dicts are what the plain model would have left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import PipelinedModule, autosplit, verify
from tests.equivalence.equality import LANES
from tests.models.three_layers import WIDTH, Model
from tests.models.three_layers import numbers as drawn
from tests.pairwise import in_turn

ROWS = 10
numbers = partial(drawn, gradient=False)
Inputs = Callable[[], tuple[Tensor, ...]]


class First(nn.Module):
    """Changes its input before anything takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value.mul_(0.5)
        return self.b(torch.tanh(self.a(value))) + value


class Late(First):
    """Changes its input when some of it was read."""

    def forward(self, value: Tensor) -> Tensor:
        inside = self.a(value * 1.0)
        value[:, 0] = 0.0
        return self.b(torch.tanh(inside)) + value


class View(First):
    """Changes its input through a view, and reads it by its own name."""

    def forward(self, value: Tensor) -> Tensor:
        value.view(-1).mul_(0.5)
        return self.b(torch.tanh(self.a(value * 1.0)))


class Pair(First):
    """Changes one input and reads another, which may be the same tensor."""

    def forward(self, value: Tensor, other: Tensor) -> Tensor:
        inside = self.b(torch.tanh(self.a(other * 1.0)))
        value.mul_(0.5)
        return inside + value + other


class Asks(First):
    """Does what its input's flag says."""

    def forward(self, value: Tensor) -> Tensor:
        inside = self.a(value)
        return self.b(torch.tanh(inside) if value.requires_grad else inside)


class SequenceFirst(First):
    """Takes its batch along dimension 1."""

    def forward(self, value: Tensor) -> Tensor:
        value.mul_(0.5)
        return self.b(torch.tanh(self.a(value.view(-1, WIDTH)))).view(value.shape)


def same() -> tuple[Tensor, ...]:
    value = numbers(ROWS, WIDTH)
    return value, value


def overlapping() -> tuple[Tensor, ...]:
    value = numbers(ROWS + 2, WIDTH)
    return value[2:], value[:-2]


CASES: dict[str, tuple[type[First], Inputs]] = {
    "first": (First, lambda: (numbers(ROWS, WIDTH),)),
    "late": (Late, lambda: (numbers(ROWS, WIDTH),)),
    "through a view": (View, lambda: (numbers(ROWS, WIDTH),)),
    "of a larger tensor": (First, lambda: (numbers(2 * ROWS, WIDTH)[::2],)),
    "transposed": (First, lambda: (numbers(WIDTH, ROWS).t(),)),
    "with a graph": (First, lambda: (numbers(ROWS, WIDTH).requires_grad_() * 1,)),
    "given twice": (Pair, same),
    "overlapping": (Pair, overlapping),
    "sequence first": (SequenceFirst, lambda: (numbers(3, ROWS, WIDTH),)),
}


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def split(model: nn.Module, *, lanes: str = "inline", recompute: str = "never", schedule: str = "1f1b") -> Any:
    batch_dims = {"value": 1} if isinstance(model, SequenceFirst) else None
    return autosplit(
        model, devices=2, chunks=3, lanes=lanes, recompute=recompute, schedule=schedule, batch_dims=batch_dims
    )


def ran(module: nn.Module, inputs: Inputs, way: str) -> list[Tensor]:
    """Return everything that two runs leave: results, the caller's tensors, gradients."""
    found: list[Tensor] = []
    for _ in range(2):
        module.zero_grad()
        given = inputs()
        target = numbers(*given[0].shape)
        if way == "step" and isinstance(module, PipelinedModule):
            result = module.train_step(*given, target=target, loss_fn=mean_of)
        elif way == "eval" and isinstance(module, PipelinedModule):
            result = module.eval_step(*given)
        elif way in ("eval", "no_grad"):
            with torch.no_grad():
                result = module(*given)
        else:
            result = module(*given)
            loss = mean_of(result, target)
            loss.backward()
            result = loss if way == "step" else result
        found += [result.detach(), target, *(t.detach() for t in given)]
        found += [t._base.detach() for t in given if t._base is not None]
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


RUNS = (("inline", "never", "gpipe"), ("threads", "always", "1f1b"))


@in_turn(case=list(CASES), run=RUNS, way=("call", "step", "no_grad", "eval"))
def test_the_caller_s_tensors(case: str, run: tuple[str, str, str], way: str) -> None:
    make, inputs = CASES[case]
    lanes, recompute, schedule = run
    model = make().double()
    pipe = split(copy.deepcopy(model), lanes=lanes, recompute=recompute, schedule=schedule)
    for wanted, found in zip(ran(model, inputs, way), ran(pipe, inputs, way), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_kind_of_call_knows_whether_an_input_wants_a_gradient() -> None:
    model = Asks().double()
    pipe = split(model)
    for wants in (False, True, False):
        value = numbers(ROWS, WIDTH).requires_grad_(wants)
        torch.testing.assert_close(pipe(value), model(value))


def changes_target(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target.mul_(0.5)) ** 2).mean()


def changes_output(output: Tensor, target: Tensor) -> Tensor:
    return output.sub_(target).pow(2).mean()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("loss_fn", [changes_target, changes_output])
def test_a_loss_that_changes_what_it_is_given_runs_once(loss_fn: Callable[..., Tensor], lanes: str) -> None:
    model = Late().double()
    pipe = split(copy.deepcopy(model), lanes=lanes)
    for _ in range(3):
        one, other = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH)
        wanted, value = loss_fn(model(one.clone()), one), numbers(ROWS, WIDTH)
        wanted.backward()
        torch.testing.assert_close(pipe.train_step(value, target=other, loss_fn=loss_fn), wanted.detach())
        torch.testing.assert_close(other, one)
    for found, parameter in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad)


def test_measuring_and_verifying_put_back_what_they_were_given() -> None:
    model = First().double()
    pipe = split(model)
    value, target = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH)
    pipe.profile_stages(value, target=target, loss_fn=changes_target, loss_reduction="mean", repeats=1)
    assert verify(model, pipe, value, target=target, loss_fn=changes_target)
    torch.testing.assert_close(value, numbers(ROWS, WIDTH))
    torch.testing.assert_close(target, numbers(ROWS, WIDTH))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# -- lists and dicts -------------------------------------------------------------------------------------------------
def entry(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["mask"] = (batch["x"][:, :1] > 0).to(batch["x"])
    return model.b(torch.tanh(model.a(batch["x"])) * batch["mask"])


def replaced(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] * 2
    return model.b(torch.tanh(model.a(batch["x"])))


def nested(model: Any, batch: dict[str, Any]) -> Tensor:
    batch.setdefault("seen", []).append(batch["x"].sum(1))
    batch.pop("y")
    return model.b(torch.tanh(model.a(batch["x"])))


def appended(model: Any, values: list[Tensor]) -> Tensor:
    values.append(values[0] * 2)
    return model.b(torch.tanh(model.a(values[0])))


def mixed(model: Any, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] - batch["x"].mean(0)
    return model.b(torch.tanh(model.a(batch["x"])))


BODIES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any]]] = {
    "an entry": (entry, lambda x: {"x": x}),
    "another value": (replaced, lambda x: {"x": x}),
    "a nested list, and an entry less": (nested, lambda x: {"x": x, "y": x[:, 0]}),
    "an element": (appended, lambda x: [x]),
    "a value of all rows": (mixed, lambda x: {"x": x}),
}


@pytest.mark.filterwarnings("ignore:2 devices were given")
@pytest.mark.parametrize("name", BODIES)
def test_the_callers_list_or_dict_is_changed_as_by_the_model(name: str) -> None:
    body, made = BODIES[name]
    model = Model(body)
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=3)
    value = numbers(7, WIDTH)
    with pytest.warns(UserWarning, match="forward changes a list or dict that it is given"):
        assert_given(model, pipe, made, value)
    assert_given(model, pipe, made, value)
    own, mine = made(value), made(value)
    loss = F.mse_loss(model(own), value)
    torch.testing.assert_close(pipe.train_step(mine, target=value, loss_fn=F.mse_loss), loss.detach())
    assert_same(mine, own)


def assert_given(model: nn.Module, pipe: nn.Module, made: Callable[[Tensor], Any], value: Tensor) -> None:
    own, mine = made(value), made(value)
    assert_same(pipe(mine), model(own))
    assert_same(mine, own)


def assert_same(mine: Any, own: Any) -> None:
    torch.testing.assert_close(mine, own, rtol=1e-12, atol=1e-12)
