"""``autosplit diff``, plans that are moved by hand, and the trace and graph that ``report`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autosplit.planning.plan.plan import Plan
from autosplit.report.trace_file import trace_text
from tests.cli.conftest import NETS, command
from tests.planning.test_plan_file import a_plan

run = command()


def written(folder: Path, name: str, **edit: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(a_plan() | edit), encoding="utf-8")
    return path


def test_plans_that_differ(tmp_path: Path) -> None:
    pair = written(tmp_path, "a.json"), written(tmp_path, "b.json", step_s=2.0, optimizer="sgd")
    found = run("diff", *pair)
    assert found.exit_code == 1
    assert "optimizer" in found.stdout
    assert "+100.0%" in found.stdout
    told = json.loads(run("diff", *pair, "--json").stdout)
    assert told["changed"][-1] == {"name": "step_s", "before": 1.0, "after": 2.0}


def test_what_is_no_plan(tmp_path: Path) -> None:
    found = run("diff", written(tmp_path, "a.json"), tmp_path / "absent.json")
    assert found.exit_code == 2
    assert "error: cannot read the plan" in found.stderr
    assert not found.stdout


def test_report_writes_a_trace(tmp_path: Path) -> None:
    trace, saved = (tmp_path / name for name in ("trace.json", "plan.json"))
    options = ["--devices", "2", "--chunks", "2", "--input", "x=float32[4,16]"]
    found = run("report", f"{NETS}:make_mlp", *options, "--trace", trace, "--save", saved)
    if found.exit_code:
        pytest.fail(found.output)
    plan = Plan.load(saved)
    assert trace.read_text(encoding="utf-8") == trace_text(plan)
    assert f"wrote {trace}" in found.stderr


def test_a_module_is_moved_and_costed(tmp_path: Path) -> None:
    saved, moved = tmp_path / "plan.json", tmp_path / "moved.json"
    model = [f"{NETS}:make_mlp", "--input", "x=float32[4,16]"]
    devices = ["--devices", "2xL4-24GB", "--chunks", "2"]
    assert run("plan", *model, *devices, "--save", saved).exit_code == 0
    plan = Plan.load(saved)
    node, stage = max((own.nodes[-1 + own.index], 1 - own.index) for own in plan.stages if len(own.nodes) > 1)
    again = ["--plan", saved, "--move", f"{node}={stage}"]
    found = run("plan", *model, *again, "--json", "--save", moved)
    assert found.exit_code == 0, found.output
    assert Plan.load(moved).to_json() + "\n" == found.stdout
    assert Plan.load(moved).machine == plan.machine
    told = run("diff", saved, moved)
    assert told.exit_code == 1
    assert node.partition("#")[0] in told.stdout
    report = run("report", *model, "--devices", "2", "--chunks", "2", *again, "--json")
    assert json.loads(report.stdout)["stages"][0]["nodes"] == list(Plan.load(moved).stages[0].nodes)
