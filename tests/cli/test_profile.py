"""``autosplit profile``: what it prints, what it measures and what it asks a cost model, and bad usage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit.cli import calibrate
from autosplit.profile import measured
from autosplit.report.costs import CostReport
from cost_models import OpWork, device
from cost_models.calibration import Calibrated, Stamp
from tests.cli.conftest import NETS, command, error_of

X = ("--input", "x=float32[8,16]")

run = command("profile")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def report_of(result: Any) -> CostReport:
    assert result.exit_code == 0, result.output
    return CostReport.model_validate_json(result.stdout)


def test_the_table_is_printed() -> None:
    result = run(f"{NETS}:make_mlp", *X, "--chunks", "4")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Profile of Mlp"
    assert lines[1].startswith("  device     cpu: ")
    assert lines[2] == "  rows       2 rows per microbatch (a batch of 8 in 4 microbatches)"
    assert lines[3].startswith("  times      measured now: medians of ")
    assert lines[6] == "Costs by module, to depth 2"
    assert [line.split()[:2] for line in lines[9:13]] == [[f"layers.{i}", "micro"] for i in range(4)]
    assert "  parameters 1,088 in 4.25 KiB" in lines
    assert "a factory that talks\n" in result.stderr


def test_json_has_every_node_and_every_figure() -> None:
    found = report_of(run(f"{NETS}:Mlp", *X, "--chunks", "4", "--json"))
    assert [node.name for node in found.nodes] == [f"layers.{i}#0" for i in range(4)]
    assert (found.basis, found.rows, found.microbatches, found.batch_rows) == ("measured", 2, 4, 8)
    assert found.torch == torch.__version__
    node = found.nodes[1]
    assert (node.module, node.node_class, node.basis, node.users) == ("layers.1", "micro", "measured", ("layers.2#0",))
    assert (node.forward_flops, node.output_bytes, sum(node.saved.values())) == (2 * 2 * 16 * 16, 128, 128)
    assert node.forward_range_s[0] <= node.forward_s <= node.forward_range_s[1]
    assert node.samples > 0
    assert found.nodes[3].users == ("",)
    assert sum(node.share for node in found.nodes) == pytest.approx(1)
    totals = found.totals
    assert totals.step_s == pytest.approx(4 * (totals.forward_s + totals.backward_s))
    assert totals.step_flops == 4 * (totals.forward_flops + totals.backward_flops)
    assert (totals.parameters, totals.parameter_bytes, totals.saved_bytes) == (1088, 4352, 3 * 128)


def test_a_device_that_is_not_here_is_asked_by_its_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "measure", None)
    card = report_of(run(f"{NETS}:Mlp", *X, "--device", "H100-SXM5-80GB", "--json"))
    lane = report_of(run(f"{NETS}:Mlp", *X, "--no-measure", "--json"))
    assert (card.device, lane.device) == ("H100-SXM5-80GB", "cpu-lane")
    assert card.basis == lane.basis == "modelled"
    assert card.totals.step_s != lane.totals.step_s
    assert "modelled (nothing was measured)" in run(f"{NETS}:Mlp", *X, "--device", "H100-SXM5-80GB").stdout


def test_a_model_without_values_is_planned_for_a_device() -> None:
    found = report_of(run(f"{NETS}:make_on_meta", *X, "--device", "H100-SXM5-80GB", "--json"))
    assert (found.basis, found.totals.parameters) == ("modelled", 1088)
    assert "has no values" in error_of(run(f"{NETS}:make_on_meta", *X, "--measure"))


@pytest.mark.filterwarnings("default")
def test_memory_that_runs_out_is_said_and_modelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    once = measured._Timing._once

    def short(self: Any, node: Any, *, private: bool) -> Any:
        if node.target == "layers.2":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return once(self, node, private=private)

    monkeypatch.setattr(measured._Timing, "_once", short)
    result = run(f"{NETS}:Mlp", *X)
    assert result.exit_code == 0, result.output
    assert "warning: layers.2#0: memory ran out on cpu while it was measured (it asked for 20.00 GiB)" in result.stderr
    assert "2 of 4 nodes modelled" in result.stdout
    assert "layers.2 ~" in result.stdout
    assert "layers.1 ~" not in result.stdout
    notes = " ".join(result.stdout.partition("Notes")[2].split())
    assert "modelled, not measured: layers.2#0: memory ran out on cpu" in notes
    assert "modelled, not measured: layers.3#0: it needs 'layers.2#0'" in notes


def test_a_model_that_no_graph_can_follow_is_refused() -> None:
    assert "a graph cannot follow that" in error_of(run(f"{NETS}:Routed", *X))


def calibration() -> Calibrated:
    samples = [(OpWork(kind="matmul", flops=n**3, bytes=n * n, dtype="fp32"), 1e-3 * n) for n in (10, 20, 40, 80, 160)]
    stamp = Stamp(device="cpu-lane", date="2026-01-01")
    return Calibrated.fit(samples, device=device("cpu-lane"), stamp=stamp, issue_s=0.5)


def test_calibrating_writes_a_file_that_a_profile_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def fake(name: str, *, quick: bool, progress: Callable[[str, float], None]) -> Calibrated:
        asked.append((name, quick))
        progress("a kernel", 0.5)
        return calibration()

    costs = dict.fromkeys(("step_s", "action_s", "gradient_byte_s", "fresh_byte_s", "overlap"), 0.5)
    monkeypatch.setattr(calibrate, "calibrate", fake)
    monkeypatch.setattr(calibrate, "step_costs", lambda chosen, *, steps: costs)
    path = tmp_path / "here.json"
    result = run("--calibrate", "--quick", "--save", str(path))
    assert result.exit_code == 0, result.output
    step = Calibrated.load(path).fallback.device.step
    assert step is not None
    assert step.overlap == 0.5
    assert asked == [("cpu-lane", True)]
    assert result.stdout == f"wrote {path}; use it by --device {path}\n"
    assert result.stderr == "", "what does not end on a terminal is quiet"
    found = report_of(run(f"{NETS}:Mlp", *X, "--device", str(path), "--json"))
    assert found.basis == "modelled"
    assert found.totals.forward_s > 4 * 0.5, "what each operation costs besides its kernel"
    assert run("--calibrate").exit_code == 0
    assert [path.name for path in (tmp_path / "caches").rglob("*.json")] == ["calibrated-cpu-lane.json"]
