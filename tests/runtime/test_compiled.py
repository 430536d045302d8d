"""compile=True: the numbers within rounding, few compilations, and no failure of the compiler is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit import autosplit
from tests.equivalence.side_by_side import assert_equal, grads
from tests.pairwise import in_turn

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
"""What torch's compiler itself warns of while it reads a stage."""
KINDS = [("inline", "block"), ("threads", "never"), ("threads", "always")]


class Net(nn.Module):
    """A tie, a skip, an operation in place behind a cut, and a size that depends on the rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.third = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        near = torch.relu_(self.first(value))
        far = self.blocks(self.norm(near) + value)
        back = self.third(far).view(value.shape[0], 2, 4).flatten(1)
        return torch.tanh(self.last(self.drop(back) + near)) + far


class Counted:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.made += 1
        return graph.forward

    def __reduce__(self) -> str:
        return "BACKEND"


BACKEND = Counted()


def run(module: nn.Module, rows: int) -> list[Any]:
    """Output, gradient of the input and of all parameters."""
    value = torch.linspace(-1, 1, rows * 8, dtype=torch.float64).reshape(rows, 8).sin().requires_grad_()
    module.zero_grad()
    output = module(value)
    (output * output).sum().backward()
    return [output.detach(), value.grad, *grads(module)]


def step(module: nn.Module, rows: int) -> list[Any]:
    """Loss and gradients of a training step."""
    value = torch.linspace(-1, 1, rows * 8, dtype=torch.float64).reshape(rows, 8).sin()
    module.zero_grad()
    loss_fn = nn.MSELoss()
    if isinstance(module, Net):
        loss = loss_fn(module(value), value.cos())
        loss.backward()
    else:
        loss = module.train_step(value, target=value.cos(), loss_fn=loss_fn)
    return [loss.detach(), *grads(module)]


@in_turn(share=(1, 3), kind=KINDS)
def test_the_plain_models_numbers_on_ragged_batches(kind: tuple[str, str]) -> None:
    lanes, again = kind
    torch.manual_seed(0)
    model, counted = Net(), Counted()
    pipe = autosplit(model, devices=3, chunks=3, lanes=lanes, recompute=again, compile={"backend": counted})
    for rows in (6, 8):  # the second batch has microbatches of 3 and of 2 rows
        assert_equal(run(pipe, rows), run(model, rows))
        assert_equal(step(pipe, rows), step(model, rows))
    made = counted.made
    assert "not compiled" not in pipe.report()
    assert made
    for rows in (7, 11):
        assert_equal(run(pipe, rows), run(model, rows))
        assert_equal(step(pipe, rows), step(model, rows))
    assert counted.made == made
    assert "not compiled" not in pipe.report()


def test_a_stage_that_draws_runs_as_it_is_and_the_report_says_why() -> None:
    torch.manual_seed(0)
    model, counted = Net(0.5), Counted()
    found = []
    for asked in (False, {"backend": counted}):
        pipe = autosplit(model, devices=2, chunks=2, compile=asked, sample=torch.ones(4, 8, dtype=torch.float64))
        torch.manual_seed(3)
        found.append(run(pipe, 5))
    assert_equal(found[1], found[0])
    drawing = [line for line in pipe.report().splitlines() if line.startswith("not compiled")]
    assert len(drawing) == 1
    assert "draws" in drawing[0]
    assert counted.made


def test_a_compiler_that_fails_costs_a_line_in_the_report() -> None:
    def failing(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise RuntimeError("no such instruction")

    torch.manual_seed(0)
    model = Net()
    pipe = autosplit(model, devices=2, chunks=2, compile={"backend": failing})
    assert_equal(run(pipe, 5), run(model, 5))
    lines = [line for line in pipe.report().splitlines() if line.startswith("not compiled")]
    assert len(lines) == 2
    assert all("no such instruction" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, {"mode": "default", "dynamic": True}])
def test_inductors_code(asked: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    pipe = autosplit(model, devices=2, chunks=2, compile=asked)
    assert_equal(step(pipe, 4), step(model, 4), tolerance=1e-10)
    assert "not compiled" not in pipe.report()
