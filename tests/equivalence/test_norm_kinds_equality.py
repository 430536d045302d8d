"""Running statistics of the first norm are the plain model's, whatever it is made of and however the step runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit, verify
from tests.equivalence.equality import (
    LANES,
    Batch,
    assert_equal_runs,
    assert_same_bits,
    difference,
    forward_backward,
    train_step,
)
from tests.models.named import numbers
from tests.runtime.test_batch_norm_statistics import NormAct

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH = 6


class Net(nn.Module):
    """``body`` between two linear layers."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body
        for name, part in parts.items():
            self.register_buffer(name, part) if isinstance(part, Tensor) else setattr(self, name, part)
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(value)))


def twice(net: Any, value: Tensor) -> Tensor:
    return net.norm(value) + net.norm(value.tanh())


def read_behind(net: Any, value: Tensor) -> Tensor:
    return net.norm(value) * net.norm.running_var


def one_of_two(net: Any, value: Tensor) -> Tensor:
    return F.batch_norm(value, net.means[1], net.variances[1], training=net.training, momentum=0.2)


def by_instance(net: Any, value: Tensor) -> Tensor:
    return net.norm(value.unflatten(1, (2, 3))).flatten(1)


def stack(size: int) -> Tensor:
    return torch.arange(2.0 * size).view(2, size)


def norm(**options: Any) -> nn.Module:
    return nn.BatchNorm1d(WIDTH, **options)


BUILD: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(lambda net, value: net.norm(value), norm=norm()),
    "own python": lambda: Net(lambda net, value: net.norm(value), norm=NormAct(WIDTH)),
    "twice, cumulative": lambda: Net(twice, norm=norm(momentum=None)),
    "read behind it": lambda: Net(read_behind, norm=norm()),
    "buffers in a stack": lambda: Net(one_of_two, means=stack(WIDTH), variances=stack(WIDTH)),
    "single process": lambda: Net(lambda net, value: net.norm(value), norm=nn.SyncBatchNorm(WIDTH)),
    "instances": lambda: Net(by_instance, norm=nn.InstanceNorm1d(2, track_running_stats=True)),
    "frozen": lambda: Net(lambda net, value: net.norm(value), norm=norm()),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = BUILD[name]()
    if name == "frozen":
        model.get_submodule("norm").eval()
    return model


def assert_equal_buffers(model: nn.Module, plain: nn.Module) -> None:
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert difference(buffer.double(), expected.double()) <= 1e-12, name


@pytest.mark.parametrize("name", list(BUILD))
def test_the_first_norms_statistics_are_the_plain_models(name: str) -> None:
    model, plain = build(name), build(name)
    pipe, own = autosplit(model, devices=["cpu"] * 2, chunks=4), [id(buffer) for buffer in model.buffers()]
    for seed, rows in enumerate((8, 11, 3)):
        value = numbers(rows, WIDTH, seed=seed).detach()
        pipe(value)
        plain(value)
        assert_equal_buffers(model, plain)
    pipe.train_step(value, target=torch.zeros(3, WIDTH).double(), loss_fn=F.mse_loss)
    with torch.no_grad():
        plain(value)
        plain(value)
        pipe(value)
    assert_equal_buffers(model, plain)
    assert [id(buffer) for buffer in model.buffers()] == own


@pytest.mark.parametrize("lanes", LANES)
def test_a_step_that_fails_midway_leaves_buffers_as_they_were(lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), norm()).double()
    pipe, value = autosplit(model, devices=["cpu"] * 2, chunks=3, lanes=lanes), numbers(8, WIDTH)
    pipe(value)
    before = [(buffer.clone(), buffer._version) for buffer in model.buffers()]
    monkeypatch.setattr(nn.Tanh, "forward", _raise_at_two_rows)
    for call in (pipe, lambda x: pipe.train_step(x, target=x, loss_fn=F.mse_loss)):
        with pytest.raises(ArithmeticError, match="no more"):
            call(value)
        for buffer, (content, version) in zip(model.buffers(), before, strict=True):
            assert torch.equal(buffer, content)
            assert buffer._version == version
    monkeypatch.undo()
    pipe(value)
    assert int(model[1].num_batches_tracked) == int(before[2][0]) + 1


def _raise_at_two_rows(module: nn.Module, value: Tensor) -> Tensor:
    """The last of three microbatches of eight rows has two."""
    if len(value) == 2:
        raise ArithmeticError("no more")
    return value.tanh()


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "block"), ("gpipe", "always"), ("zb_h1", "always")])
def test_any_schedule_and_a_second_run_give_the_same_bits(schedule: str, recompute: str) -> None:
    batch, target = Batch((numbers(11, WIDTH),)), torch.zeros(11, WIDTH).double()

    def step(**options: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            layers = [nn.Linear(WIDTH, WIDTH), norm(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm(momentum=None)]
            model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, **options)
        return train_step(pipe, batch, target=target, loss_fn=F.mse_loss)

    assert_same_bits(step(schedule=schedule, recompute=recompute), step(schedule="1f1b", lanes="inline"))


@pytest.mark.parametrize("lanes", LANES)
def test_full_norms_are_the_plain_models(lanes: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), norm(), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), norm()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(model)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes, batch_norm="full")
    for seed in range(2):
        batch, target = Batch((numbers(11, WIDTH, seed=seed),)), numbers(11, WIDTH, seed=7).detach()
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
        got = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
        expected = forward_backward(plain, batch, loss=lambda output, t=target: F.mse_loss(output, t))
        assert difference(got.loss, expected.loss) <= 1e-12
        assert_equal_buffers(model, plain)
    assert "2 batch norm layers see the whole batch, as in the plain model" in " ".join(pipe.report().split())
    found = verify(model, pipe, batch.args)
    assert found.equal
    assert found.notes == ()


def test_the_report_says_whose_statistics_they_are() -> None:
    pipe = autosplit(build("plain"), devices=["cpu"] * 2, chunks=4, sample=numbers(8, WIDTH).detach())
    text = " ".join(pipe.report().split())
    assert "1 batch norm layer normalises each microbatch by itself" in text
    assert "the plain model's for the first (norm#0)" in text
