"""Assignments applied to a recording: data flows forward, and nodes of one colour are together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.options import Sample
from autosplit.planning.plan import write
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.apply import DataflowIndex, assign, sources
from autosplit.trace.graph import NodeClass, TracedGraph
from autosplit.trace.ladder import trace


class Written(nn.Module):
    """Writes into parts of one value, so that its nodes have a colour, between others that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held, also = torch.zeros_like(x), torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * self.scale.exp()
            held[:, number] = x[:, 0]
            if number % 2:
                also[:, number] = x[:, 1]
        return x + held + also


@pytest.fixture(scope="module")
def traced() -> TracedGraph:
    return trace(Written(), Sample(torch.randn(8, 6))).graph


def lowest(traced: TracedGraph, wanted: dict[str, int]) -> dict[str, int]:
    """Raise stages one by one until nothing is wrong."""
    nodes = {info.name: (node, info) for node, info in traced.compute_nodes() if info.node_class is NodeClass.MICRO}
    name_of = {node.name: name for name, (node, _) in nodes.items()}
    pairs = [(name_of[source.name], name) for name, (node, _) in nodes.items() for source in sources(node)
             if source.name in name_of]  # fmt: skip
    pairs += [(name_of[one], name_of[two]) for one, two in traced.order if one in name_of and two in name_of]
    pairs += [(one, two) for one, (_, a) in nodes.items() for two, (_, b) in nodes.items()
              if a.colocation_group is not None and a.colocation_group == b.colocation_group]  # fmt: skip
    placed = {name: wanted[name] for name in nodes}
    while wrong := [(one, two) for one, two in pairs if placed[one] > placed[two]]:
        for one, two in wrong:
            placed[two] = max(placed[one], placed[two])
    return placed


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_the_lowest_that_are_legal(traced: TracedGraph, seed: int) -> None:
    draw = random.Random(seed)
    names = [info.name for _, info in traced.compute_nodes()]
    wanted = {name: draw.randrange(4) if draw.random() < 0.3 else 0 for name in names}
    placed = assign(DataflowIndex(traced), wanted, stages=4)
    expected = lowest(traced, wanted)
    assert {name: placed[name] for name in expected} == expected
    assert placed.keys() == set(names)
    assert len({info.colocation_group for _, info in traced.compute_nodes()} - {None}) == 2


class Counting(nn.Module):
    """Counts its calls twice, once early and once late, in what the batch has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.layers[1](self.layers[0](x * (self.calls + 1)))
        self.calls.add_(1)
        return self.layers[3](self.layers[2](x * self.calls.cos()))


def test_shared_nodes_that_change_one_state_are_together() -> None:
    graph = trace(Counting(), Sample(torch.randn(8, 6))).graph
    names = [info.name for _, info in graph.compute_nodes()]
    late = {name: int(place > len(names) // 2) for place, name in enumerate(names)}
    placed = assign(DataflowIndex(graph), late, stages=2)
    changing = [info for _, info in graph.compute_nodes() if "calls" in info.writes]
    assert len(changing) == 2
    assert all(info.node_class is NodeClass.SHARED for info in changing)
    assert {placed[info.name] for info in changing} == {0}
    assert set(placed.values()) == {0, 1}


class CodeBook(nn.Module):
    """Reads a table as a whole early and by rows late, before the whole batch writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.register_buffer("table", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x - self.table.sum(0))
        x = x + self.table[(x.detach().argmax(1) > 1).long()]
        with torch.no_grad():
            self.table.add_(x.detach().mean(0))
        return x


@pytest.mark.parametrize("late", [0, 1])
def test_shared_nodes_that_read_what_full_ones_write_are_before_their_users(late: int) -> None:
    index = DataflowIndex(trace(CodeBook(), Sample(torch.randn(8, 6))).graph)
    infos = dict(index.traced.compute_nodes())
    assert {info.node_class for info in infos.values()} == set(NodeClass)
    wanted = {info.name: late * number * 3 // len(infos) for number, info in enumerate(infos.values())}
    placed = assign(index, wanted, stages=3)
    for node, info in infos.items():
        assert all(placed[infos[source].name] <= placed[info.name] for source in index.sources[node] if source in infos)


WIDTH, ROWS = 8, 6


class Net(nn.Module):
    """Layers, and at their end one that mixes rows where ``mixed``."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.layers, self.mixed = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), mixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(0, keepdim=True).tanh() if self.mixed else x.tanh()


def planned(*, mixed: bool = False, **options: Any) -> Plan:
    plan = autosplit(Net(mixed=mixed), devices=2, sample=torch.zeros(ROWS, WIDTH), **{"chunks": 3, **options}).plan
    assert plan is not None
    return plan


CASES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "mixed": True},
    {"schedule": "interleaved", "virtual_stages": 2, "chunks": 4},
    {"schedule": "looped_bfs", "virtual_stages": 2},
    {"schedule": "zb_v", "virtual_stages": 2},
    {"schedule": "zb_h1"},
    {"schedule": "1f1b", "recompute": "always", "optimizer": "adam"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_the_highest_point_is_the_peak(options: dict[str, Any]) -> None:
    plan = planned(**options)
    lanes = plan.schedule_for(len(plan.microbatch_rows)).lanes
    assert len(plan.curves) == len(lanes)
    for lane, curve in enumerate(plan.curves):
        own = [stage.memory for stage in plan.stages if stage.lane == lane]
        assert len({memory.peak_bytes for memory in own}) == 1
        assert min(memory.activation_bytes for memory in own) >= 0
        kinds = {name: tuple(values) for name, values in curve.model_dump().items()}
        assert {len(values) for values in kinds.values()} == {len(lanes[lane]) + 1}
        totals = [sum(moment) for moment in zip(*kinds.values(), strict=True)]
        assert max(totals) == own[0].peak_bytes
        at = totals.index(max(totals))
        assert kinds["parameter_bytes"][at] == sum(m.parameter_bytes + m.buffer_bytes for m in own)
        for name in ("gradient_bytes", "optimizer_bytes", "activation_bytes", "transient_bytes"):
            assert kinds[name][at] == sum(getattr(m, name) for m in own), name


def test_a_very_long_step_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MOST_ACTIONS", 11)
    assert planned().curves == ()
    assert planned(chunks=2).curves
