"""A model's costs: nodes grouped by module, shares of a step, and the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.types import MeasuredNode, MeasuredTimes, Profile, SplitBackward
from autosplit.report.costs import CostReport, cost_report, module_rows, render_costs
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace

ROWS, CHUNKS = 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    """Two blocks, and a loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.softmax(0)


@pytest.fixture(scope="module")
def recorded() -> TracedGraph:
    return trace(Net(), Sample(torch.randn(ROWS * CHUNKS, 8))).graph


def report_of(recorded: TracedGraph, found: Profile | None = None) -> CostReport:
    found = found or profile(recorded, rows=ROWS, batch_rows=ROWS * CHUNKS)
    return cost_report(Net(), recorded, found, sizes=(ROWS,) * CHUNKS)


def measured(found: Profile, *, without: str) -> Profile:
    """Return a profile as if all but one node had been measured, twice as slow at worst as at best."""
    samples = {
        name: MeasuredNode(
            n.forward_s,
            n.backward_s,
            (n.forward_s / 2, n.forward_s),
            (n.backward_s, n.backward_s),
            7,
            SplitBackward(n.backward_s, 0.0),
        )
        for name, n in found.nodes.items()
        if name != without
    }
    return replace(found, times=MeasuredTimes(samples, "cpu", {without: "too big"}))


def test_rows_of_modules_hold_what_runs_in_them_and_below(recorded: TracedGraph) -> None:
    report = report_of(recorded)
    [model] = module_rows(report, depth=0)
    assert (model.name, len(model.nodes), model.total("share")) == ("(Net)", len(report.nodes), pytest.approx(1))
    blocks = module_rows(report, depth=2)
    assert [row.name for row in blocks] == ["blocks.0", "blocks.1", "(Net)"]
    assert [[node.node_class for node in row.nodes] for row in blocks] == [["micro"] * 4, ["micro"] * 4, ["full"]]
    assert [row.output_bytes for row in blocks] == [ROWS * 32, ROWS * 32, CHUNKS * ROWS * 32], "what leaves a module"
    assert [row.name for row in module_rows(report, depth=3)[:3]] == ["blocks.0.first", "blocks.0", "blocks.0.second"]
    assert sum(row.total("forward_flops") for row in blocks) == report.totals.forward_flops == 4 * 2 * ROWS * 8 * 32


def test_a_storage_that_several_nodes_save_counts_once(recorded: TracedGraph) -> None:
    report = report_of(recorded)
    hidden, halves = ROWS * 32 * 4, ROWS * 8 * 4
    first = module_rows(report, depth=2)[0]
    assert first.saved_bytes == hidden, "what relu gives, which both it and the second layer save"
    assert next(sum(n.saved.values()) for n in report.nodes if n.name == "blocks.0.second#0") == hidden
    assert report.totals.saved_bytes == 2 * hidden + halves + CHUNKS * halves


def test_micro_nodes_count_once_per_microbatch(recorded: TracedGraph) -> None:
    report = report_of(recorded)
    times = [CHUNKS if node.node_class == "micro" else 1 for node in report.nodes]
    step_s = sum(n * (node.forward_s + node.backward_s) for n, node in zip(times, report.nodes, strict=True))
    assert report.totals.step_s == pytest.approx(step_s)
    assert sum(node.share for node in report.nodes) == pytest.approx(1)
    assert report.nodes[0].share == pytest.approx(
        CHUNKS * (report.nodes[0].forward_s + report.nodes[0].backward_s) / step_s
    )


def test_a_report_comes_back_as_it_was(recorded: TracedGraph) -> None:
    found = profile(recorded, rows=ROWS, batch_rows=ROWS * CHUNKS)
    for report in (report_of(recorded), report_of(recorded, measured(found, without="blocks.1.second#0"))):
        assert CostReport.model_validate_json(report.model_dump_json()) == report


def test_where_the_figures_come_from_is_said(recorded: TracedGraph) -> None:
    found = profile(recorded, rows=ROWS, batch_rows=ROWS * CHUNKS)
    estimated = replace(found.nodes["blocks.0.first#0"], estimated="no fake run")
    found = replace(found, nodes={**found.nodes, estimated.name: estimated})
    report = report_of(recorded, measured(found, without="blocks.1.second#0"))
    text = render_costs(report, depth=2)
    assert "measured now: medians of 7 samples; 1 of 9 nodes modelled" in text
    assert "\nblocks.0 *  micro " in text
    assert "\nblocks.1 ~  micro " in text
    assert "modelled, not measured: blocks.1.second#0: too big" in text
    assert "FLOPs and bytes are estimates: blocks.0.first#0: no fake run" in text
    assert "~" not in render_costs(report_of(recorded, measured(found, without="none")))


def test_the_largest_rows_in_model_order(recorded: TracedGraph) -> None:
    report = report_of(recorded)
    shown = [line for line in render_costs(report, nodes=True, top=4).splitlines() if " micro " in line]
    largest = sorted(report.nodes, key=lambda node: node.share, reverse=True)[:4]
    assert [line.split()[0] for line in shown] == [node.name for node in report.nodes if node in largest]
    hidden = sum(node.share for node in report.nodes if node not in largest)
    assert f"\nand 5 more with {hidden:.1%} of the time\n" in render_costs(report, nodes=True, top=4)
