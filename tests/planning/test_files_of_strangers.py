"""Files come from strangers: whatever is in them, a reader says what is wrong, and nothing of it runs."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import cost_models
from autosplit.checks import EXPORTS
from autosplit.errors import InputError, PlanError, ScheduleError
from autosplit.partition.checker import check
from autosplit.partition.solve import solve
from autosplit.partition.workload import MOST_BYTES, parse_workload
from autosplit.planning.plan.diff import diff
from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import predicted
from autosplit.report.sections import render
from autosplit.report.trace_file import trace_text
from autosplit.schedule.files import dump_actions, parse_actions
from autosplit.schedule.validate import validate
from tests.planning.test_plan_file import a_plan
from tests.properties import examples

RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
ODD = (
    None, True, -1, 0, 2, 10**18, 10**400, 1e308, -1e308, 0.5, "", "cpu", "\x00\x1b[31m", "é→" * 50, [], {}, [[]], [0],
    "__import__('os').system('x')", "!!python/object/apply:os.system ['x']", ["cpu"] * 3, {"a": 1},
)  # fmt: skip
WATCHED: list[str] | None = None
fuzzed = settings(max_examples=examples(50), suppress_health_check=list(HealthCheck), deadline=None)


def _watch(event: str, _: Any) -> None:
    if WATCHED is not None and event.startswith(RUNS):
        WATCHED.append(event)


sys.addaudithook(_watch)


@contextlib.contextmanager
def only(*errors: type[Exception]) -> Iterator[None]:
    """Let nothing be raised but these, with a message that says something, and see that nothing is started."""
    global WATCHED
    WATCHED, raised = [], None
    try:
        yield
    except errors as error:
        raised = error
    finally:
        seen, WATCHED = WATCHED, None
    assert not seen
    assert raised is None or 10 < len(str(raised)) < 20_000


def edited(data: st.DataObject, whole: Any) -> str:
    """Return JSON text with a few places of it replaced, dropped or doubled."""
    tree = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        holder, keys = tree, _keys(tree)
        while keys:
            key = data.draw(st.sampled_from(keys))
            inner = _keys(holder[key])
            if not inner or data.draw(st.integers(0, 3)) == 0:
                break
            holder, keys = holder[key], inner
        if not keys:
            continue
        what = data.draw(st.sampled_from(["replace", "drop", "double"]))
        if what == "replace":
            holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        elif what == "drop":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[f"{key}x"] = holder[key]
    return json.dumps(tree)


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def full_plan() -> dict[str, Any]:
    """A plan with everything in it that a plan may have."""
    kinds = ("parameter", "gradient", "optimizer", "activation", "transient")
    plan = a_plan() | {
        "transfers": [{"producer": 0, "consumer": 1, "forward_s": 0.1, "backward_s": 0.1}],
        "curves": [{f"{kind}_bytes": [1] * 5 for kind in kinds} for _ in range(2)],
        "reasons": ["because"],
        "virtual_stages": 1,
        "actions": [],
    }
    zeros = dict.fromkeys(("forward_s", "backward_s", "weight_s"), 0.1)
    sizes = dict.fromkeys(("static_bytes", "kept_bytes", "transient_bytes", "sent_bytes"), 1)
    plan["units"] = [{"name": name, "stage": stage} | zeros | sizes for stage, name in enumerate(("a.0", "b.1"))]
    plan["frontier"] = [
        {"chunks": 2, "schedule": "1f1b", "virtual_stages": 1, "recompute": ["never"], "step_s": 1.0}
        | {"peak_bytes": 1, "verdict": "fits", "replayed": True}
    ]
    return plan


@fuzzed
@given(data=st.data())
def test_plans(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(edited(data, full_plan()), encoding="utf-8")
    with only(PlanError):
        plan = Plan.load(path)
        plan.save(path)
        assert Plan.load(path) == plan
        shown(plan)


def shown(plan: Plan) -> None:
    """Show a plan in every way there is."""
    predicted(plan)
    assert not diff(plan, plan)
    render(plan)
    render(plan, "markdown")
    trace_text(plan)
    for form in EXPORTS:
        with warnings.catch_warnings(), contextlib.suppress(InputError):
            warnings.simplefilter("ignore")
            plan.export(form)


WORKLOAD = {
    "format": "autosplit-workload/1",
    "name": "w",
    "mem_cap": 100.0,
    "nodes": [{"id": i, "name": f"n{i}", "fwd": 1.0, "bwd": 2.0, "mem": 3.0, "color": None} for i in range(3)],
    "edges": [[0, 1, 0, 0.5, "f"], [1, 2, 1, 0.5, "f"], [0, 2, 0, 0.5, "f"], [0, 2, -1, 0.0, "o"]],
}


@fuzzed
@given(data=st.data())
def test_workloads(data: st.DataObject) -> None:
    with only(InputError):
        problem = parse_workload(edited(data, WORKLOAD)).problem(stages=2, capacity_bytes=MOST_BYTES)
        found = solve(problem, stages=2, empty=True)
        assert check(problem, found.assignment).bottleneck_s == pytest.approx(found.costs.bottleneck_s)


def device() -> dict[str, Any]:
    return json.loads(cost_models.device("L4-24GB").model_dump_json())


@fuzzed
@given(data=st.data())
def test_devices_and_machines(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "device.json"
    machine = json.loads(cost_models.machine("2xL4-24GB").model_dump_json())
    for fields in (device(), machine, {"devices": "2xL4-24GB", "name": "m"}):
        path.write_text(edited(data, fields), encoding="utf-8")
        with only(ValueError):
            cost_models.machine(str(path))
        with only(ValueError):
            cost_models.device(path)


CELLS = st.one_of(
    st.sampled_from(
        ["0F0", "0B0", "1F0", "1B0", "0F1", "0I0", "0W0", "1SEND_F0", "", " ", "(0F1;1B0)OVERLAP_F_B", '"']
    ),
    st.sampled_from(
        ["9" * 30 + "F0", "0F" + "9" * 5000, "²F0", "-1F0", "0f0", "0F0;1F0", "\x00", "=cmd|' /C calc'!A0"]
    ),
    st.text(max_size=4),
)


@fuzzed
@given(rows=st.lists(st.lists(CELLS, max_size=5), max_size=4))
@example(rows=[["0F0", "0B0"], ["1F0", "1B0"]])
def test_action_files(rows: list[list[str]]) -> None:
    with only(ScheduleError):
        found = parse_actions("\n".join(",".join(row) for row in rows), name="own")
        again = parse_actions(dump_actions(validate(found)), name="again")
        assert (again.lanes, again.stage_lane) == (found.lanes, found.stage_lane)
