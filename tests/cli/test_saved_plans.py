"""Saved plans on the command line: shown without their model, and exported; what is refused before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autosplit.cli import app as cli
from autosplit.planning.plan.plan import Plan
from tests.cli.conftest import NETS, command

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
