"""Plans as files: what is written comes back equal, and what is no plan says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autosplit.errors import PlanError
from autosplit.planning.plan.fields import MemoryItem
from autosplit.planning.plan.plan import VERSION, Plan
from autosplit.planning.plan.record import Boundary, Fingerprint, StagePlan
from autosplit.planning.plan.stage_memory import StageMemory

names = st.text(alphabet="abäz.#/_019→", min_size=1, max_size=12)
seconds = st.floats(min_value=0, max_value=1e6, allow_nan=False)
sizes = st.integers(min_value=0, max_value=2**50)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans that hang together: numbered stages, every node in one of them, boundaries between them."""
    count = draw(st.integers(1, 4))
    nodes = draw(st.lists(names, unique=True, min_size=count, max_size=8))
    cuts = [0, *sorted(draw(st.permutations(range(1, len(nodes))))[: count - 1]), len(nodes)]
    verdict, fits = draw(st.sampled_from([("fits", True), ("borderline", None), ("no", False)]))
    rows = draw(st.lists(st.integers(1, 64), min_size=1, max_size=8))
    return Plan(
        fingerprint=draw(st.builds(Fingerprint, model=names, state=names, nodes=names, torch=names)),
        devices=("cpu",) * count,
        stages=tuple(draw(_stages(index, nodes=tuple(nodes[cuts[index] : cuts[index + 1]]))) for index in range(count)),
        boundaries=tuple(draw(st.lists(_boundaries(count), max_size=4))),
        chunks=draw(st.integers(len(rows), 16)),
        microbatch_rows=tuple(rows),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb_h1", "forward"])),
        optimizer=draw(st.sampled_from(["adamw", "none", "12"])),
        step_s=draw(seconds),
        bubble=draw(st.floats(0, 1)),
        bottleneck_s=draw(seconds),
        lower_bound_s=draw(seconds),
        status=draw(st.sampled_from(["optimal", "bounded"])),
        fits=fits,
        verdict=verdict,
        class_flops=draw(st.dictionaries(st.sampled_from(["shared", "micro", "full"]), st.floats(0, 1))),
        measured=draw(st.booleans()),
        notes=tuple(draw(st.lists(names, max_size=2))),
    )


def _stages(index: int, *, nodes: tuple[str, ...]) -> st.SearchStrategy[StagePlan]:
    byte_fields = [name for name in StageMemory.model_fields if name not in ("capacity_bytes", "items")]
    items = st.builds(MemoryItem, name=names, low_bytes=sizes, high_bytes=sizes, source=names)
    capacities, listed = st.one_of(st.none(), sizes), st.lists(items, max_size=2).map(tuple)
    memory = st.builds(StageMemory, **dict.fromkeys(byte_fields, sizes), capacity_bytes=capacities, items=listed)
    memory = memory.map(lambda m: m.model_copy(update={"high_bytes": m.low_bytes + m.high_bytes}))
    return st.builds(
        StagePlan,
        index=st.just(index),
        device=st.sampled_from(["cpu", "cuda:0"]),
        nodes=st.just(nodes),
        modules=st.lists(names, max_size=2).map(tuple),
        parameters=sizes,
        forward_s=seconds,
        backward_s=seconds,
        memory=memory,
    )


def _boundaries(count: int) -> st.SearchStrategy[Boundary]:
    return st.builds(
        Boundary,
        value=names,
        producer=st.integers(-1, count - 1),
        consumers=st.lists(st.integers(0, count - 1), max_size=3).map(tuple),
        bytes=sizes,
        per_step=st.booleans(),
    )


@given(plan=plans())
def test_what_is_saved_is_what_is_loaded(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert path.read_text(encoding="utf-8") == plan.to_json() + "\n"
    assert list(json.loads(plan.to_json())) == [*Plan.model_fields, *Plan.model_computed_fields]
    assert plan.stage_of() == {name: stage.index for stage in plan.stages for name in stage.nodes}


def a_plan() -> dict[str, Any]:
    """The JSON of a small plan, to be edited."""
    memory = dict.fromkeys(StageMemory.model_fields, 1) | {"items": ()}
    stage = {"device": "cpu", "modules": [], "parameters": 1, "forward_s": 0.1, "backward_s": 0.2, "memory": memory}
    return {
        "version": VERSION,
        "fingerprint": {"model": "Net", "state": "s", "nodes": "n", "torch": "2.13.0"},
        "devices": ["cpu", "cpu"],
        "stages": [stage | {"index": 0, "nodes": ["a#0", "b#0"]}, stage | {"index": 1, "nodes": ["c#0"]}],
        "boundaries": [{"value": "b#0", "producer": 0, "consumers": [1], "bytes": 8}],
        "chunks": 2,
        "microbatch_rows": [2, 1],
        "schedule": "1f1b",
        "optimizer": "adamw",
        "step_s": 1.0,
        "bubble": 0.1,
        "bottleneck_s": 0.3,
        "lower_bound_s": 0.3,
        "status": "optimal",
        "fits": True,
        "verdict": "fits",
        "class_flops": {"micro": 1.0},
        "measured": True,
    }


def load(tmp_path: Path, content: dict[str, Any] | str | bytes) -> Plan:
    path = tmp_path / "plan.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Plan.load(path)


def test_the_plan_that_the_following_tests_edit_is_good(tmp_path: Path) -> None:
    assert load(tmp_path, a_plan()).stage_of() == {"a#0": 0, "b#0": 0, "c#0": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stages: 4", r"is no plan: the file: Invalid JSON.*plan\.save"),
        ("", r"is no plan: the file: Invalid JSON"),
        ("[1, 2]", r"is no plan: the file: "),
        ("{}", r"is no plan: version: this field is missing"),
        (b"\xff\xfe\x00", r"is no plan: it is no UTF-8 text; .*plan\.save"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load(tmp_path, content)


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_another_version_is_called_that_whatever_else_is_in_it(tmp_path: Path, version: int) -> None:
    with pytest.raises(PlanError, match=rf"version {version}, this autosplit reads {VERSION}; plan again"):
        load(tmp_path, {"version": version, "pipelines": []})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"chunks": "many"}, r"is no plan: chunks: .*integer.*problems in all: 1"),
        ({"colour": "red"}, r"is no plan: colour: there is no such field"),
        ({"status": "good"}, r"is no plan: status: .*'optimal' or 'bounded'"),
        ({"stages": [{"index": 0}]}, r"is no plan: stages\.0\.device: this field is missing"),
        ({"stages": []}, r"contradicts itself: its stages are numbered \[\]"),
        ({"chunks": 1}, r"contradicts itself: it has 2 microbatches for chunks=1; undo the edit, or plan again"),
        ({"microbatch_rows": []}, r"contradicts itself: it has 0 microbatches"),
        ({"chunks": "2"}, r"is no plan: chunks: .*integer"),
        ({"chunks": True}, r"is no plan: chunks: .*integer"),
        ({"step_s": 1e300}, r"is no plan: step_s: .*less than or equal to 1000000000000"),
        ({"bubble": 7}, r"is no plan: bubble: .*less than or equal to 1"),
        (
            {"optimizer": "lamb"},
            r"is no plan: optimizer: String should match .*sgd\|momentum\|adam",
        ),
        ({"precision": "bf8"}, r"is no plan: precision: String should match .*fp32\|amp_bf16"),
        ({"verdict": "no"}, r"contradicts itself: verdict is 'no' and fits is True"),
        (
            {"boundaries": [{"value": "b#0", "producer": 0, "consumers": [7], "bytes": 8}]},
            r"contradicts itself: boundary 'b#0' names stage 7, there are 2 stages",
        ),
    ],
)
def test_an_edit_that_breaks_the_plan(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load(tmp_path, a_plan() | edit)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"nodes": []}, r"stages\.1\.nodes is empty; leave every stage at least one node"),
        ({"parameters": -1}, r"stages\.1\.parameters: .*greater than or equal to 0"),
        ({"memory": {"peak_bytes": -5}}, r"stages\.1\.memory\.peak_bytes: .*greater than or equal to 0"),
        ({"memory": {"low_bytes": 9, "high_bytes": 8}}, r"memory\.low_bytes is 9, more than its high_bytes, 8"),
        ({"memory": {"peak_bytes": 10**30}}, r"stages\.1\.memory\.peak_bytes: .*less than or equal to"),
    ],
)
def test_a_stage_that_cannot_be(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    plan = a_plan()
    plan["stages"][1] |= edit | {"memory": plan["stages"][1]["memory"] | edit.get("memory", {})}
    with pytest.raises(PlanError, match=message):
        load(tmp_path, plan)


def test_a_plan_cannot_be_changed_in_place(tmp_path: Path) -> None:
    plan = load(tmp_path, a_plan())
    with pytest.raises(ValidationError, match="frozen"):
        plan.chunks = 3  # type: ignore[misc]
