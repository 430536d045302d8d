"""Stages alone: times of a clock that only they move, on streams that write down what they are told, no trace left."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError, autosplit, measured
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.step_log import Began, Copied, Ended, StepLog
from autosplit.schedule.action import Action
from tests.runtime import lane_models
from tests.runtime.happens_before import HOST, Record, Wait, problems
from tests.runtime.lane_models import Skips
from tests.runtime.recorded_pipe import RecordedPipe

WIDTH, ROWS, CHUNKS = 4, 8, 4


class _Tick(torch.autograd.Function):
    """Adds a row of weights, and moves a clock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Any) -> Tensor:
        ctx.stage = stage
        stage.pass_time(stage.forward_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.stage.pass_time(ctx.stage.backward_s)
        return gradients[0], gradients[0], None


class Ticking(nn.Module):
    """A stage that takes what it is told: on the clock that it moves, or at work."""

    def __init__(self, forward_s: float, backward_s: float, pass_time: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))
        self.forward_s, self.backward_s, self.pass_time = forward_s, backward_s, pass_time

    def forward(self, x: Tensor) -> Tensor:
        return _Tick.apply(x, self.weight, self)


def ticking(pass_time: Any, *, lanes: str, schedule: str = "1f1b") -> tuple[Any, dict[str, Any]]:
    model = nn.Sequential(Ticking(1.0, 2.0, pass_time), Ticking(3.0, 1.0, pass_time))
    batch = torch.randn(ROWS, WIDTH)
    given = {"devices": ["cpu", "cpu"], "chunks": CHUNKS, "sample": batch, "lanes": lanes, "schedule": schedule}
    pipe = autosplit(model, **given)
    assert [stage.modules for stage in pipe.plan.stages] == [("0",), ("1",)]
    return pipe, {"target": torch.randn(ROWS, WIDTH), "loss_fn": nn.MSELoss()}


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_times_are_those_of_each_action_alone_and_predict_the_step(lanes, monkeypatch):
    now = [0.0]
    pipe, given = ticking(lambda seconds: now.__setitem__(0, now[0] + seconds), lanes=lanes)
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    found = pipe.profile_stages(torch.randn(ROWS, WIDTH), **given, repeats=2)
    assert found.seconds == {"F": (1.0, 3.0), "B": (2.0, 1.0)}
    assert (found.issue_s, found.once_s, found.grown_bytes) == ({}, 0.0, (None, None))
    assert [(s.producer, s.consumer, s.forward_bytes) for s in found.sent] == [(0, 1, ROWS // CHUNKS * WIDTH * 4)]
    assert found.sent[0].forward_s == found.sent[0].backward_s == 0.0
    assert found.serial_s == found.on_one_device().step_s == CHUNKS * 7.0
    assert found.step().step_s == 1.0 + CHUNKS * 4.0 + 2.0  # the second stage is never idle in between


class Net(nn.Module):
    """A norm with statistics and dropout: what a step leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.dropout(torch.relu(self.first(self.norm(x))), 0.2, self.training))


def test_nothing_is_left_of_it():
    model, batch = Net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    weighted, target = nn.CrossEntropyLoss(weight=torch.ones(WIDTH)), torch.randint(WIDTH, (ROWS,))
    pipe = autosplit(model, devices=["cpu", "cpu"], chunks=CHUNKS, sample=batch)
    kept = model.first.weight.grad = torch.ones_like(model.first.weight)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn, threads = torch.get_rng_state(), torch.get_num_threads()
    found = pipe.profile_stages(batch, target=target, loss_fn=weighted, memory=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert model.first.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert model.last.weight.grad is None
    assert batch.grad is None
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert all(own > 0 for own in found.grown_bytes)
    assert pipe.profiled is None


def test_a_step_in_one_piece_is_refused_with_the_reason():
    pipe = autosplit(nn.Linear(WIDTH, WIDTH), devices=["cpu"], chunks=1, sample=torch.randn(2, WIDTH))
    given = {"target": torch.randn(2, WIDTH), "loss_fn": nn.MSELoss()}
    with pytest.raises(InputError, match="no stage runs alone: the batch gives one microbatch"):
        pipe.profile_stages(torch.randn(2, WIDTH), **given)
    with pytest.raises(InputError, match="repeats=0 measures nothing"):
        pipe.profile_stages(torch.randn(2, WIDTH), **given, repeats=0)


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cpu", "cuda:0"]])
def test_on_streams_the_host_waits_for_every_action_and_issues_behind_work(devices):
    torch.manual_seed(1)
    pipe = RecordedPipe(Skips(), devices, "cuda:0", schedule="1f1b")
    shape = (lane_models.ROWS, lane_models.WIDTH)
    value, target = torch.randn(shape), torch.randn(shape)
    with pipe.recording():
        batch, goal = pipe.put(value), pipe.put(target)
        found = pipe.pipe.profile_stages(batch, target=goal, loss_fn=nn.MSELoss(), repeats=2)
        del batch, goal
    assert not problems(pipe.streams.log)
    assert set(found.seconds) == set(found.issue_s) == {"F", "B"}
    assert min(itertools.chain(*found.seconds.values())) > 0
    assert [seconds > 0 for seconds in found.issue_s["F"]] == [device != "cpu" for device in devices]
    assert found.host_stages == {stage for stage, device in enumerate(devices) if device == "cpu"}
    copied = devices[0] != devices[1]
    assert all((sent.forward_s > 0) is (sent.backward_s > 0) is copied for sent in found.sent if sent.backward_bytes)
    cards = sum(device != "cpu" for device in devices)
    actions = len(list(pipe.pipe.plan.schedule_for(3))) * cards // 2
    assert len(pipe.streams.occupied) >= 2 * actions  # in each step but the first
    assert all(seconds > 0 for _, seconds in pipe.streams.occupied)
    waited = [entry for entry in pipe.streams.log if isinstance(entry, Wait) and entry.stream == HOST]
    assert len(waited) >= 3 * actions
    assert any(isinstance(entry, Record) for entry in pipe.streams.log)


def test_a_lanes_bytes_are_its_own_and_what_it_was_sent():
    first, last, log = Lane(), Lane(), StepLog(alone=True)
    log.lanes = first, last, Lane()

    def run(action: Action, *, grows: int, most: int, sends: tuple[Copied, ...] = ()) -> None:
        """Log an action that has ``most`` bytes more at once and leaves some."""
        log.events += [
            Began(action, 0.0, 0.0, 0.0, held_bytes=100),
            *sends,
            Ended(action, 0.0, 0.0, 0.0, 0.0, held_bytes=100 + grows, peak_bytes=100 + most),
        ]

    run(Action(0, "F", 0), grows=10, most=12)
    log.events.append(Copied(0, 1, 0, False, 4, None, None))  # 4 of the 10 bytes are sent, held twice between devices
    run(Action(1, "F", 0), grows=6, most=6)
    back = Copied(1, 0, 0, True, 4, None, None)  # their gradient, made in this action
    run(Action(1, "B", 0), grows=-2, most=5, sends=(back,))
    run(Action(0, "B", 0), grows=-14, most=1)
    assert measured._held_peaks([log]) == {first: 15, last: 15}
