"""Plans for every schedule: stages on their devices, one prediction, one memory, and files that come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import InputError, autosplit
from autosplit.errors import InfeasibleError, PlanError, ScheduleError
from autosplit.options import Options
from autosplit.planning.plan.plan import Plan
from autosplit.planning.request import DEFAULT_CHUNKS, ask, settle
from autosplit.planning.timeline import predicted
from autosplit.profile.node_costs import combine
from autosplit.profile.types import MeasuredNode, MeasuredTimes, SplitBackward
from autosplit.schedule import catalog
from autosplit.schedule.files import dump_actions
from autosplit.trace.graph import TracedGraph
from tests.models.blocks import wide_blocks

WIDTH, ROWS, CHUNKS = 16, 8, 4
VIRTUAL = [("interleaved", 2), ("interleaved", 3), ("looped_bfs", 2), ("zb_v", 2)]


def planned(depth: int = 6, *, devices: int = 2, chunks: int = CHUNKS, **options: Any) -> Plan:
    model = wide_blocks(depth, WIDTH)
    plan = autosplit(model, ["cpu"] * devices, chunks, sample=torch.zeros(ROWS, WIDTH), **options).plan
    assert plan is not None
    return plan


def saved(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def taking(monkeypatch: pytest.MonkeyPatch, *, split_s: float) -> None:
    """Have every layer measured as 1 s forward and 2 s backward, and the backward in two equal parts as ``split_s``."""
    split = SplitBackward(split_s / 2, split_s / 2)

    def measure(traced: TracedGraph, **_: Any) -> MeasuredTimes:
        known = MeasuredNode(1.0, 2.0, (1.0, 1.0), (2.0, 2.0), 1, split)
        return MeasuredTimes({info.name: known for _, info in traced.compute_nodes()}, "cpu")

    monkeypatch.setattr(combine, "measure_nodes", measure)


@pytest.mark.parametrize(("split_s", "chosen"), [(2.0, "zb_h1"), (2.1, "zb_h1"), (3.0, "1f1b")])
def test_auto_is_what_is_predicted_faster_with_what_a_split_backward_takes(
    monkeypatch: pytest.MonkeyPatch, split_s: float, chosen: str
) -> None:
    taking(monkeypatch, split_s=split_s)
    found, one, two = (planned(schedule=schedule) for schedule in ("auto", "1f1b", "zb_h1"))
    assert found.schedule == chosen
    assert found.step_s == min(one.step_s, two.step_s)
    for plan, backward_s, weight_s in ((one, 2.0, split_s / 2), (two, split_s, split_s / 2)):
        nodes = sum(stage.forward_s for stage in plan.stages)
        assert sum(stage.backward_s for stage in plan.stages) == pytest.approx(nodes * backward_s)
        assert sum(stage.weight_s for stage in plan.stages) == pytest.approx(nodes * weight_s)


def test_auto_is_1f1b_on_one_device_and_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(devices=1).schedule == "1f1b"
    monkeypatch.setattr(combine, "measure_nodes", lambda *_, **__: MeasuredTimes({}, "cpu"))
    assert planned().schedule == "1f1b"


@pytest.mark.parametrize(("name", "virtual"), [*VIRTUAL, ("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("forward", 1)])
def test_every_schedule_is_planned_for_its_stages(name: str, virtual: int, tmp_path: Path) -> None:
    plan = planned(schedule=name, virtual_stages=virtual)
    schedule = plan.schedule_for(CHUNKS)
    assert (plan.schedule, plan.virtual_stages, plan.devices) == (name, virtual, ("cpu", "cpu"))
    assert [stage.lane for stage in plan.stages] == list(schedule.stage_lane)
    assert len(plan.stages) == 2 * virtual
    assert all(stage.nodes for stage in plan.stages)
    assert all(0 <= stage.weight_s <= stage.backward_s for stage in plan.stages)
    assert predicted(plan).step_s == pytest.approx(plan.step_s, rel=1e-9)
    assert plan.lower_bound_s <= plan.step_s * (1 + 1e-9)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    fewer = plan.schedule_for(1)
    assert fewer.microbatches == 1
    assert fewer.stage_lane == schedule.stage_lane


def test_a_limit_is_the_devices_not_the_stages() -> None:
    free = planned(schedule="interleaved", optimizer="sgd")
    peak = max(stage.memory.peak_bytes for stage in free.stages)
    kept = planned(schedule="interleaved", optimizer="sgd", memory_limit=peak + 64)
    assert max(stage.memory.peak_bytes for stage in kept.stages) <= peak + 64
    with pytest.raises(InfeasibleError):
        planned(schedule="interleaved", optimizer="sgd", memory_limit=peak // 2, recompute="never")


def test_each_virtual_stage_recomputes_as_listed() -> None:
    listed = ["never", "always", "block", "except_last"]
    plan = planned(schedule="interleaved", recompute=listed)
    assert [stage.recompute for stage in plan.stages] == listed
    with pytest.raises(InputError, match="has 4 entries for 6 stages"):
        planned(schedule="interleaved", virtual_stages=3, recompute=listed)


@pytest.mark.parametrize(
    ("parts", "devices", "name", "asked", "expected"),
    [
        (6, 2, "interleaved", 3, ("interleaved", 3, 6, None)),
        (5, 2, "interleaved", 3, ("interleaved", 2, 4, "given for 3 stages each, but the model has only 5 separable")),
        (3, 2, "interleaved", 2, ("interleaved", 2, 2, "using 2 stages on 1 device")),
        (7, 4, "zb_v", 2, ("zb_v", 2, 6, "using 6 stages on 3 devices")),
        (1, 2, "zb_v", 2, ("1f1b", 1, 1, "using 1 stage on 1 device under 1f1b")),
        (3, 4, "auto", 1, ("1f1b", 1, 3, "4 devices were given, but the model has only 3 separable parts: using 3")),
        (9, 4, "gpipe", 1, ("gpipe", 1, 4, None)),
    ],
)
def test_fewer_parts_than_stages_fall_back_to_a_legal_number(
    parts: int, devices: int, name: str, asked: int, expected: tuple[str, int, int, str | None]
) -> None:
    options = Options((torch.device("cpu"),) * devices, 4, schedule=name, virtual_stages=asked)
    found = settle(options, parts=parts, microbatches=4)
    assert (found.schedule, found.virtual_stages, found.stages) == expected[:3]
    assert found.stages <= parts
    assert (found.warning is None) == (expected[3] is None)
    assert (expected[3] or "") in (found.warning or "")


def test_a_model_of_one_part_is_one_stage_and_says_so() -> None:
    with pytest.warns(UserWarning, match="using 1 stage on 1 device under 1f1b"):
        plan = autosplit(nn.Linear(4, 4), 2, 2, sample=torch.zeros(4, 4), schedule="interleaved").plan
    assert (plan.schedule, plan.virtual_stages, len(plan.stages)) == ("1f1b", 1, 1)


def test_a_file_is_planned_with_its_own_placement(tmp_path: Path) -> None:
    """Device 1 holds the first stage and one stage more than device 0."""
    rows = "1F0,3F0,3B0,1B0,1F1,3F1,3B1,1B1\n0F0,2F0,4F0,4B0,2B0,0B0,0F1,2F1,4F1,4B1,2B1,0B1\n"
    plan = planned(schedule=saved(tmp_path / "mine.csv", rows), chunks=DEFAULT_CHUNKS)  # it gives way to the file's
    assert (plan.chunks, plan.virtual_stages, plan.devices) == (2, 3, ("cpu", "cpu"))
    assert [stage.lane for stage in plan.stages] == [1, 0, 1, 0, 1]
    assert all(stage.nodes for stage in plan.stages)


def test_a_files_plan_goes_through_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.csv", dump_actions(catalog.build("zb_v", stages=4, microbatches=CHUNKS)))
    plan = planned(schedule=path)
    assert (plan.schedule, plan.virtual_stages, plan.chunks) == ("mine", 2, CHUNKS)
    assert [stage.lane for stage in plan.stages] == [0, 1, 1, 0]
    assert plan.schedule_for(CHUNKS).lanes == planned(schedule="zb_v").schedule_for(CHUNKS).lanes
    assert len(list(plan.schedule_for(3))) == 3 * 4 * 3
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ScheduleError, match="'mine' has 4 microbatches, 5 are to run; give chunks=4"):
        plan.schedule_for(5)
    with pytest.raises(PlanError, match="the plan has schedule='mine' with virtual_stages=2, schedule='gpipe'"):
        autosplit(nn.Linear(2, 2), 2, plan=plan, schedule="gpipe")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 3}, "'mine' has 2 rows, one per device, and there are 3 devices; give 2 devices"),
        ({"chunks": 2}, "'mine' has 4 microbatches, chunks=2 was given; give chunks=4, or a file with 2"),
        ({"chunks": 8}, "'mine' has 4 microbatches, chunks=8 was given; give chunks=4, or a file with 8"),
        ({"virtual_stages": 3}, "'mine' puts 2 stages on a device, virtual_stages=3 was given"),
        ({"depth": 0}, "'mine' is for 4 stages, and the model has only 2 separable parts; give a file of at most"),
    ],
)
def test_a_file_for_other_devices_chunks_or_models_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "mine.csv", dump_actions(catalog.build("zb_v", stages=4, microbatches=CHUNKS)))
    if given.pop("depth", None) == 0:
        small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(ScheduleError, match=message):
            autosplit(small, 2, CHUNKS, sample=torch.zeros(8, 4), schedule=path)
        return
    with pytest.raises(ScheduleError, match=message):
        planned(schedule=path, **given)


@pytest.mark.parametrize(
    ("schedule", "virtual", "error", "message"),
    [
        ("gpipe", 2, ScheduleError, "gpipe puts 1 stage on a device, not 2; leave virtual_stages out, or choose inter"),
        ("zb_v", 3, ScheduleError, "zb_v puts 2 stages on a device, not 3"),
        ("1f1b", 0, InputError, "virtual_stages=0: give the stages per device"),
        ("1f1b", True, InputError, "virtual_stages=True"),
        ("absent.csv", 1, ScheduleError, "cannot read the action file 'absent.csv'"),
        ("wild", 1, InputError, "'forward', or the path of an action file"),
        ("", 1, InputError, "is not available"),
        (None, 1, InputError, "is not available"),
        (["1f1b"], 1, InputError, "is not available"),
        ("a\0b.csv", 1, InputError, "is not available"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any, virtual: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(schedule, virtual_stages=virtual, devices=2, chunks=8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schedule": "wild"}, "there is no schedule 'wild'"),
        ({"schedule": "zb_v"}, "has its stages on lanes"),
        ({"virtual_stages": 3}, "interleaved puts 3 stages on every device, and 4 is no multiple"),
        ({"actions": [["0F0"]]}, "is for 1 stages, and there are 4"),
        ({"actions": [["0F0", "sth"]]}, "'sth' is no action"),
        ({"devices": ["cpu"]}, r"its stages are on lanes \[0, 1\], and there are 1 devices"),
    ],
)
def test_an_edit_that_breaks_the_schedule_is_seen(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(schedule="interleaved").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)
