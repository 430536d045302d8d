"""Saved plans on the command line: shown without their model, exported, compared and moved by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autosplit.cli import app as cli
from autosplit.planning.plan.plan import Plan
from autosplit.report.trace_file import trace_text
from tests.cli.conftest import NETS, command
from tests.planning.test_plan_file import a_plan

ROOT = Path(cli.__file__).parents[2]
X = ("--input", "x=float32[8,16]")
PLANNED = ("plan", f"{NETS}:Mlp", "--devices", "2xL4-24GB", "--chunks", "4", "--schedule", "1f1b", *X)
WATCHED = """import sys
from autosplit.cli import app as cli
code = 0
try: cli.main()
except SystemExit as ended: code = ended.code
assert 'torch' not in sys.modules
sys.exit(code)
"""
run = command()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    result = run(*PLANNED, "--save", str(path))
    assert result.exit_code == 0, result.output
    return path


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_saved_plan_is_shown_and_exported_without_torch(saved: Path, tmp_path: Path) -> None:
    csv, parts, page = tmp_path / "schedule.csv", tmp_path / "modules.json", tmp_path / "plan.html"
    exports = ("--export", f"torch-csv:{csv}", "--export", f"torchtitan:{parts}", "--html", str(page))
    done = without_torch("report", str(saved), *exports)
    assert (done.returncode, done.stdout.startswith("Partition of Mlp\n  model      ")) == (0, True)
    assert done.stderr.splitlines() == [f"wrote {path}" for path in (page, csv, parts)]
    plan = Plan.load(saved)
    assert csv.read_bytes().decode() == plan.export("torch-csv")
    assert parts.read_bytes().decode() == plan.export("torchtitan")
    assert without_torch("report", str(saved), "--json").stdout == plan.to_json() + "\n"


BLOCKS = """from torch import nn
def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)))
"""


def test_a_warning_of_an_export_is_one_line_without_its_place_in_the_code(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS, encoding="utf-8")
    asked = ("plan", "blocks.py:make", "--devices", "4xL4-24GB", "--chunks", "4", "--input", "0=float32[8,16]")
    command = [sys.executable, "-m", "autosplit", *asked, "--export", "torchtitan:modules.json"]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [said] = [line for line in done.stderr.splitlines() if "cuts inside" in line]
    assert said.startswith("warning: the plan cuts inside 2 modules, which other tools keep whole: 0 (stages 0, 1")
    assert ".py:" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--export", "torchtitn:x"),
            "form 'torchtitn' is not available (did you mean 'torchtitan'?); valid: 'torch-csv'",
        ),
        (("--export", "megatron"), "names no file; write FORM:FILE, for example megatron:megatron.txt"),
        (("--export", "megatron:no/x"), "--export megatron 'no/x': there is no folder 'no'; make it first"),
        (("--precision", "bf61"), "precision='bf61' is not available (did you mean 'bf16'?)"),
        (("--schedule", "zbh1"), "schedule='zbh1' is not available (did you mean 'zb_h1'?)"),
        (("--schedule", "zb_v", "--virtual-stages", "3"), "zb_v puts 2 stages on a device, not 3"),
        (("--optimizer", "Adam"), "optimizer='Adam' is not available (did you mean 'adam'?)"),
        (("--optimizer", "9" * 30), "give 0 to 1048576 bytes of state per parameter element"),
        (("--recompute", "blocks"), "recompute='blocks' is not available (did you mean 'block'?)"),
        (("--recompute", "block,nver"), "recompute[1]='nver' is not available (did you mean 'never'?)"),
        (("--memory-limit", "70Gig"), "memory_limit='70Gig' is no size in bytes"),
        (("--memory-limit", "9" * 400 + "GiB"), "is no number of bytes"),
        (("--reserve", "9999999999TiB"), "is more than 1024 PiB"),
        (("--devices", "2xL5-24GB"), "the nearest: L4-24GB"),
        (("--plan", "absent.json", "--smallest"), "cannot read the plan 'absent.json'"),
    ],
)
def test_a_wrong_word_is_said_before_torch_is_imported(arguments: tuple[str, ...], message: str) -> None:
    done = without_torch(*PLANNED, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


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
