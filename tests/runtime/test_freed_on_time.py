"""Activations end with their backward: as many live at a time as the schedule says, and none behind the step."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.schedule.action import Schedule

STAGES, CHUNKS = 2, 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved": 2, "looped_bfs": 2, "zb_v": 2}
"""The schedules of a training step, and their stages per lane."""
LANES = ("inline", "threads")
LOSS = nn.MSELoss()


class Living:
    """Counts what autograd's graph keeps alive, by block; the most that lived at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def born(self, block: int, graph: Any) -> None:
        """Count a node of autograd's graph until it ends."""
        token = Token()
        graph.token = token
        weakref.finalize(token, self.ended, block)
        with self.lock:
            self.now[block] += 1
            self.most[block] = max(self.most[block], self.now[block])

    def ended(self, block: int) -> None:
        with self.lock:
            self.now[block] -= 1

    def forget(self) -> None:
        self.most.clear()


class Token:
    """Lives as long as what holds it."""


LIVING = Living()
LOG = logging.getLogger(__name__)
"""Tells of nodes by its handler: what a forward changes itself is put back after a recording, or left by the call."""


class _Telling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LIVING.born(*record.args)  # type: ignore[misc]
        record.args = ()


LOG.addHandler(_Telling())
LOG.setLevel(logging.INFO)
LOG.propagate = False


class Watched(torch.autograd.Function):
    """Doubles a tensor, and is counted while the graph that it is in lives."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, block: int) -> Tensor:
        LOG.info("born", block, ctx)
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class Block(nn.Module):
    """A layer whose activations are counted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(16, 16), number

    def forward(self, value: Tensor) -> Tensor:
        return Watched.apply(torch.tanh(self.layer(value)), self.number)


def pipe_of(schedule: str, lanes: str) -> Any:
    """A pipe with one counted block per stage, after its first step."""
    torch.manual_seed(0)
    virtual = SCHEDULES[schedule]
    model = nn.Sequential(*(Block(number) for number in range(STAGES * virtual)))
    asked = {"virtual_stages": virtual} if virtual > 1 else {}
    pipe = autosplit(model, devices=STAGES, chunks=CHUNKS, schedule=schedule, lanes=lanes, **asked)
    step(pipe)
    LIVING.forget()
    return pipe


def step(pipe: Any) -> Tensor:
    value = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
    return pipe.train_step(value, target=value, loss_fn=LOSS)


def blocks_of(pipe: Any) -> list[set[int]]:
    return [{int(name[0]) for name in stage.nodes if "watched" in name.lower()} for stage in pipe.plan.stages]


def graphs_of(order: Schedule) -> tuple[int, ...]:
    """The most graphs that each stage holds at a time: from a forward to its backward, or to its input gradient."""
    now, most = [0] * order.stages, [0] * order.stages
    for action in (action for lane in order.lanes for action in lane):
        now[action.stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_as_many_live_as_the_schedule_says(schedule: str, lanes: str) -> None:
    pipe = pipe_of(schedule, lanes)
    loss = step(pipe)
    assert loss.grad_fn is None
    order = pipe.plan.schedule_for(CHUNKS)
    held = graphs_of(order)
    assert held == order.in_flight or "W" in order.kinds
    assert dict(LIVING.most) == {block: held[stage] for stage, own in enumerate(blocks_of(pipe)) for block in own}
    assert len(LIVING.most) == len(held)
    assert not any(LIVING.now.values())


@pytest.mark.parametrize("lanes", LANES)
def test_a_call_keeps_its_graph_until_the_backward_and_no_longer(lanes: str) -> None:
    pipe = pipe_of("1f1b", lanes)
    output = pipe(torch.ones(8, 16))
    assert set((+LIVING.now).values()) == {CHUNKS}
    loss = output.sum()
    loss.backward()
    if lanes == "inline":
        del loss, output  # autograd's own graph, as the plain model's, whose saved tensors are gone
    assert not any(LIVING.now.values())
    output = pipe(torch.ones(8, 16))
    del output
    assert not any(LIVING.now.values())
    with torch.no_grad():
        pipe(torch.ones(8, 16))
    assert not any(LIVING.now.values())


def _tensors() -> int:
    """Return how many tensors there are; pytree leaves a few functions behind each call, for the collector."""
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("lanes", LANES)
def test_a_step_leaves_nothing_to_collect(lanes: str, caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipe_of("1f1b", lanes)
    caplog.set_level(logging.CRITICAL, logger=__name__)  # nodes are not counted: pytest would keep the records
    value = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
    batch = weakref.ref(value)
    gc.collect()
    gc.disable()
    try:
        before = _tensors(), threading.active_count()
        for _ in range(5):
            step(pipe)
        pipe.train_step(value, target=value, loss_fn=LOSS)
        del value
        assert batch() is None
        assert _tensors() < before[0], "the batch is gone, and nothing has come"
        assert threading.active_count() == before[1]
    finally:
        gc.enable()


# -- autocast keeps the casts of leaves until its context ends: what goes from stage to stage is not among them ------
class Single(nn.Module):
    """Gives fp32, which the next layer casts."""

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value.float())


@pytest.mark.parametrize("lanes", LANES)
def test_values_between_stages_do_not_outlive_their_backward(lanes: str) -> None:
    left = []
    for rows in (8, 64):
        model = nn.Sequential(nn.Linear(16, 16), Single(), nn.Linear(16, 16), Single(), nn.Linear(16, 4))
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes, schedule="1f1b")
        batch, target = torch.randn(rows, 16), torch.randn(rows, 4)
        pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
        with Ledger() as ledger, torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
            before = ledger.live_bytes
            pipe.train_step(batch, target=target, loss_fn=nn.MSELoss())
            left.append(ledger.live_bytes - before)
    assert left[0] == left[1]
