"""Devices and links that differ: costs by hand, and searches that are cut short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.partition.checker import check
from autosplit.partition.graph import base_graph
from autosplit.partition.ideals import enumerate as ideals
from autosplit.partition.ideals import search
from autosplit.partition.ideals.enumerate import in_runs
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Work
from autosplit.partition.solve import solve
from tests.partition.oracle_problems import Mix, random_problem

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=100, weight_s=1.0) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.25, 0.5) for index in range(3)),
    tuple(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
    microbatches=8,
)


def test_a_slow_device_and_its_link_by_hand() -> None:
    problem = replace(CHAIN, devices=(Device(2.0), Device()), links=(4.0,))
    costs = check(problem, (0, 1, 1, 1))
    assert costs.loads_s == (2 * 3 + 4 * 0.75, 9 + 4 * 0.75)
    assert costs.device_loads_s == costs.loads_s
    partition = solve(problem, stages=2)
    assert (partition.assignment, partition.costs.bottleneck_s, partition.status) == ((0, 1, 1, 1), 12.0, "optimal")


@pytest.mark.parametrize("seed", range(6))
def test_large_graphs_start_from_runs_of_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(random_problem(seed, Mix(24)), devices=(Device(), Device(2.0), Device()))
    exact, graph = solve(problem, stages=3), base_graph(problem)
    assert in_runs(graph).size == graph.size
    monkeypatch.setattr(ideals, "_MOST_GROUPS", 8)
    monkeypatch.setattr(search, "_ENTRIES", 200)
    assert in_runs(graph).size <= 8 < graph.size
    rough = solve(problem, stages=3)
    assert rough.lower_bound_s <= exact.costs.bottleneck_s * (1 + 1e-9)
    assert exact.costs.bottleneck_s * (1 - 1e-9) <= rough.costs.bottleneck_s < 1.5 * exact.costs.bottleneck_s
    assert (exact.status, len(set(rough.assignment))) == ("optimal", 3)
