"""What ranks have to agree in: an error on every rank, with what each has, before the first message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed.facts import call_text, checksum
from autosplit.distributed.words import difference
from tests.distributed.processes import Pool, error_of


def model(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(rows: int = 8, seed: int = 0, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _refused(make: Callable[[int], Any]) -> str:
    return error_of(make, dist.get_rank(), meet=True)


def _pipe(**how: Any) -> Any:
    return autosplit(how.pop("model", model)(), devices="torchrun", chunks=4, sample=batch(), **how)


def other_seed() -> str:
    return _refused(lambda rank: _pipe(model=lambda: model(seed=rank)))


def other_width() -> str:
    return _refused(lambda rank: autosplit(model(width=8 + rank), devices="torchrun", sample=batch(width=8 + rank)))


def other_schedule() -> str:
    return _refused(lambda rank: _pipe(schedule=("gpipe", "1f1b")[rank]))


def plan_for_three() -> str:
    """Give a plan for three devices to two ranks."""
    plan = [autosplit(model(), devices=3, chunks=4, sample=batch()).plan]
    dist.broadcast_object_list(plan)
    return _refused(lambda rank: _pipe(plan=plan[0]))


def without_sample() -> str:
    return _refused(lambda rank: autosplit(model(), devices="torchrun"))


def _step(pipe: Any, **how: Any) -> Tensor:
    given = {"rows": 8, "seed": 1, "random": 3, "target": 2, "loss_fn": F.mse_loss} | how
    torch.manual_seed(given["random"])
    target = batch(given["rows"], given["target"])
    return pipe.train_step(batch(given["rows"], given["seed"]), target=target, loss_fn=given["loss_fn"])


def one_step(name: str, *, first: bool) -> tuple[str, float]:
    """Take a step in which rank 1 has another value, then one in which it has not; ``first``: no step went before."""
    pipe = _pipe()
    if not first:
        _step(pipe)
    pipe.zero_grad()
    found = _refused(lambda rank: _step(pipe, **({name: 6} if rank else {})))
    untouched = all(parameter.grad is None for parameter in pipe.parameters())
    return found if untouched else "a gradient was added", float(_step(pipe))


def one_rank_without_loss() -> str:
    """Leave the loss function out on rank 1."""
    pipe = _pipe()
    how = [{"target": batch(), "loss_fn": F.mse_loss}, {}]
    return _refused(lambda rank: pipe.train_step(batch(), **how[rank]))


def a_call_beside_a_step() -> str:
    """Call the pipe on rank 1 in eval mode while rank 0 trains: another kind of call."""
    pipe = _pipe()
    calls = [lambda: _step(pipe), lambda: pipe.eval_step(batch())]
    return _refused(lambda rank: calls[rank]())


def an_output_beside_a_step() -> str:
    """Ask for the output on rank 1 in the mode of training; the batch is on rank 0 only."""
    pipe = _pipe(feed="first_last")
    _step(pipe)
    calls = [lambda: pipe.train_step(batch()), lambda: pipe()]
    return _refused(lambda rank: calls[rank]())


def clipping_beside_a_step() -> str:
    """Clip gradients on rank 1 while rank 0 trains."""
    pipe = _pipe()
    _step(pipe)
    calls = [lambda: _step(pipe), lambda: pipe.clip_grad_norm_(1.0)]
    return _refused(lambda rank: calls[rank]())


def other_dtype() -> str:
    """Call with another dtype on rank 1: a kind of call that only rank 1 does not know."""
    pipe = _pipe()
    _step(pipe)
    given = {"target": batch(), "loss_fn": F.mse_loss}
    return _refused(lambda rank: pipe.train_step(batch().to((torch.float32, torch.float64)[rank]), **given))


def loss_that_raises() -> str:
    """Raise in the loss function, which only the last stage's rank calls."""
    pipe = _pipe()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss today")

    return _refused(lambda rank: pipe.train_step(batch(), target=batch(), loss_fn=loss))


class Scaled(nn.Module):
    """A loss with a number of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)


class Weighted:
    """A loss that is no module, with a number in a list and a log of its own."""

    def __init__(self, scale: float) -> None:
        self.weights, self.calls, self.log = [scale, 1.0], 0, list[int]()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return self.weights[0] * F.mse_loss(output, target)


def losses_that_keep() -> list[float]:
    """Take two steps with one of torch's losses, and with others that change what they hold where they are called."""
    pipe, average, calls, counted = _pipe(), torch.zeros(()), {"all": 0}, 0

    def averages(output: Tensor, target: Tensor, *, log: list[int] = []) -> Tensor:  # noqa: B006
        nonlocal counted
        counted += 1
        calls["all"] += 1
        log.append(counted)
        average.mul_(0.9)
        average.add_(1.0)
        return F.mse_loss(output, target)

    kinds = (F.mse_loss, averages, Weighted(1.0), Scaled(1.0))
    return [float(_step(pipe, loss_fn=loss)) for loss in kinds for _ in range(2)]


def losses() -> list[str]:
    """Give rank 1 losses that hold other numbers, then the same losses to both."""
    pipe = _pipe()
    found = []
    for here in (lambda rank: 1.0 + 2 * rank, lambda rank: 2.0):
        for name in LOSSES:
            loss = _losses(here(dist.get_rank()))[name]
            step = partial(pipe.train_step, batch(), target=batch(seed=2), loss_fn=loss, loss_reduction="mean")
            found.append(_refused(lambda rank, step=step: step()))
    return found


def _losses(scale: float) -> dict[str, Any]:
    held, weights, array = Scaled(scale), torch.full((8,), scale), np.full(3, scale)
    return {
        "closure": lambda output, target: scale * F.mse_loss(output, target),
        "default": lambda output, target, scale=scale: scale * F.mse_loss(output, target),
        "module": held,
        "module in a closure": lambda output, target: held(output, target),
        "bound method": held.forward,
        "attribute": lambda output, target: held.scale * F.mse_loss(output, target),
        "partial": partial(F.huber_loss, delta=scale),
        "tensor": lambda output, target: (weights * (output - target) ** 2).mean(),
        "object": Weighted(scale),
        "keyword": lambda output, target, *, scale=scale: scale * F.mse_loss(output, target),
        "array": lambda output, target: float(array[0]) * F.mse_loss(output, target),
        "entry": lambda output, target, held={"scale": scale}: held["scale"] * F.mse_loss(output, target),
    }


LOSSES = tuple(_losses(0.0))
PIPES = {
    other_seed: ("the values of their models", "0.weight"),
    other_width: ("their models", "0.weight: torch.float32[8, 8]", "0.weight: torch.float32[8, 9]"),
    other_schedule: ("the arguments of autosplit()", "schedule='gpipe'", "schedule='1f1b'"),
    plan_for_three: ("3 lanes", "2"),
    without_sample: ("sample=",),
    one_rank_without_loss: ("the target",),
    a_call_beside_a_step: ("the call", "rank 0", "rank 1"),
    an_output_beside_a_step: ("the ranks make different calls: rank 0 takes a step, rank 1 calls the pipe",),
    clipping_beside_a_step: ("the ranks make different calls: rank 0 takes a step, rank 1 clips gradients",),
    other_dtype: ("the ranks differ in the call: rank 0 has torch.float32[8, 8]", "rank 1 has torch.float64[8, 8]"),
    loss_that_raises: ("no loss today",),
}
STEPS = {
    "rows": "the call",
    "seed": "the batch's values",
    "random": "torch's random state",
    "target": "the target",
}


def test_losses_that_hold_other_numbers_are_refused(ranks: Pool) -> None:
    for found in ranks(2).run(losses):
        for name, text in zip(LOSSES, found, strict=False):
            assert "the ranks differ in " in text, (name, text)
            held = "that the loss holds" if name in ("tensor", "array") else "= 1.0, rank 1 has"
            assert held in text, (name, text)
        assert found[len(LOSSES) :] == ["nothing was raised"] * len(LOSSES)


def test_what_a_loss_changes_where_it_is_called_does_not_count(ranks: Pool) -> None:
    """The log, counter and running average of a loss grow on the last rank alone; its value is that of torch's loss."""
    for found in ranks(2).run(losses_that_keep):
        assert found == [found[0]] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [100, 100_001])
def test_contents_are_of_values_alone(dtype: torch.dtype, size: int) -> None:
    """The same for a view that begins anywhere, another for values that change, or change places near or far."""
    values = torch.randint(0, 200, (size + 1,), generator=torch.Generator().manual_seed(0)).to(dtype)[1:]
    assert checksum([values]) == checksum([values.clone()])
    for places in ([0], [0, 1], [3, size - 1], [8, 72], list(range(size))):
        other = values.clone()
        other[places] = values[places].roll(1) if len(places) > 1 else values[places] + 1
        assert torch.equal(other, values) or checksum([other]) != checksum([values]), places


def test_contents_of_a_quantised_weight_are_those_of_its_pieces() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    first, second, third = (torch.rand(4) for _ in range(3))
    assert checksum([TwoTensor(first, second)]) == checksum([TwoTensor(first.clone(), second)])
    assert checksum([TwoTensor(first, second)]) != checksum([TwoTensor(first, third)])


@pytest.mark.parametrize("call", PIPES, ids=lambda call: call.__name__)
def test_ranks_that_differ_are_told_so(ranks: Pool, call: Callable[[], str]) -> None:
    for found in ranks(2).run(call):
        assert all(text in found for text in PIPES[call]), found


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_differs_is_refused_and_the_next_one_runs(ranks: Pool, name: str, first: bool) -> None:
    one, other = ranks(2).run(one_step, name, first=first)
    assert one == other
    assert f"the ranks differ in {STEPS[name]}" in one[0]


def test_a_difference_names_the_module_or_parameter() -> None:
    def differing(change: Any) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        before = call_text(model, (), {})
        change(model)
        return difference("the kind of call", (0, before), (3, call_text(model, (), {})))

    assert differing(lambda model: model[1].eval()).endswith("rank 0 has 1.training=True, rank 3 has 1.training=False")
    frozen = differing(lambda model: model[1][0].bias.requires_grad_(False))
    assert frozen.endswith("rank 0 has 1.0.bias.requires_grad=True, rank 3 has 1.0.bias.requires_grad=False")
