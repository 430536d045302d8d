"""``autosplit diff``, and the trace and graph that ``report`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autosplit.cli import app
from autosplit.planning.plan import Plan
from autosplit.report.dot import dot_text
from autosplit.report.trace_file import trace_text
from tests.planning.test_plan_file import a_plan

NETS = Path(__file__).with_name("nets.py")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(folder: Path, name: str, **edit: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(a_plan() | edit), encoding="utf-8")
    return path


def test_equal_plans(tmp_path: Path) -> None:
    found = run("diff", written(tmp_path, "a.json"), written(tmp_path, "b.json"))
    assert found.exit_code == 0, found.output
    assert found.stdout == "the plans are equal\n"


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


def test_report_writes_a_trace_and_a_graph(tmp_path: Path) -> None:
    trace, dot, saved = (tmp_path / name for name in ("trace.json", "plan.dot", "plan.json"))
    options = ["--devices", "2", "--chunks", "2", "--input", "x=float32[4,16]"]
    found = run("report", f"{NETS}:make_mlp", *options, "--trace", trace, "--dot", dot, "--save", saved)
    if found.exit_code:
        pytest.fail(found.output)
    plan = Plan.load(saved)
    assert trace.read_text(encoding="utf-8") == trace_text(plan)
    assert dot.read_text(encoding="utf-8") == dot_text(plan)
    assert f"wrote {trace}" in found.stderr
