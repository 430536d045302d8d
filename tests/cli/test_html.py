"""``--html``: the page of the plan that was printed, and a path that cannot be written is said before the work."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autosplit.cli import app as cli
from autosplit.planning.plan.plan import Plan

NETS = str(Path(__file__).parent / "nets.py")
MODEL = (f"{NETS}:make_mlp", "--input", "x=float32[8,16]")


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("command", "devices"),
    [("report", ("--devices", "cpu,cpu", "--chunks", "4")), ("plan", ("--devices", "2xL4-24GB"))],
)
def test_the_page_is_of_the_plan(tmp_path, command, devices):
    path = tmp_path / "plan.html"
    result = CliRunner().invoke(cli.app, [command, *MODEL, *devices, "--html", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.stderr
    plan = Plan.model_validate_json(result.stdout)
    [data] = re.findall(r'<script id="plan" type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    shown = json.loads(data)
    assert shown["step"] == plan.step_s
    assert [stage["forward"] for stage in shown["stages"]] == [stage.forward_s for stage in plan.stages]


def test_a_path_that_cannot_be_written_is_said_before_the_work(tmp_path):
    result = CliRunner().invoke(cli.app, ["plan", "no_such.py:Model", "--html", str(tmp_path / "absent" / "plan.html")])
    assert result.exit_code == 2
    assert "--html" in result.stderr
    assert "there is no folder" in result.stderr
