"""The reader of workload files: what the numbers mean, what it refuses and how, and that nothing else ever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autosplit.errors import InputError
from autosplit.partition.checker import check
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import Problem, TensorEdge
from autosplit.partition.solve import solve
from autosplit.partition.workload import FORMAT, MOST_BYTES, load_workload, parse_workload

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "workloads"
PATHS = sorted(FOLDER.glob("*.json"))
SMALL = ("pd_alexnet", "pd_gnmt", "tar_layer_bert", "tar_layer_gnmt")


def node(index: int, **fields: Any) -> dict[str, Any]:
    return {"id": index, "name": f"n{index}", "fwd": 1.0, "bwd": 2.0, "mem": 10} | fields


def file(**fields: Any) -> dict[str, Any]:
    """Three nodes in a row, with a gradient back and a colour."""
    edges = [[0, 1, 0, 0.5, "f"], [1, 0, 1, 0.25, "b"], [1, 2, 2, 0.5, "f"], [0, 2, -1, 0, "o"]]
    nodes = [node(0), node(1, color=7), node(2, color=7)]
    return {"format": FORMAT, "name": "row", "unit": "ms", "mem_cap": None, "nodes": nodes, "edges": edges} | fields


def parsed(**fields: Any) -> Problem:
    return parse_workload(json.dumps(file(**fields))).problem(stages=2)


def said(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_workload(text, source="'x.json'")
    return str(caught.value)


def refused(**fields: Any) -> str:
    return said(json.dumps(file(**fields)))


def test_times_become_seconds_and_a_tensor_one_net() -> None:
    problem = parsed()
    assert [(work.forward_s, work.backward_s, work.static_bytes, work.colocation_group) for work in problem.works] == [
        (0.001, 0.002, 10, None),
        (0.001, 0.002, 10, 7),
        (0.001, 0.002, 10, 7),
    ]
    assert problem.nets == (
        TensorEdge(0, (1,), 0.0005, 0.0),
        TensorEdge(1, (0,), 0.0, 0.00025, ordered=False),
        TensorEdge(1, (2,), 0.0005, 0.0),
    )
    assert (problem.order, problem.devices) == (((0, 2),), None)


def test_a_tensor_of_both_kinds_is_one_net_and_orders_only_what_its_f_edges_say() -> None:
    edges = [[1, 2, 0, 0.5, "f"], [1, 0, 0, 0.5, "b"], [1, 1, 0, 0.5, "b"], [1, 2, 0, 0.5, "b"]]
    problem = parsed(nodes=[node(0), node(1), node(2)], edges=edges)
    assert problem.nets == (TensorEdge(1, (2, 0), 0.0005, 0.0, ordered=False),)
    assert problem.order == ((1, 2),)
    assert check(problem, (0, 1, 1)).loads_s == pytest.approx((0.0035, 0.0065))
    with pytest.raises(ValueError, match="must not come after"):
        check(problem, (0, 1, 0))


def test_edges_of_kind_o_both_ways_hold_nodes_together() -> None:
    problem = parsed(nodes=[node(0), node(1), node(2)], edges=[[0, 2, -1, 0, "o"], [2, 0, -1, 0, "o"]])
    found = solve(problem, stages=2, empty=True)
    assert found.assignment[0] == found.assignment[2] != found.assignment[1]


def test_the_cap_is_the_files_unless_another_is_given() -> None:
    capped = parse_workload(json.dumps(file(mem_cap=20.5)))
    assert capped.problem(stages=2).capacity_bytes == (20, 20)
    assert capped.problem(stages=3, capacity_bytes=9).capacity_bytes == (9, 9, 9)
    assert (
        parse_workload(json.dumps(file())).problem(stages=2, capacity_bytes=10**30).capacity_bytes == (MOST_BYTES,) * 2
    )


def recount(data: dict[str, Any], assignment: tuple[int, ...]) -> list[float]:
    """Return the loads in ms straight from the format's definition."""
    loads = [0.0] * (max(assignment) + 1)
    for entry, stage in zip(data["nodes"], assignment, strict=True):
        loads[stage] += entry["fwd"] + entry["bwd"]
    tensors: dict[int, tuple[int, float, set[int]]] = {}
    for tail, head, tensor, ms, _ in data["edges"]:
        if tensor >= 0:
            tensors.setdefault(tensor, (tail, ms, set()))[2].add(head)
    for tail, ms, heads in tensors.values():
        touched = {assignment[end] for end in (tail, *heads)}
        for stage in touched if len(touched) > 1 else ():
            loads[stage] += ms
    return loads


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_published_file_means_what_its_format_says(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    workload = load_workload(path)
    problem = workload.problem(stages=5)
    groups = base_graph(problem)
    assignment = tuple(5 * group // groups.size for group in groups.group_of)
    costs = check(problem, assignment)
    assert [load * 1e3 for load in costs.loads_s] == pytest.approx(recount(data, assignment))
    held = [sum(n["mem"] for n, own in zip(data["nodes"], assignment, strict=True) if own == s) for s in range(5)]
    assert list(costs.stage_bytes) == held
    assert workload.capacity_bytes == data["mem_cap"]
    for tail, head, _, _, kind in data["edges"]:
        assert kind == "b" or assignment[tail] <= assignment[head]
    colours: dict[int, int] = {}
    for entry, stage in zip(data["nodes"], assignment, strict=True):
        if "color" in entry and entry["color"] is not None:
            assert colours.setdefault(entry["color"], stage) == stage


@pytest.mark.parametrize("path", [path for path in PATHS if path.name.startswith(SMALL)], ids=lambda path: path.stem)
def test_small_references_are_met_and_proved(path: Path) -> None:
    for reference in json.loads(path.read_text(encoding="utf-8"))["references"]:
        workload = load_workload(path)
        cap = None if reference["mem_cap"] is None else int(reference["mem_cap"])
        problem = workload.problem(stages=reference["k"], capacity_bytes=cap)
        found = solve(problem, stages=reference["k"], empty=True)
        assert reference["status"] == "optimal"
        assert found.status == "optimal"
        assert found.costs.bottleneck_s * 1e3 == pytest.approx(reference["best"], rel=1e-6)
        assert found.lower_bound_s == pytest.approx(found.costs.bottleneck_s, rel=1e-8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'x.json' is no workload: the file: invalid JSON: EOF while parsing a value at line 1 column 0"),
        ("[1, 2]", "'x.json' is no workload: the file: input should be an object"),
        ("{}", "'x.json' is no workload: format: field required"),
        ('{"format": "other/2"}', "'x.json' has the format 'other/2'; this autosplit reads 'autosplit-workload/1'"),
        ("[" * 100_000, "'x.json' is no workload: the file: invalid JSON: recursion limit exceeded"),
    ],
)
def test_what_is_no_workload_is_told_so(text: str, message: str) -> None:
    assert said(text).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": "s"}, "unit is 's': input should be 'ms'"),
        ({"nodes": []}, "nodes is empty; a workload has at least one"),
        ({"mem_cap": -1}, "mem_cap is -1: input should be greater than or equal to 0"),
        (
            {"nodes": [node(0, fwd=-1.5)], "edges": []},
            "nodes[0].fwd is -1.5: input should be greater than or equal to 0",
        ),
        ({"nodes": [node(0, bwd=float("nan"))], "edges": []}, "nodes[0].bwd is nan: input should be a finite number"),
        ({"nodes": [node(0, mem=float("inf"))], "edges": []}, "nodes[0].mem is inf: input should be a finite number"),
        ({"nodes": [node(0, fwd=1e13)], "edges": []}, "nodes[0].fwd is 10000000000000.0: input should be less than"),
        ({"nodes": [node(0, fwd="1")], "edges": []}, "nodes[0].fwd is '1': input should be a valid number"),
        ({"nodes": [node(0, color=1.5)], "edges": []}, "nodes[0].color is 1.5: input should be a valid"),
        ({"nodes": [{"id": 0}], "edges": []}, "nodes[0].name: field required (problems in all: 4)"),
        (
            {"nodes": [node(0, colour=3)], "edges": []},
            "nodes[0] has 'colour', which is nothing here; did you mean 'color'?",
        ),
        ({"Mem_Cap": 3}, "the file has 'Mem_Cap', which is nothing here; did you mean 'mem_cap'?"),
        ({"nodes": [node(1)], "edges": []}, "the id of nodes[0] is 1; an id is the node's place in the list, 0"),
        (
            {"nodes": [node(0), node(0)]},
            "the id of nodes[1] is 0, and so is that of nodes[0]; an id is the node's place",
        ),
        ({"nodes": [node(0, id=10**4000)]}, "the id of nodes[0] is a number of 13288 bits; an id is"),
        (
            {"nodes": [node(n, mem=2**52) for n in range(3)], "edges": []},
            "the mem of all nodes adds up to 1.35e+16 bytes",
        ),
        ({"edges": [[0, 3, 0, 1.0, "f"]]}, "edges[0] has dst 3; the nodes are 0 to 2"),
        ({"edges": [[-1, 0, 0, 1.0, "f"]]}, "edges[0] has src -1; the nodes are 0 to 2"),
        ({"edges": [[0, 1, 0, 1.0]]}, "edges[0].kind: field required"),
        ({"edges": [[0, 1, 0, -1.0, "f"]]}, "edges[0].ms is -1.0: input should be greater than or equal to 0"),
        ({"edges": [[0, 1, 0, 1.0, "x"]]}, "edges[0].kind is 'x': input should be 'f', 'b' or 'o'"),
        ({"edges": [[0, 1, -1, 1.0, "f"]]}, "edges[0] has kind 'f' and tensor -1; kinds 'f' and 'b' carry a tensor"),
        ({"edges": [[0, 1, 4, 0.0, "o"]]}, "edges[0] has kind 'o' and tensor 4; kinds 'f' and 'b' carry a tensor"),
        (
            {"edges": [[0, 1, 5, 1.0, "f"], [1, 2, 5, 1.0, "f"]]},
            "edges[0] and edges[1] carry tensor 5 from nodes 0 and 1; a tensor has one producer",
        ),
        (
            {"edges": [[0, 1, 5, 1.0, "f"], [0, 2, 5, 2.0, "f"]]},
            "edges[0] and edges[1] carry tensor 5 for 1.0 and 2.0 ms; a tensor has one cost",
        ),
        ({"edges": [[2, 2, 5, 1.0, "f"]]}, "edges of kind f and o form a cycle: 2 'n2' -> 2; nodes that need"),
        (
            {"edges": [[0, 1, 0, 1.0, "f"], [1, 2, 1, 1.0, "f"], [2, 0, -1, 0.0, "o"]]},
            "edges of kind f and o form a cycle: 0 'n0' -> 1 'n1' -> 2 'n2' -> 0; nodes that need",
        ),
    ],
)
def test_bad_input_is_named_with_its_place(fields: dict[str, Any], message: str) -> None:
    assert message in refused(**fields)
