"""The trace file: legal events, the plan's own numbers, and what was measured beside them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import PlanError
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import LaneCurve, Transfer
from autosplit.planning.timeline import StepTimeline, predicted
from autosplit.report.trace_file import trace_text
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import SCHEDULES

WIDTH, ROWS, CHUNKS = 4, 8, 4


def pipe_of(schedule: str, *, virtual_stages: int = 1) -> PipelinedModule:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    cpu = torch.device("cpu")
    options = Options((cpu,) * 2, CHUNKS, schedule=schedule, virtual_stages=virtual_stages, measure=False)
    return PipelinedModule(model, options)


@pytest.fixture(scope="module")
def profiled() -> tuple[Plan, StepTimeline]:
    """A plan whose transfers take time, and a step that was measured."""
    pipe = pipe_of("1f1b")
    timeline = pipe.profile_step(torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH), loss_fn=nn.MSELoss())
    assert pipe.plan is not None
    transfer = Transfer(producer=0, consumer=1, forward_s=1e-4, backward_s=2e-4)
    return pipe.plan.model_copy(update={"transfers": (transfer,)}), timeline


def events(text: str, **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in json.loads(text)["traceEvents"] if all(e.get(key) == value for key, value in wanted.items())]


def check_format(text: str) -> None:
    """Check what the format asks of each kind of event, and that slices of one track do not overlap."""
    document = json.loads(text)
    asked = {
        "M": {"pid", "tid", "name", "args"},
        "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
        "C": {"pid", "name", "ts", "args"},
        **{phase: {"pid", "tid", "name", "cat", "id", "ts"} for phase in "sfbe"},
    }
    for event in document["traceEvents"]:
        assert asked[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events(text, ph="X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for own in tracks.values():
        own.sort(key=lambda event: event["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.0011 for a, b in pairwise(own))
    for first, last in (("b", "e"), ("s", "f")):
        ends = {(e["cat"], e["id"], e["name"]): e for e in events(text, ph=last)}
        starts = {(e["cat"], e["id"], e["name"]): e for e in events(text, ph=first)}
        assert starts.keys() == ends.keys()
        assert len(starts) == len(events(text, ph=first))
        assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)
    for event in (*events(text, ph="s"), *events(text, ph="f")):  # an arrow hangs on a slice that is there
        own = tracks[event["pid"], event["tid"]]
        assert any(e["ts"] <= event["ts"] <= e["ts"] + e["dur"] + 1e-6 for e in own)


def test_predicted_and_measured_lie_on_tracks_of_one_lane(profiled: tuple[Plan, StepTimeline]) -> None:
    plan, measured = profiled
    text = trace_text(plan, measured)
    check_format(text)
    for track, timeline in ((1, predicted(plan)), (2, measured)):
        for bar in timeline.bars:
            name = str(Action(bar.stage, bar.kind, bar.microbatch))
            [event] = events(text, ph="X", pid=bar.lane + 1, tid=track, name=name)
            assert event["ts"] == pytest.approx(bar.start_s * 1e6, abs=1e-3)
            assert event["dur"] == pytest.approx((bar.end_s - bar.start_s) * 1e6, abs=1e-3)
    names = [e["args"]["name"] for e in events(text, ph="M", name="process_name")]
    assert names == ["lane 0: cpu, stage 0", "lane 1: cpu, stage 1"]
    assert json.loads(text)["otherData"]["loss"] == measured.loss
    assert len(events(text, ph="b", cat="transfers, predicted")) == 2 * CHUNKS
    assert len(events(text, ph="s", cat="transfers, measured")) == 2 * CHUNKS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_a_trace(schedule: str, profiled: tuple[Plan, StepTimeline]) -> None:
    virtual = 2 if schedule in ("interleaved", "looped_bfs", "zb_v") else 1
    first, second = profiled[0].stages
    stages = (first, second, first, second)[: 2 * virtual]
    lanes = (0, 1, 1, 0) if schedule == "zb_v" else (0, 1, 0, 1)
    placed = tuple(s.model_copy(update={"index": i, "lane": lanes[i]}) for i, s in enumerate(stages))
    plan = profiled[0].model_copy(update={"schedule": schedule, "virtual_stages": virtual, "stages": placed})
    text = trace_text(plan)
    check_format(text)
    assert len(events(text, ph="X")) == len(predicted(plan).bars)


def test_bytes_are_counters_by_kind(profiled: tuple[Plan, StepTimeline]) -> None:
    plan = profiled[0]
    actions = [len(lane) for lane in plan.schedule_for(CHUNKS).lanes]
    curves = tuple(LaneCurve(**{f: tuple(range(n + 1)) for f in LaneCurve.model_fields}) for n in actions)
    measured = StepTimeline(
        tuple(bar.__class__(**(vars(bar) | {"held_bytes": 7})) for bar in predicted(plan).bars), (), 1.0, measured=True
    )
    text = trace_text(plan.model_copy(update={"curves": curves}), measured)
    check_format(text)
    for lane, count in enumerate(actions):
        found = events(text, ph="C", pid=lane + 1, name="bytes, predicted")
        assert [event["args"]["activation"] for event in found] == list(range(count + 1))
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(found))
        assert len(events(text, ph="C", pid=lane + 1, name="bytes, measured", args={"all": 7})) == count


def test_a_pipe_writes_its_trace(tmp_path: Path) -> None:
    pipe = pipe_of("gpipe")
    with pytest.raises(PlanError, match="no plan yet: call the pipe first, or give autosplit a sample="):
        pipe.save_trace(tmp_path / "trace.json")
    pipe(torch.randn(ROWS, WIDTH))
    pipe.save_trace(tmp_path / "trace.json")
    assert pipe.plan is not None
    assert (tmp_path / "trace.json").read_text(encoding="utf-8") == trace_text(pipe.plan)
