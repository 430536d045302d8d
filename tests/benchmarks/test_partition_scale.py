"""The scaling benchmark: its graphs, its checks, and one case through all of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import partition_scale
from benchmarks.llama_graph import llama_problem
from benchmarks.partition_scale import Row


def test_graphs_have_llamas_shape() -> None:
    problem = llama_problem(layers=3)
    assert len(problem.works) == 166
    assert problem == llama_problem(layers=3), "the same graph every time"
    assert all(net.producer < min(net.consumers) for net in problem.nets)
    assert {net.producer for net in problem.nets} == set(range(165)), "only the loss has no consumer"
    kinds = Counter(work.name.rpartition("_")[0] for work in problem.works)
    assert {name: kinds[name] for name in ("q_proj", "sdpa", "gate", "rsqrt", "lm_head")} == {
        "q_proj": 3, "sdpa": 3, "gate": 3, "rsqrt": 7, "lm_head": 1,
    }  # fmt: skip
    consumers = Counter(len(net.consumers) for net in problem.nets)
    assert consumers[12] == 0
    assert consumers[6] == 2, "cos and sin go to two works of each layer"
    parameters = sum(work.static_bytes for work in problem.works) // 16
    per_layer = 8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert parameters == 3 * per_layer + 2 * 32000 * 8192 + 8192


def row(**fields: object) -> Row:
    plain = {
        "layers": 100, "nodes": 5016, "stages": 64, "value": 2.0, "lower_bound": 2.0, "gap": 0.0, "status": "optimal",
        "cpu_s": 14.0, "wall_s": 15.0, "graph_cpu_s": 1.0, "peak_bytes": 2**29,
    }  # fmt: skip
    return Row(**plain | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "failed"),
    [
        ({}, []),
        ({"cpu_s": 15.1}, ["CPU seconds"]),
        ({"cpu_s": 59.0, "layers": 400}, []),
        ({"cpu_s": 1e4, "layers": 2}, []),
        ({"gap": 0.021}, ["gap"]),
        ({"peak_bytes": 2**30 + 1}, ["resident bytes"]),
    ],
)
def test_what_is_asked(fields: dict[str, object], failed: list[str]) -> None:
    checks = partition_scale.checks_of([row(**fields)])
    assert [check.name.rpartition(": ")[2] for check in checks if not check.ok] == failed


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scale.json"
    assert partition_scale.main(["--only", "1x2", "--json", str(file)]) == 0
    assert "optimal" in capsys.readouterr().out
    (figure,) = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert (figure["nodes"], figure["stages"], figure["status"]) == (66, 2, "optimal")
    assert figure["lower_bound"] <= figure["value"]
