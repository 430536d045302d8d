"""What really ran: every action of a profiled step once, in its lane's order, and the step's numbers as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.request import ask
from autosplit.planning.timeline import StepTimeline
from autosplit.runtime.step_log import StepLog
from autosplit.schedule.action import Action
from tests.runtime import lane_models
from tests.runtime.gates import Boom
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import Skips
from tests.runtime.recorded_pipe import RecordedPipe

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH, ROWS, CHUNKS, DEVICES = 6, 9, 4, 2
CASES = [
    ("gpipe", "inline", "never"),
    ("1f1b", "threads", "except_last"),
    ("looped_bfs", "threads", "never"),
    ("zb_v", "inline", "never"),
    ("zb_v", "threads", "never"),
    ("zb_h1", "inline", "always"),
    ("interleaved", "threads", "block"),
]


class Net(nn.Module):
    """Layers with dropout, a norm with statistics and a skip over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        kept = value = self.norm(value)
        for layer in self.layers:
            value = self.dropout(torch.tanh(layer(value)))
        return value + kept


class Plain(nn.Sequential):
    """Layers and nothing else."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def split(model: nn.Module, schedule: str = "1f1b", lanes: str = "threads", **options: Any) -> PipelinedModule:
    asked = ask(schedule, virtual_stages=1, devices=DEVICES, chunks=CHUNKS)
    return PipelinedModule(
        model,
        Options(
            (torch.device("cpu"),) * DEVICES,
            CHUNKS,
            schedule=asked.schedule,
            virtual_stages=asked.virtual_stages,
            lanes=lanes,
            rng="plain",
            **{"measure": False, **options},
        ),
    )


def step(pipe: PipelinedModule, kind: str, *, rows: int = ROWS, loss_fn: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """Run a step; return what it gave, and all that it left behind."""
    generator = torch.Generator().manual_seed(3)
    value, target = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    value.requires_grad_()
    pipe.zero_grad()
    before = copy.deepcopy(pipe.state_dict())
    torch.manual_seed(5)
    gave = getattr(pipe, kind)(value, target=target, loss_fn=loss_fn or nn.MSELoss())
    left = {name: p.grad for name, p in pipe.named_parameters()} | {"input": value.grad}
    left |= {name: buffer.clone() for name, buffer in pipe.named_buffers()} | {"draw": torch.rand(())}
    pipe.load_state_dict(before)
    return gave, {name: tensor.clone() for name, tensor in left.items() if tensor is not None}


def check(timeline: StepTimeline, pipe: PipelinedModule, *, microbatches: int = CHUNKS) -> None:
    """Check that each lane ran the schedule's actions in order, one after the other, and none before its time."""
    assert pipe.plan is not None
    schedule = pipe.plan.schedule_for(microbatches)
    bars = {Action(bar.stage, bar.kind, bar.microbatch): bar for bar in timeline.bars}
    assert len(timeline.bars) == len(bars)
    for lane, actions in enumerate(schedule.lanes):
        own = [bar for bar in timeline.bars if bar.lane == lane]
        assert [Action(bar.stage, bar.kind, bar.microbatch) for bar in own] == list(actions)
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))
    for action, bar in bars.items():
        assert 0 <= bar.start_s <= bar.end_s <= timeline.step_s
        assert all(bars[need].end_s <= bar.start_s for need in schedule.needs(action) if action.kind == "F")
    assert min(bar.start_s for bar in timeline.bars) == 0
    assert max(bar.end_s for bar in timeline.bars) == pytest.approx(timeline.step_s)
    assert timeline.measured
    assert timeline.whole is None
    assert timeline.once_s > 0


@pytest.mark.parametrize(("schedule", "lanes", "recompute"), CASES)
def test_a_profiled_step_is_the_step_to_every_bit(schedule: str, lanes: str, recompute: str) -> None:
    torch.manual_seed(0)
    pipe = split(Net(), schedule, lanes, recompute=(recompute,))
    found = [step(pipe, kind) for kind in ("profile_step", "train_step", "profile_step")]  # the first one plans
    loss, expected = found.pop(1)
    for timeline, left in found:
        check(timeline, pipe)
        assert timeline.loss == float(loss)
        assert left.keys() == expected.keys()
        assert all(torch.equal(left[name], tensor) for name, tensor in expected.items())


def test_values_leave_when_their_action_ends_and_gradients_too() -> None:
    pipe = split(Plain())
    timeline, _ = step(pipe, "profile_step")
    ends = {(bar.stage, bar.kind, bar.microbatch): bar.end_s for bar in timeline.bars}
    assert {(s.source, s.target, s.microbatch, s.backward) for s in timeline.sent} == {
        way for m in range(CHUNKS) for way in ((0, 1, m, False), (1, 0, m, True))
    }
    for sent in timeline.sent:
        assert sent.start_s == sent.end_s == ends[sent.source, "B" if sent.backward else "F", sent.microbatch]


# -- steps that follow no schedule ---------------------------------------------------------------------------------
class OwnPython(Plain):
    """Reads values in Python, others at every call: no graph follows it."""

    def forward(self, value: Tensor) -> Tensor:
        for layer in self:
            value = layer(value) * (1 + float(value.detach().abs().sum()) % 2)
        return value


class Hooked(Plain):
    """The pipe has hooks."""


class Mixing(Net):
    """An output that mixes rows."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return value - value.std(0)


@pytest.mark.parametrize(
    ("model", "rows", "lanes", "why"),
    [
        (Net, 2, "threads", "gives one microbatch"),
        (OwnPython, ROWS, "threads", "its own Python"),
        (Mixing, ROWS, "threads", "wants the whole batch"),
        (Mixing, ROWS, "inline", "wants the whole batch"),
        (Hooked, ROWS, "threads", "has hooks"),
    ],
)
def test_a_step_in_one_piece_says_why(model: Callable[[], nn.Module], rows: int, lanes: str, why: str) -> None:
    torch.manual_seed(0)
    pipe = split(model(), lanes=lanes)
    if model is Hooked:
        pipe.register_forward_hook(lambda *_: None)
    timeline, left = step(pipe, "profile_step", rows=rows)
    loss, expected = step(pipe, "train_step", rows=rows)
    assert why in str(timeline.whole)
    assert timeline.step_s > 0
    assert timeline.loss == float(loss)
    assert all(torch.equal(left[name], tensor) for name, tensor in expected.items())


def test_a_failed_step_raises_as_ever_and_the_next_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = split(Plain())
    step(pipe, "train_step")

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise Boom

    with pytest.raises(Boom):
        step(pipe, "profile_step", loss_fn=fails)
    monkeypatch.setattr(StepLog, "begins", lambda *_: pytest.fail("nobody asked"))
    step(pipe, "train_step")


# -- CUDA ------------------------------------------------------------------------------------------------------------
def clocked(devices: list[str], schedule: str) -> tuple[RecordedPipe, StepTimeline, list[Tensor]]:
    """Return a pipe on recording lanes, a step of it, and the gradients that it left."""
    torch.manual_seed(1)
    pipe = RecordedPipe(Skips(), devices, "cuda:0", schedule=schedule)
    value, target = torch.randn(lane_models.ROWS, lane_models.WIDTH), torch.randn(lane_models.ROWS, lane_models.WIDTH)
    with pipe.recording():
        batch, goal = pipe.put(value), pipe.put(target)
        timeline = pipe.pipe.profile_step(batch, target=goal, loss_fn=nn.MSELoss())
        del goal
        left = pipe._gradients(batch)
        del batch
    return pipe, timeline, left


PLACES = (["cuda:0", "cuda:1", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:0"])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("devices", "schedule"), [(PLACES[0], "1f1b"), (PLACES[1], "zb_h1"), (PLACES[2], "zb_h1")])
def test_streams_keep_their_order_and_take_the_times(devices: list[str], schedule: str) -> None:
    pipe, timeline, left = clocked(devices, schedule)
    assert not problems(pipe.streams.log)
    plan = pipe.pipe.plan
    assert plan is not None
    assert {Action(b.stage, b.kind, b.microbatch) for b in timeline.bars} == set(plan.schedule_for(3))
    for bar in timeline.bars:
        assert (bar.held_bytes is None) == (devices[bar.lane] == "cpu")
        assert bar.end_s > bar.start_s
    counted = [own is not None and own.before_bytes is not None for own in timeline.memory]
    assert counted == [device != "cpu" for device in devices]
    assert all(own is None or own.grown_bytes > 0 for own in timeline.memory)
    for sent in timeline.sent:
        assert (sent.end_s > sent.start_s) == (devices[sent.source] != devices[sent.target])
    torch.manual_seed(1)
    plain = RecordedPipe(Skips(), devices, "cuda:0", schedule=schedule)
    value, target = torch.randn(lane_models.ROWS, lane_models.WIDTH), torch.randn(lane_models.ROWS, lane_models.WIDTH)
    _, *expected = plain.train(value, target, nn.MSELoss())
    assert all(torch.equal(own, other) for own, other in zip(left, expected, strict=True))
