"""A steady step issues the same operations as the one before, and reads nothing back: it could be captured as a graph.

And the code that runs its stages follows whatever is done to the modules between two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import autosplit

ROWS, WIDTH, CHUNKS = 8, 6, 4
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal")


class Log(TorchDispatchMode):
    """Writes down every operation, with the sizes of what it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [tuple(t.shape) for t in (*args, result) if isinstance(t, Tensor)]
        self.lines.append((str(func), *sizes))
        return result


class Net(nn.Module):
    """A residual block with a norm over rows, a dropout and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.norm(self.first(x)).relu())
        return self.last(x + self.second(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_steady_step_issues_what_the_last_one_did_and_reads_nothing_back(schedule: str) -> None:
    torch.manual_seed(0)
    pipe = autosplit(Net(), ["cpu"] * 2, CHUNKS, schedule=schedule, lanes="inline", batch_norm="micro")
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    logs = []
    for _ in range(4):
        pipe.zero_grad(set_to_none=True)
        with Log() as log:
            pipe.train_step(x, target=y, loss_fn=nn.MSELoss())
        logs.append(log.lines)
    assert logs[2] == logs[3]
    assert not [line for line in logs[3] if line[0].startswith(READS)]


def _hook(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, output: output * 2)


def _replace(model: Any) -> None:
    torch.manual_seed(3)
    model.second = nn.Linear(WIDTH, WIDTH).double()


def _assign(model: Any) -> None:
    model.load_state_dict({name: value.clone() + 0.1 for name, value in model.state_dict().items()}, assign=True)


def _swap(model: Any) -> None:
    model.second.weight.data = model.second.weight.data.clone() * 3


def _patch(model: Any) -> None:
    forward = model.second.forward
    model.second.forward = lambda x: forward(x) * 2


def _freeze(model: Any) -> None:
    model.second.weight.requires_grad_(False)


def _evaluate(model: Any) -> None:
    model.norm.eval()


def _observe(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, output: None)


def _shadow(model: Any) -> None:
    vars(model.second)["weight"] = torch.ones(WIDTH, WIDTH).double()


def _call(model: Any) -> None:
    call = model.second._call_impl
    model.second._call_impl = lambda x: call(x) * 2


CHANGES = [_hook, _replace, _assign, _swap, _patch, _freeze, _evaluate, _observe, _shadow, _call]


@pytest.mark.parametrize("at", [0, 2], ids=["before", "between"])
@pytest.mark.filterwarnings("ignore:2 devices were given")
@pytest.mark.parametrize("mixes", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_modules_before_and_between_steps_counts(
    change: Callable[[Any], None], mixes: bool, at: int
) -> None:
    torch.manual_seed(0)
    plain: Any = Net().double()
    plain.drop.p = 0.0
    if not mixes:  # then all layers are in stages
        plain.norm = nn.Identity()
    model = copy.deepcopy(plain)
    if at == 0:
        change(plain)
        change(model)
    pipe = autosplit(model, ["cpu"] * 2, CHUNKS, schedule="1f1b", lanes="inline", batch_norm="full")
    x, y = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()
    for step in range(4):
        if step == at > 0:
            change(plain)
            change(model)
        plain.zero_grad(set_to_none=True)
        pipe.zero_grad(set_to_none=True)
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()
        loss = pipe.train_step(x, target=y, loss_fn=nn.MSELoss())
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                dict(model.named_parameters())[name].grad, parameter.grad, rtol=1e-10, atol=1e-12
            )
