"""The lane of a CUDA device on recording streams: programs that autosplit emits, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime import ops
from autosplit.runtime.lanes import CallerLane, CpuLane
from tests.runtime.happens_before import Keep, Op, Wait, is_before, problems
from tests.runtime.lane_models import MODELS, PLACES, ROWS, WIDTH, Chain, Skips, assert_close, loss, plain
from tests.runtime.lane_programs import Program
from tests.runtime.recording_engine import Engine
from tests.runtime.recording_lane import CPU, RecordingStreams, recording_lanes


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Recorded:
    """A program on recording lanes, and what one step of it logs."""

    def __init__(self, model: nn.Module, devices: list[str], caller: str, *, chunks: int = 3) -> None:
        self.model = model
        self.streams = RecordingStreams()
        self.engine = Engine(self.streams)
        self.lanes = recording_lanes(self.streams, devices)
        self.caller = CpuLane() if caller == "cpu" else CallerLane(torch.device(caller), self.streams)
        self.program = Program(
            model, (torch.zeros(ROWS, WIDTH),), self.lanes, chunks=chunks, devices=[CPU] * len(devices)
        )
        for name, parameter in model.named_parameters():
            self.streams.put(parameter, self.lanes[self._home(name, parameter)].device)

    def _home(self, name: str, parameter: nn.Parameter) -> int:
        lowered = self.program.lowered
        users = [s for s, stage in enumerate(lowered.stages) if any(p is parameter for p in stage.parameters())]
        users += [s for s, p in enumerate(lowered.prologues) if p and any(q is parameter for q in p.parameters())]
        return lowered.layout.home[name] if name in lowered.layout.home else users[0]

    def outputs(self, value: Tensor) -> list[Tensor]:
        """Run the program on a batch that nothing else holds."""
        return self.program(self.streams.put(value, self.caller.device), caller=self.caller)

    def step(self, value: Tensor) -> list[Tensor]:
        """Run forward and backward and read every gradient; return copies of outputs and gradients."""
        with self.engine.recording():
            outputs = self.outputs(value)
            loss(outputs).backward()
            copies = [output.detach() * 1 for output in outputs]
            del outputs
            copies += [p.grad * 1 for p in self.model.parameters() if p.grad is not None]
            self.model.zero_grad(set_to_none=True)
        self.streams.collect()
        return copies

    def ops(self, name: str) -> list[Op]:
        """Return the logged operations of a name."""
        return [entry for entry in self.streams.log if isinstance(entry, Op) and entry.name == name]


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("model", MODELS)
def test_every_use_is_ordered_and_every_memory_held(model: Callable[[], nn.Module], place: str) -> None:
    run = Recorded(model(), *PLACES[place])
    value = torch.randn(ROWS, WIDTH)
    expected = plain(run.model, value)
    for _ in range(2):
        assert_close(run.step(value.clone()), expected)
    assert problems(run.streams.log) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", list(PLACES))
def test_without_gradients(place: str, mode: Callable[[], Any]) -> None:
    run = Recorded(Skips(), *PLACES[place])
    value = torch.randn(ROWS, WIDTH)
    with run.engine.recording(), mode():
        for _ in range(2):
            (output,) = run.outputs(value.clone())
            total = output * 1
            del output
    assert not total.requires_grad
    assert_close([total], [run.model(value)])
    assert problems(run.streams.log) == []


def test_input_gradients_come_back_to_the_caller() -> None:
    run = Recorded(Skips(), *PLACES["two cards"])
    value = torch.randn(ROWS, WIDTH, requires_grad=True)
    other = value.detach().clone().requires_grad_()
    loss([run.model(other)]).backward()
    run.model.zero_grad(set_to_none=True)
    with run.engine.recording():
        loss(run.outputs(value)).backward()
        gradient = value.grad * 1
    assert_close([gradient], [other.grad])
    assert problems(run.streams.log) == []


def test_lanes_of_one_card_wait_and_do_not_copy() -> None:
    run = Recorded(Skips(), *PLACES["one card"])
    run.step(torch.randn(ROWS, WIDTH))
    assert run.ops("copy") == run.ops("stage") == []
    waits = [(e.stream, run.streams.recorded_on[e.event]) for e in run.streams.log if isinstance(e, Wait)]
    assert {("compute1", "compute0"), ("compute2", "compute1"), ("compute2", "compute0")} <= set(waits)


def test_copies_overlap_with_the_compute_on_both_sides() -> None:
    run = Recorded(Chain(), ["cuda:0", "cuda:1", "cuda:2"], "cuda:0", chunks=4)
    run.step(torch.randn(ROWS, WIDTH))
    log, layers = run.streams.log, run.ops("aten::addmm")
    first, middle = ([op for op in layers if op.stream == stream] for stream in ("compute0", "compute1"))
    copies = [op for op in run.ops("copy") if op.stream == "outbound0"]
    assert len(first) == 8
    assert len(middle) == 4
    assert len(copies) >= 4
    for microbatch in range(3):
        own, following = first[2 * microbatch], first[2 * microbatch + 2]
        assert is_before(log, own, copies[microbatch])
        assert log.index(following) < log.index(copies[microbatch])
        assert not is_before(log, following, copies[microbatch])
    assert log.index(middle[1]) < log.index(copies[2])
    assert not is_before(log, middle[0], copies[2])


WAITS = [
    ("one card", "compute", "compute"),
    ("one card", "compute", "caller"),
    ("one card", "caller", "compute"),
    ("two cards", "inbound", "compute"),
    ("two cards", "outbound", "inbound"),
    ("two cards", "compute", "inbound"),
    ("two cards", "compute", "caller"),
    ("two cards", "caller", "compute"),
    ("CPU and cards", "host", "compute"),
    ("CPU and cards", "host", "outbound"),
    ("from the CPU", "compute", "inbound"),
]


@pytest.mark.parametrize(("place", "stream", "recorded_on"), WAITS)
def test_a_wait_that_a_lane_leaves_out_is_found(place: str, stream: str, recorded_on: str) -> None:
    run = Recorded(Skips(), *PLACES[place])
    events = run.streams.recorded_on

    def forget(entry: Wait | Keep) -> bool:
        waits = isinstance(entry, Wait) and entry.stream.startswith(stream)
        return waits and events[entry.event].startswith(recorded_on)

    run.streams.forget = forget
    run.step(torch.randn(ROWS, WIDTH))
    assert run.streams.forgotten
    assert any("unordered" in problem for problem in problems(run.streams.log))


@pytest.mark.parametrize(
    ("place", "stream"),
    [("one card", "compute"), ("two cards", "compute"), ("two cards", "outbound")],
)
def test_a_lifetime_that_a_lane_leaves_out_is_found(place: str, stream: str) -> None:
    run = Recorded(Skips(), *PLACES[place])
    run.streams.forget = lambda entry: isinstance(entry, Keep) and entry.stream.startswith(stream)
    run.step(torch.randn(ROWS, WIDTH))
    assert run.streams.forgotten
    found = problems(run.streams.log)
    assert found
    assert all("too early" in problem for problem in found)


@pytest.mark.parametrize("forgotten", [False, True])
def test_outputs_are_held_until_the_caller_has_read_them(forgotten: bool) -> None:
    run = Recorded(Chain(), *PLACES["two cards"])
    run.streams.forget = lambda entry: forgotten and entry.stream.startswith("caller") and isinstance(entry, Keep)
    last = run.lanes[-1]
    with run.engine.recording(), torch.no_grad():
        own = run.streams.put(torch.ones(1), last.device)
        last.wait(last.here().record())
        (output,) = run.outputs(torch.randn(ROWS, WIDTH))
        read = output * 1
        del output
        with last.active():
            own + 1
    assert read.shape == (ROWS, WIDTH)
    assert any("caller cuda:1 still uses" in problem for problem in problems(run.streams.log)) == forgotten


def test_a_program_without_its_waits_is_found() -> None:
    run = Recorded(Skips(), *PLACES["two cards"])
    graph = run.program.module.graph
    for node in [node for node in graph.nodes if node.target is ops.wait]:
        graph.erase_node(node)
    run.program.module.recompile()
    run.step(torch.randn(ROWS, WIDTH))
    assert any("unordered" in problem for problem in problems(run.streams.log))


def test_gradients_that_arrive_beside_the_stream_that_goes_on_with_them_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops._Departure, "apply", lambda *tensors: tensors)
    run = Recorded(Skips(), *PLACES["two cards"])
    run.step(torch.randn(ROWS, WIDTH))
    assert any(problem.startswith("caller") for problem in problems(run.streams.log))
