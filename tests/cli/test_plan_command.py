"""``autosplit plan``: a plan for devices that do not have to be there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autosplit.cli import app as cli
from autosplit.planning.plan.plan import Plan
from tests.cli.conftest import NETS, command, error_of

X = ("--input", "x=float32[8,16]")
TWO = ("--devices", "2xL4-24GB", "--chunks", "4")
run = command("plan")


SIZE = "  model      1.09 k parameters in float32, as the model is\n"


def test_the_table_is_that_of_the_devices_on_paper() -> None:
    result = run(f"{NETS}:make_mlp", *TWO, *X)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Partition of Mlp\n{SIZE}  devices    2: 2 x L4-24GB\n  chunks     4: 4 x 2 rows")


def test_a_short_name_is_noted_and_what_to_run_next_stands_at_the_end() -> None:
    said = run(f"{NETS}:make_mlp", "--devices", "2xl4", "--chunks", "4", *X).stdout
    assert "  - 2xl4: taken as L4-24GB\n" in said
    last = said.partition("\nWhat to run next\n")[2]
    assert "--script train.py: writes the program that trains by this plan" in last
    bad = run(f"{NETS}:make_mlp", "--devices", "2xl4", "--chunks", "4", "--memory-limit", "9KiB", *X).stdout
    last = bad.partition("\nWhat to run next\n")[2]
    assert "the first of the changes above that is an option" in last
    assert "--script" not in last


def test_what_is_asked_for_is_in_the_plan(tmp_path: Path) -> None:
    asked = ("--precision", "bf16", "--optimizer", "12", "--reserve", "1GiB", "--recompute", "block", "--json")
    devices = ("--devices", "A100-SXM4-80GB,L4-24GB", "--chunks", "4")
    result = run(f"{NETS}:make_mlp", *devices, *X, *asked, "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    plan = Plan.model_validate_json(result.stdout)
    assert plan == Plan.load(tmp_path / "plan.json")
    assert plan.devices == ("A100-SXM4-80GB", "L4-24GB")
    assert (plan.precision, plan.optimizer, plan.chunks) == ("bf16", "12", 4)
    assert {stage.recompute for stage in plan.stages} == {"block"}


def test_a_network_between_hosts() -> None:
    """What each host has is in the machine's name, and the report says what the step hangs on."""
    asked = ("--devices", "2x2xL4-24GB", "--chunks", "1", "--mesh", "dp=4", "--zero", "0", *X)
    shown = run(f"{NETS}:make_mlp", *asked, "--network", "10Gbit").stdout
    assert re.search(
        r"range +[\d.]+ \S+ to [\d.]+ \S+; with kernels 15% slower \d+% longer, with half the network", shown
    )
    plan = Plan.model_validate_json(run(f"{NETS}:make_mlp", *asked, "--network", "10Gbit", "--json").stdout)
    assert plan.machine == "2x2xL4-24GB@10Gbit"
    assert "'fast' is no speed" in error_of(run(f"{NETS}:make_mlp", *asked, "--network", "fast"))
    alone = error_of(run(f"{NETS}:make_mlp", *TWO, *X, "--network", "10Gbit"))
    assert "is one host, without a network to another" in alone


def test_stages_with_replicas() -> None:
    asked = ("--devices", "3xL4-24GB", "--chunks", "4", *X)
    plan = Plan.model_validate_json(run(f"{NETS}:make_mlp", *asked, "--replicas", "2,1", "--json").stdout)
    assert [(stage.lane, stage.replicas) for stage in plan.stages] == [(0, 2), (2, 1)]
    refused = run(f"{NETS}:no_such_factory", *asked, "--replicas", "2,2")
    assert refused.exit_code == 2
    assert "replicas=[2, 2] are 4 devices in 2 stages, and devices names 3" in error_of(refused)


@pytest.mark.slow
def test_what_does_not_fit_is_planned_and_the_answer_is_no() -> None:
    result = run(f"{NETS}:make_mlp", *TWO, *X, "--memory-limit", "2KiB", "--json")
    assert result.exit_code == 1, result.output
    assert Plan.model_validate_json(result.stdout).verdict == "no"


def test_a_mesh() -> None:
    """Degrees are in the report, the JSON and the rows of a rank; the text says what the mesh is."""
    asked = (
        "--devices",
        "8xH100-SXM5-80GB",
        "--mesh",
        "dp=4,pp=2",
        "--runtime",
        "megatron",
        "--zero",
        "1",
        "--chunks",
        "2",
        *X,
    )
    plan = Plan.model_validate_json(run(f"{NETS}:make_mlp", *asked, "--json").stdout)
    assert plan.mesh is not None
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp, plan.mesh.zero) == (4, 1, 2, 1)
    assert sum(plan.microbatch_rows) == 2
    shown = run(f"{NETS}:make_mlp", *asked)
    assert "  mesh       dp=4, tp=1, pp=2, ZeRO-1 of 8xH100-SXM5-80GB, 8 rows in all" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "8xH100-SXM5-80GB", "--mesh", "dp=3,pp=2", *X), "has 6 ranks, devices names 8"),
        (
            ("--devices", "8xH100-SXM5-80GB", "--mesh", "dp=4,cp=2", *X),
            "cp=2 ranks take an early and a late part of each row, and no input is a table",
        ),
        (("--devices", "8xH100-SXM5-80GB", "--mesh", "dp=8", "--zero", "5", *X), "zero=5 is not available"),
        (("--devices", "8xH100-SXM5-90GB", *X), "the nearest: H100-SXM5-80GB"),
        (("--devices", "cuda:0", *X), "there is no device 'cuda:0'"),
        (("--chunks", "several", *X), "chunks='several': give the number of microbatches as an int of at least 1"),
        ((), "no inputs are known for Mlp"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of(run(f"{NETS}:make_mlp", *arguments))


@pytest.mark.parametrize(("command", "devices"), [("report", ("--devices", "cpu,cpu", "--chunks", "4")), ("plan", TWO)])
def test_the_page_is_of_the_plan(tmp_path: Path, command: str, devices: tuple[str, ...]) -> None:
    path = tmp_path / "plan.html"
    asked = [command, f"{NETS}:make_mlp", *X, *devices, "--html", str(path), "--json"]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.stderr
    plan = Plan.model_validate_json(result.stdout)
    [data] = re.findall(r'<script id="plan" type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    shown = json.loads(data)
    assert shown["step_s"] == plan.step_s
    assert [stage["forward_s"] for stage in shown["stages"]] == [stage.forward_s for stage in plan.stages]


def test_a_model_whose_values_decide_is_planned_with_values_and_that_is_said() -> None:
    result = run(f"{NETS}:Gated", *TWO, *X, "--json")
    assert result.exit_code == 0, result.output
    notes = Plan.model_validate_json(result.stdout).notes
    assert any(note.startswith("the forward decides by values, so the model and inputs were taken") for note in notes)
