"""The partition benchmark: its peers, its checks, and one workload through all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import partition
from benchmarks.partition import Row


def row(**fields: object) -> Row:
    plain = Row(
        workload="w",
        nodes=4,
        stages=2,
        memory_cap=None,
        ours=10.0,
        lower_bound=10.0,
        status="optimal",
        gap=0.0,
        cpu_s=1.0,
        wall_s=1.0,
        reference=10.0,
        reference_status="optimal",
        reference_method="by hand",
        peers={},
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def failed(*rows: Row, peak_bytes: int = 0) -> list[str]:
    return [check.name for check in partition.checks_of(rows, peak_bytes=peak_bytes) if not check.ok]


def test_what_is_asked() -> None:
    assert failed(row()) == []
    assert failed(row(ours=10.0001)) == ["w, 2 stages: millionths apart from the optimum"]
    assert failed(row(ours=9.9999)) == ["w, 2 stages: millionths apart from the optimum"]
    assert failed(row(status="bounded", gap=0.01)) == ["w, 2 stages: gap where the optimum is known"]
    assert failed(row(cpu_s=5.1)) == ["w, 2 stages: CPU seconds"]
    assert failed(*[row(cpu_s=4.9)] * 13) == ["all together: CPU seconds"]
    assert failed(row(), peak_bytes=2**31) == ["resident memory of the process, bytes"]
    open_ended = row(reference_status="gap 5%", status="bounded", gap=0.03, memory_cap=7)
    assert failed(open_ended) == []
    assert failed(replace(open_ended, ours=9.0)) == []
    assert failed(replace(open_ended, ours=10.1, gap=0.04)) == [
        "w, 2 stages, capped: millionths above the reference",
        "w, 2 stages, capped: gap",
    ]


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
