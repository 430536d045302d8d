"""Stages with replicas in one process: numbers are the plain model's, whatever lane is faster."""

from __future__ import annotations

import copy
import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit, recordings
from autosplit.errors import InputError
from autosplit.runtime.lanes.lanes import Lane
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import ROWS, WIDTH, Skips, assert_close
from tests.runtime.recorded_pipe import RecordedPipe

LAYOUTS = ([2, 1], [1, 2], [2, 1, 1], [1, 2, 1], [1, 3, 1], [2])


class Net(nn.Module):
    """A tied layer, a skip, a shared value, dropout and a norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.tied = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.rand(8))
        self.drop = nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        hidden = skip = torch.tanh(self.first(value))
        gate = torch.softmax(self.scale, 0)
        for block in self.blocks:
            hidden = self.drop(block(self.tied(hidden)) * gate)
        return self.last(self.tied(hidden) + skip)


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"{name}.grad": own.grad for name, own in model.named_parameters() if own.grad is not None}
    return {name: value.detach().clone() for name, value in (model.state_dict() | grads).items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(state_of(one), state_of(other), rtol=0, atol=1e-12)


def trained(pipe: Any, optimizer: Any, *, called: bool = True) -> list[float]:
    """Train on 11 rows and at last on 10, at times by a call and a backward; return the losses."""
    stepped, losses = optimizer(pipe.parameters()), []
    for step, rows in enumerate((11, 11, 10)):
        value, target = batch(rows)
        torch.manual_seed(step)
        stepped.zero_grad()
        if called and step == 1:
            loss = nn.functional.mse_loss(pipe(value), target)
            loss.backward()
        else:
            loss = pipe.train_step(value, target=target, loss_fn=nn.functional.mse_loss)
        losses.append(float(loss.detach()))
        stepped.step()
    return losses


@cache
def alone(seed: int, chunks: int, optimizer: Any) -> tuple[nn.Module, list[float], Tensor]:
    """Return what training gives on one stage in the caller's thread: the plain model's numbers by microbatches."""
    model = made(seed)
    pipe = autosplit(model, 1, chunks)
    return model, trained(pipe, optimizer), pipe.eval_step(batch(7)[0])


@pytest.mark.parametrize(
    ("replicas", "lanes", "optimizer", "seed", "chunks"),
    [
        *((own, "threads", torch.optim.AdamW, 0, 5) for own in LAYOUTS),
        *((own, "inline", partial(torch.optim.SGD, lr=0.1), 1, 4) for own in ([1, 2, 1], [2])),
    ],
    ids=lambda own: str(own) if isinstance(own, (list, str)) else "",
)
def test_training_is_that_of_one_stage(replicas: list[int], lanes: str, optimizer: Any, seed: int, chunks: int):
    model, losses, output = alone(seed, chunks, optimizer)
    pipe = autosplit(own := made(seed), sum(replicas), chunks, replicas=replicas, lanes=lanes, cut="operations")
    assert trained(pipe, optimizer) == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(own, model)
    assert pipe.plan is not None
    assert pipe.plan.replicas == tuple(replicas)
    torch.testing.assert_close(pipe.eval_step(batch(7)[0]), output, rtol=0, atol=1e-12)


def test_a_batch_may_have_fewer_microbatches_than_replicas():
    one, other = made(0).eval(), made(0).eval()
    pipe = autosplit(one, 4, 8, replicas=[1, 3], sample=batch(8)[0])
    for rows in (3, 2, 1):
        value, target = batch(rows)
        loss = pipe.train_step(value, target=target, loss_fn=nn.MSELoss())
        plain = nn.functional.mse_loss(other(value), target)
        plain.backward()
        torch.testing.assert_close(loss, plain.detach(), rtol=0, atol=1e-12)
        assert_same(one, other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": [2, 2]}, "replicas=[2, 2] are 4 devices in 2 stages, and devices names 3"),
        ({"replicas": [2, 1], "schedule": "gpipe"}, "replicas=[2, 1] and schedule='gpipe'"),
        ({"replicas": [2, 1], "virtual_stages": 2}, "replicas=[2, 1] and virtual_stages="),
        ({"replicas": "auto", "recompute": ["never"] * 3}, "a number of stages, which replicas='auto' chooses"),
        ({"replicas": [2, 1], "recompute": ["never"] * 3}, "has 3 entries for 2 stages"),
    ],
)
def test_what_does_not_go_with_replicas(given: dict[str, Any], words: str):
    with pytest.raises(InputError, match=re.escape(words)):
        autosplit(made(0), 3, 4, **given)


class Failing(nn.Module):
    """A loss that raises at the third microbatch of a step, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [0]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] == 0:
            raise ValueError("no loss")
        return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_an_exception_in_a_replica_leaves_gradients_as_they_were(lanes: str):
    own = made(0).eval()
    pipe = autosplit(own, 3, 6, replicas=[1, 2], lanes=lanes)
    (value, target), loss_fn = batch(12), Failing()
    for _ in range(2):
        pipe.train_step(value, target=target, loss_fn=loss_fn, loss_reduction="mean")
    before = state_of(own)
    loss_fn.left[0] = 3
    with pytest.raises(ValueError, match="no loss") as raised:
        pipe.train_step(value, target=target, loss_fn=loss_fn, loss_reduction="mean")
    assert "stage 1, forward" in "".join(raised.value.__notes__)
    torch.testing.assert_close(state_of(own), before, rtol=0, atol=0)
    pipe.train_step(value, target=target, loss_fn=loss_fn, loss_reduction="mean")
    wanted = {name: own * (1.5 if name.endswith(".grad") else 1) for name, own in before.items()}
    torch.testing.assert_close(state_of(own), wanted, rtol=0, atol=1e-12)


def test_a_table_that_its_stage_changes_has_one_replica():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 3)

        def forward(self, value: Tensor) -> Tensor:
            return self.last(torch.tanh(self.table(value)).sum(1))

    value = torch.randint(9, (8, 2))
    with pytest.raises(InputError, match=r"stage 0 has 2 replicas, and '.*' looks up a table with max_norm"):
        autosplit(Table(), 3, 4, replicas=[2, 1], sample=value)
    assert autosplit(Table(), 3, 4, replicas=[1, 2], sample=value)(value).shape == (8, 3)


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_a_hook_that_changes_a_buffer_has_one_replica(how: str):
    def count(module: nn.Module, given: Any, made: Any) -> None:
        if how == "anew":
            module.calls = module.calls + 1
        else:
            module.calls.add_(1)

    def split(replicas: list[int]) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        model[1].register_buffer("calls", torch.zeros(()))
        model[1].register_forward_hook(count)
        return model[1], autosplit(model, sum(replicas), 4, replicas=replicas, lanes="inline")

    value = batch(8)[0]
    given: dict[str, Any] = {"target": value, "loss_fn": nn.MSELoss()}
    with pytest.raises(InputError, match="module '1' change its buffer 'calls', and the 2 replicas of stage 0"):
        split([2])[1].train_step(value, **given)
    with pytest.raises(InputError, match="module '1' change its buffer 'calls', and the 2 replicas of stage 0"):
        list(split([2])[1].train_stream([(value, value)] * 3, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD))
    layer, pipe = split([1])
    pipe.train_step(value, **given)
    assert layer.calls == 4


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the second lane that is made another device, whose memory is the first one's."""
    lanes = [Lane() for _ in range(4)]
    lanes[1].device = torch.device("cpu", 0)
    left = iter(lanes)
    monkeypatch.setattr(recordings, "lane", lambda device: next(left))


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2, 1], [3, 1]], ids=str)
def test_a_replica_on_another_device_has_copies(replicas: list[int], monkeypatch: pytest.MonkeyPatch):
    model, losses, output = alone(0, 5, torch.optim.AdamW)
    elsewhere(monkeypatch)
    own = made(0)
    names, parameters = list(own.state_dict()), list(own.parameters())
    pipe = autosplit(own, sum(replicas), 5, replicas=replicas, cut="operations")
    assert trained(pipe, torch.optim.AdamW) == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(own, model)
    assert list(own.state_dict()) == names
    assert all(one is other for one, other in zip(own.parameters(), parameters, strict=True))
    torch.testing.assert_close(pipe.eval_step(batch(7)[0]), output, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("devices", "replicas"),
    [
        (["cuda:0"] * 3, [2, 1]),
        (["cuda:0", "cuda:1", "cuda:0"], [2, 1]),
        (["cpu", "cuda:0", "cuda:1", "cuda:2"], [1, 2, 1]),
    ],
    ids=["one card", "two cards", "CPU and cards"],
)
def test_devices_wait_for_each_other(devices: list[str], replicas: list[int]):
    run = RecordedPipe(model := Skips(), devices, "cuda:0", schedule="auto", replicas=replicas, wants_gradient=True)
    plain, value = copy.deepcopy(model), torch.randn(ROWS, WIDTH, requires_grad=True)
    target = torch.randn(ROWS, WIDTH)
    loss = nn.functional.mse_loss(plain(value), target)
    loss.backward()
    expected = [loss.detach(), *(own.grad for own in plain.parameters()), value.grad]
    for found in (run.train(value, target, nn.MSELoss()), run.train(value, target, nn.MSELoss())):
        assert_close(found, [own for own in expected if own is not None])
    assert problems(run.streams.log) == []
