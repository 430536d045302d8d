"""Random programs on recording streams: no race and no early reuse in any, and each wait and lifetime is needed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import races
from benchmarks.gpu.part import Setting
from benchmarks.gpu.race_programs import Case, Model, case_of, pipe_of, run_case
from tests.pairwise import in_turn
from tests.runtime.happens_before import HOST, Keep, Op, Wait, problems
from tests.runtime.lane_models import assert_close
from tests.runtime.recorded_pipe import RecordedPipe
from tests.runtime.recording_lane import CPU, RecordingStreams

pytestmark = pytest.mark.usefixtures("double")

WIDTH, SEED, PROGRAMS = 3, 0, 9
PLACES = [
    ["cuda:0"] * 3,
    ["cuda:0"] * 4,
    ["cuda:0", "cuda:1", "cuda:0"],
    ["cuda:1", "cuda:0", "cuda:1", "cuda:0"],
    ["cuda:0", "cuda:1", "cpu"],
    ["cpu", "cuda:0", "cuda:0"],
    ["cuda:0", "cpu", "cuda:0"],
]


def case(number: int) -> Case:
    return case_of(number, seed=SEED, places=PLACES)


@functools.cache
def recorded(number: int) -> tuple[RecordedPipe, Model, Model]:
    """Return a program on recording lanes, its model, and the plain model beside it."""
    own = case(number)
    torch.manual_seed(number)
    model = Model(own, width=WIDTH).train(own.how != "eval")
    plain = copy.deepcopy(model)
    *devices, caller = own.places
    pipe = pipe_of(model, own, [CPU] * len(devices), width=WIDTH, lanes="inline")
    return RecordedPipe(model, devices, caller, pipe=pipe), model, plain


def run(number: int, *, steps: int = 2) -> list[torch.Tensor]:
    run, model, _ = recorded(number)
    streams = run.streams

    def beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return streams.put(tensor.clone(), streams.device(other))

    with run.recording():
        return run_case(run.pipe, model, case(number), width=WIDTH, put=run.put, beside=beside, steps=steps)


@in_turn(share=(1, 2), number=range(PROGRAMS))
def test_a_program(number: int) -> None:
    on_lanes, _, plain = recorded(number)
    found, own = run(number), case(number)
    expected = run_case(plain, plain, own, width=WIDTH, put=lambda tensor: tensor)
    if not own.draws or own.how == "eval":
        assert_close(found, expected)
    assert problems(on_lanes.streams.log) == [], str(own)
    assert on_lanes.engine.mismatches == []
    assert own.how in ("train", "own loss") or not on_lanes.streams.host_reads  # these are proved by the first batch


def waits(stream: str, recorded_on: str) -> Callable[[RecordingStreams], Callable[[Any], bool]]:
    def forget(streams: RecordingStreams) -> Callable[[Any], bool]:
        on = streams.recorded_on
        return lambda e: isinstance(e, Wait) and e.stream.startswith(stream) and on[e.event].startswith(recorded_on)

    return forget


def keeps(stream: str) -> Callable[[RecordingStreams], Callable[[Any], bool]]:
    return lambda streams: lambda e: isinstance(e, Keep) and e.stream.startswith(stream)


LEFT_OUT = {
    "compute waits for compute": waits("compute", "compute"),
    "compute waits for the caller": waits("compute", "caller"),
    "compute waits for a copy in": waits("compute", "inbound"),
    "a copy out waits for the target": waits("outbound", "inbound"),
    "a copy in waits for compute": waits("inbound", "compute"),
    "the caller waits for compute": waits("caller", "compute"),
    "the host waits for a copy": waits(HOST, "outbound"),
    "compute keeps": keeps("compute"),
    "a copy out keeps": keeps("outbound"),
}


def put_back(streams: RecordingStreams, length: int) -> None:
    """Shorten a log; memory that came since and is there still counts as the host's."""
    streams.collect()
    del streams.log[length:]
    known = {memory for entry in streams.log if isinstance(entry, Op) for memory in entry.allocates}
    new = [held.number for held in streams._memories.values() if held.number not in known]
    streams.log += [Op(HOST, "constant", (), (number,), (number,)) for number in new]


@in_turn(share=(0, 3), what=list(LEFT_OUT))
def test_what_lanes_leave_out_is_found(what: str) -> None:
    for number in range(PROGRAMS):
        streams = recorded(number)[0].streams
        streams.collect()
        before = len(streams.log)
        streams.forget, streams.forgotten = LEFT_OUT[what](streams), 0
        run(number, steps=1)
        found = problems(streams.log)
        streams.forget = lambda entry: False
        put_back(streams, before)
        if found:
            assert streams.forgotten
            return
    raise AssertionError(f"{what}: left out, and nothing was found in {PROGRAMS} programs")


def test_lanes_on_late_streams_say_the_same() -> None:
    """What the hunt on a device puts between lanes and streams passes on everything, and disturbs every stream."""
    plain, late = RecordingStreams(), RecordingStreams()
    touched: set[str] = set()
    device = torch.device("cuda:0")

    def use(inner: RecordingStreams, streams: Any) -> None:
        source, target = (races.StreamLane(torch.device("cuda", index), streams) for index in (0, 1))
        value = inner.put(torch.zeros(2), device)
        target.wait(source.record())
        target.fetch((value,), source)

    use(plain, plain)
    use(late, races.Late(late, lambda stream: touched.add(stream.name)))
    late.collect()
    plain.collect()
    assert [type(entry) for entry in late.log] == [type(entry) for entry in plain.log]
    assert len(touched) == 4  # two compute streams, the copy out and the copy in


def test_the_hunt_on_threads() -> None:
    torch.set_default_dtype(torch.float32)
    found = races.run(Setting(CPU, small=True), programs=1)
    assert [(check.name, check.ok) for check in found.checks] == [
        ("programs that differ from one stream's, late", True)
    ]


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    once = races.once

    def wrong(case: Case, streams: Any, *, how: str = "inline", **given: Any) -> list[torch.Tensor]:
        found = once(case, streams, how=how, **given)
        return [*found[:-1], found[-1] + (how == "threads")]

    monkeypatch.setattr(races, "once", wrong)
    found = races.run(Setting(CPU, small=True), only=1)
    assert [check.ok for check in found.checks] == [False]
    assert found.figures[0]["which"][0].startswith("1: ")


@pytest.mark.cuda
def test_two_hundred_programs_on_a_device() -> None:
    torch.set_default_dtype(torch.float32)
    found = races.run(Setting(torch.device("cuda:0")))
    assert [check for check in found.checks if not check.ok] == []
