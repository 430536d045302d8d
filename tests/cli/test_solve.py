"""``autosplit solve``: the answer as JSON and as a table, its proof, and what is said when there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosplit.partition.checker import check
from autosplit.partition.workload import load_workload
from tests.cli.conftest import command

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "workloads"
GNMT = FOLDER / "pd_gnmt_bw1e10.json"
BERT = FOLDER / "tar_layer_bert24_training.json"
run = command("solve")


def row(count: int, **fields: Any) -> dict[str, Any]:
    """A chain of nodes of 1 ms and 10 bytes each, its transfers 0.25 ms."""
    nodes = [{"id": index, "name": f"n{index}", "fwd": 0.5, "bwd": 0.5, "mem": 10} for index in range(count)]
    edges = [[index, index + 1, index, 0.25, "f"] for index in range(count - 1)]
    return {"format": "autosplit-workload/1", "name": "row", "mem_cap": None, "nodes": nodes, "edges": edges} | fields


@pytest.fixture
def written(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(data: dict[str, Any]) -> Path:
        path = tmp_path / "row.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        return path

    return write


def answer(result: Any, *, code: int = 0) -> dict[str, Any]:
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_json_has_the_keys_that_scripts_read() -> None:
    result = run(GNMT, "--stages", 4)
    found = answer(result)
    assert list(found)[:5] == ["assignment", "bottleneck", "lower_bound", "status", "seconds"]
    assert (found["bottleneck"], found["lower_bound"]) == pytest.approx((27.99533, 27.99533), rel=1e-6)
    assert (found["status"], found["unit"], found["objective"]) == ("optimal", "ms", "bottleneck")
    costs = check(load_workload(GNMT).problem(stages=4), found["assignment"])
    assert found["loads"] == pytest.approx([load * 1e3 for load in costs.loads_s])
    assert found["bytes"] == list(costs.stage_bytes)
    assert max(found["loads"]) == found["bottleneck"]
    assert found["seconds"] > 0
    assert "step_time" not in found
    assert result.stderr == ""
    forced = answer(run(GNMT, "--stages", 4, "--json"))
    assert forced | {"seconds": 0} == found | {"seconds": 0}


def test_the_table_shows_stages_and_the_proof(written: Callable[..., Path]) -> None:
    result = run(written(row(3)), "--stages", 2, "--table")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0] == "row: 3 nodes, 2 stages".split()
    assert lines[1] == ["stage", "nodes", "first", "last", "load", "memory"]
    assert sorted(lines[3:5]) in (
        ["0 1 0 n0 0 n0 1.25 ms 10 B".split(), "1 2 1 n1 2 n2 2.25 ms 20 B".split()],
        ["0 2 0 n0 1 n1 2.25 ms 20 B".split(), "1 1 2 n2 2 n2 1.25 ms 10 B".split()],
    )
    assert lines[5] == "bottleneck 2.25 ms, optimal: no partition has less".split()
    assert lines[6][:2] == ["solved", "in"]


def test_a_name_cannot_write_to_the_terminal(written: Callable[..., Path]) -> None:
    data = row(2, name="\x07\x1b[2J")
    data["nodes"][0]["name"] = "\r\x1b[31m" + "y" * 500
    text = run(written(data), "--stages", 2, "--table").stdout
    assert text.replace("\n", "").isprintable()
    assert r"\x07\x1b[2J: 2 nodes" in text
    assert max(map(len, text.splitlines())) < 140


def test_stages_may_stay_empty(written: Callable[..., Path]) -> None:
    data = row(3)
    for edge in data["edges"]:
        edge[3] = 50.0
    found = answer(run(written(data), "--stages", 3))
    assert (len(set(found["assignment"])), found["bottleneck"], found["status"]) == (1, 3.0, "optimal")
    assert (sorted(found["loads"]), sorted(found["bytes"])) == ([0.0, 0.0, 3.0], [0, 0, 30])
    many = answer(run(written(row(3)), "--stages", 10**12))
    assert (many["bottleneck"], many["loads"], many["bytes"]) == (1.5, [1.25, 1.5, 1.25], [10, 10, 10])
    assert "997 more stay empty" in run(written(row(3)), "--stages", 1000, "--table").stdout


def test_the_step_time_is_an_objective() -> None:
    found = answer(run(BERT, "--stages", 4, "--objective", "step_time", "--microbatches", 16, "--schedule", "gpipe"))
    costs = check(load_workload(BERT).problem(stages=4, microbatches=16, schedule="gpipe"), found["assignment"])
    assert found["objective"] == "step_time"
    assert found["step_time"] == pytest.approx(costs.step_s * 1e3)
    assert found["lower_bound"] <= found["step_time"]
    assert found["bottleneck"] == pytest.approx(costs.bottleneck_s * 1e3)
    text = run(BERT, "--stages", 4, "--objective", "step_time", "--table").stdout
    assert "step time" in text


def test_what_does_not_fit_exits_with_1_and_the_smallest_cap(written: Callable[..., Path]) -> None:
    path = written(row(4))
    result = run(path, "--stages", 2, "--memory-cap", 15)
    found = answer(result, code=1)
    assert (found["assignment"], found["status"], found["smallest_memory_cap"]) == (None, "infeasible", 20)
    assert result.stderr.startswith(
        "error: no partition fits 2 stages: the nodes have 40 B (40 bytes) of static memory"
    )
    assert answer(run(path, "--stages", 2, "--memory-cap", found["smallest_memory_cap"]))["bytes"] == [20, 20]
    as_table = run(path, "--stages", 2, "--memory-cap", 15, "--table")
    assert (as_table.exit_code, as_table.stdout, as_table.stderr) == (1, "", result.stderr)


def test_colours_that_leave_nothing_to_cut_exit_with_1(written: Callable[..., Path]) -> None:
    data = row(3)
    data["nodes"][0]["color"] = data["nodes"][2]["color"] = "blue"
    result = run(written(data), "--stages", 2)
    assert answer(result, code=1)["smallest_memory_cap"] is None
    assert (
        "there is nothing to cut: colocation group 'blue' holds 3 nodes together (0 'n0', 1 'n1', 2 'n2')"
        in result.stderr
    )
    assert answer(run(written(data), "--stages", 1))["assignment"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", 0), "--stages"),
        ((), "--stages"),
        (
            ("--stages", 2, "--objective", "speed"),
            "'speed' is not one of 'bottleneck', 'step_time'",
        ),
        (
            ("--stages", 2, "--schedule", "zb_h1"),
            "'zb_h1' is not one of 'gpipe', '1f1b'",
        ),
        (("--stages", 2, "--microbatches", 0), "--microbatches"),
        (("--stages", 2, "--memory-cap", "much"), "'much' is no size in bytes"),
        (("--stages", 2, "--memory-cap", "9" * 400), "is no number of bytes"),
        (
            (
                "--stages",
                2,
                "--memory-cap=-5",
            ),
            "'-5' is no size in bytes",
        ),
        (("--stages", 2, "--time-limit", 0), "--time-limit 0.0 is no number of seconds above 0"),
        (("--stages", 2, "--time-limit", "nan"), "--time-limit nan is no number of seconds above 0"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[object, ...], message: str) -> None:
    result = run(GNMT, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_input_exits_with_2_and_the_place(written: Callable[..., Path]) -> None:
    data = row(3)
    data["edges"].append([2, 0, 9, 1.0, "f"])
    result = run(written(data), "--stages", 2, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "edges of kind f and o form a cycle: 0 'n0' -> 1 'n1' -> 2 'n2' -> 0" in result.stderr
    absent = run("absent.json", "--stages", 2)
    assert absent.exit_code == 2
    assert "cannot read the workload 'absent.json': No such file or directory" in absent.stderr
