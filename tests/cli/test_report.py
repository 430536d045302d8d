"""``autosplit report``: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosplit import api
from autosplit.errors import InfeasibleError
from autosplit.planning.plan.plan import Plan
from tests.cli.conftest import NETS, command, error_of

BROKEN_LINE = next(n for n, line in enumerate(Path(NETS).read_text().splitlines(), 1) if "weights are gone" in line)
X = ("--input", "x=float32[8,16]")
TWO_BY_FOUR = ("--devices", "cpu,cpu", "--chunks", "4")

Run = Callable[..., Any]
run = command("report")


def test_the_table_is_printed() -> None:
    result = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "Partition of Mlp\n  model      1.09 k parameters in float32, as the model is\n  devices    2: 2 x cpu"
    )
    assert "chunks     4: 4 x 2 rows" in result.stdout
    assert "Prediction" in result.stdout
    assert "a factory that talks\n" in result.stderr


def test_a_step_is_measured_and_stands_beside_the_plan(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.out" for name in ("html", "trace")}
    written = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    result = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X, "--measure", "--json", *written)
    assert result.exit_code == 0, result.output
    recorded = json.loads(result.stdout)["recorded"]
    assert recorded["step_s"] > 0
    assert [device["lane"] for device in recorded["devices"]] == [0, 1]
    assert all(device["peak_bytes"] > 0 and device["busy_s"] > 0 for device in recorded["devices"])
    assert 'name="shown"' in files["html"].read_text()
    assert '"measured"' in files["trace"].read_text()


def test_json_is_the_plan_and_nothing_else() -> None:
    result = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X, "--optimizer", "momentum", "--schedule", "gpipe", "--json")
    assert result.exit_code == 0, result.output
    plan = Plan.model_validate_json(result.stdout)
    assert len(plan.stages) == 2
    assert plan.chunks == 4
    assert plan.schedule == "gpipe"
    assert plan.optimizer == "momentum"
    assert plan.microbatch_rows == (2, 2, 2, 2)
    assert sum(stage.parameters for stage in plan.stages) == 4 * (16 * 16 + 16)


def test_a_saved_plan_is_the_printed_one_and_can_be_pinned(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X, "--save", str(path), "--json")
    assert first.exit_code == 0, first.output
    assert f"wrote {path}" in first.stderr
    saved = Plan.load(path)
    assert Plan.model_validate_json(first.stdout) == saved
    again = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X, "--plan", str(path), "--json")
    assert again.exit_code == 0, again.output
    assert Plan.model_validate_json(again.stdout).stage_of() == saved.stage_of()


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour_for_cli.py").write_text("WIDTH = 16\n", encoding="utf-8")
    code = "from torch import nn\nfrom neighbour_for_cli import WIDTH\n"
    code += "def make():\n    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))\n"
    (tmp_path / "random.py").write_text(code, encoding="utf-8")
    before = sys.modules.get("random")
    result = run(f"{tmp_path / 'random.py'}:make", *TWO_BY_FOUR, "--input", "0=float32[8,16]")
    assert result.exit_code == 0, result.output
    assert sys.modules.get("random") is before


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command, and return the model and the choices that reach `autosplit`."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def ask(model: Any, **choices: Any) -> None:
        seen.append((model, choices))
        raise InfeasibleError("looked")

    def call(*arguments: str) -> tuple[Any, dict[str, Any]]:
        assert run(f"{NETS}:Mlp", "--chunks", "2", *X, *arguments).exit_code == 1
        return seen.pop()

    monkeypatch.setattr(api, "autosplit", ask)
    return call


@pytest.mark.parametrize(
    ("text", "devices"), [("3", 3), ("cpu", ["cpu"]), ("cpu, cuda:0,cpu", ["cpu", "cuda:0", "cpu"])]
)
def test_devices_are_a_number_or_a_list(look: Run, text: str, devices: Any) -> None:
    assert look("--devices", text)[1]["devices"] == devices


@pytest.mark.parametrize(("mode", "training"), [(["--train"], True), (["--eval"], False), ([], True)])
def test_the_mode_of_the_model(look: Run, mode: list[str], training: bool) -> None:
    assert look("--devices", "2", *mode)[0].training is training


def test_a_plan_that_does_not_fit_is_printed_and_exits_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    run(f"{NETS}:Mlp", *TWO_BY_FOUR, *X, "--save", str(path))
    too_large = Plan.load(path).model_copy(update={"fits": False, "verdict": "no"})
    monkeypatch.setattr(api, "autosplit", lambda model, **_: SimpleNamespace(plan=too_large))
    result = run(f"{NETS}:Mlp", *TWO_BY_FOUR, *X, "--json")
    assert result.exit_code == 1
    assert Plan.model_validate_json(result.stdout) == too_large


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (NETS, "names no factory; write package.module:factory, file.py:factory or config.json"),
        (f"{NETS}:", "names no factory"),
        ("absent.py:make", "there is no file 'absent.py'"),
        ("no_such_package.nets:make", "there is no module 'no_such_package'"),
        (
            f"{NETS}:absent",
            "has no 'absent'; it has AnyKeyword, Detector, Gated, INSTANCE, Mlp, Routed, Tokens, WithExample, ",
        ),
        (f"{NETS}:NUMBER", "gives a int, no nn.Module"),
        (f"{NETS}:make_number", "gives a int, no nn.Module"),
        (f"{NETS}:make_wide", "missing a required argument: 'width'; give its arguments as --kwargs"),
        (
            f"{NETS}:make_broken",
            f"the weights are gone (RuntimeError at {NETS}:{BROKEN_LINE}, in make_broken; --debug",
        ),
    ],
)
def test_a_model_that_cannot_be_made(target: str, message: str) -> None:
    assert message in error_of(run(target, *TWO_BY_FOUR, *X))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*TWO_BY_FOUR, "--input", "x=float32"),
            "--input 'x=float32' cannot be read: 'float32' is neither dtype[shape] nor a constant",
        ),
        (
            (*TWO_BY_FOUR, "--input", "y=float32[8,16]"),
            "cannot be called with these inputs: missing a required argument: 'x'",
        ),
        (TWO_BY_FOUR, "no inputs are known for Mlp; give --input NAME=dtype[shape]"),
        (
            ("--devices", "toaster", "--chunks", "4", *X),
            "'toaster' is no torch device; valid here",
        ),
        ((*TWO_BY_FOUR, *X, "--schedule", "wild"), "schedule='wild' is not available; valid: 'auto', 'gpipe', '1f1b'"),
        ((*TWO_BY_FOUR, *X, "--recompute", "never,block,always"), "has 3 entries for 2 stages"),
        (
            (*TWO_BY_FOUR, *X, "--save", "no_such_folder/plan.json"),
            "--save 'no_such_folder/plan.json': there is no folder",
        ),
        (("--chunks", "4"), "needs --devices and --chunks: devices such as 4 or cpu,cuda:0"),
        (("--devices", "2", "--chunks", "four"), "Invalid value for '--chunks'"),
        ((*TWO_BY_FOUR, "--color"), "No such option: --color"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of(run(f"{NETS}:Mlp", *arguments))


def test_a_schedule_by_name_or_from_a_file(tmp_path: Path) -> None:
    named = run(f"{NETS}:make_mlp", *TWO_BY_FOUR, *X, "--schedule", "zb_h1")
    assert named.exit_code == 0, named.output
    assert "schedule   zb_h1, optimizer" in named.stdout
    assert "lane 1 | .   1F0 1I0 1F1 1I1 1W0" in named.stdout
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    own = ("--devices", "2", "--chunks", "2", *X, "--schedule", str(path))
    found = run(f"{NETS}:make_mlp", *own, "--json")
    assert found.exit_code == 0, found.output
    assert Plan.model_validate_json(found.stdout).schedule_rows == (
        ("0F0", "0F1", "0B0", "0B1"),
        ("1F0", "1B0", "1F1", "1B1"),
    )
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1F1\n")
    text = error_of(run(f"{NETS}:make_mlp", *own))
    assert f"{str(path)!r}, line 2, column 3; line 2, column 4: schedule 'mine': 1F1 is in lane 1 twice" in text
    assert ">1F1<" in text
