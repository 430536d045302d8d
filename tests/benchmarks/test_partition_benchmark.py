"""The partition benchmark: its peers, its checks, and one workload through all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import partition


def test_one_workload_through_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    code = partition.main(["--only", "pd_alexnet", "tar_layer_bert24_t", "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    missed = {check["name"] for check in found["checks"] if not check["ok"]}
    # How long it takes, and what a process of tests has in memory, is the machine's and not for a test to ask.
    assert all(name.endswith(("seconds", "bytes")) for name in missed)
    assert code == (1 if missed else 0)
    assert [(figure["workload"], figure["stages"]) for figure in found["figures"]] == [
        ("pd_alexnet_bw1e10", 8),
        ("pd_alexnet_bw1e10", 4),
        ("pd_alexnet_bw1e10", 16),
        ("tar_layer_bert24_training", 6),
        ("tar_layer_bert24_training", 12),
    ]
    assert {figure["status"] for figure in found["figures"]} == {"optimal"}
    printed = capsys.readouterr().out
    assert "41.7261 optimal" in printed
    assert "5 cuts in" in printed
