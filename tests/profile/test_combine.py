"""The joined profile: times from the device or a cost model, every state tensor once, every node once."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.profile.node_costs.combine import profile
from autosplit.trace.graph import NodeClass
from tests.profile.graphs import traced

ROWS = 3


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.head(self.norm(self.embedding(x) * self.scale)), dim=0)


@pytest.fixture
def graph():
    return traced(Tied(), torch.zeros(ROWS, dtype=torch.long), classes={"softmax": NodeClass.FULL})


@pytest.mark.parametrize("measure", [True, False])
def test_every_node_is_there_once_in_model_order(graph, measure):
    x = torch.arange(ROWS)
    found = profile(graph, inputs=[x], rows=ROWS, batch_rows=4 * ROWS, measure=measure)
    assert list(found.nodes) == ["embedding", "mul", "norm", "head", "softmax"]
    assert (found.rows, found.input_bytes, found.estimated) == (ROWS, {"input/x": ROWS * 8}, {})
    assert (found.times.device, found.measured) == (("cpu", True) if measure else ("cpu-lane", False))
    assert all(node.forward_s > 0 and node.backward_s > 0 for node in found.nodes.values())
    assert found.nodes["softmax"].output_bytes == 4 * ROWS * 11 * 4


def test_state_names_every_object_once(graph):
    state = profile(graph, rows=ROWS, batch_rows=ROWS).state
    assert list(state) == [
        "scale",
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    tied, scale, counter = state["embedding.weight"], state["scale"], state["norm.num_batches_tracked"]
    assert (tied.uses, tied.elements, tied.bytes, tied.trainable) == (("embedding", "head"), 66, 264, True)
    assert (scale.uses, scale.trainable, scale.is_parameter) == (("mul",), False, True)
    assert (counter.uses, counter.bytes, counter.is_parameter) == (("norm",), 8, False)


def test_without_inputs_the_cost_model_answers(graph):
    lane = profile(graph, rows=ROWS, batch_rows=ROWS)
    card = profile(graph, rows=ROWS, batch_rows=ROWS, device="H100-SXM5-80GB")
    assert (lane.measured, card.measured, card.times.device) == (False, False, "H100-SXM5-80GB")
    assert lane.nodes["head"].forward_s != card.nodes["head"].forward_s


def test_unmeasured_nodes_are_in_scale_with_the_measured_ones(monkeypatch):
    class Products(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x @ x) @ x).relu() @ x

    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    x = torch.randn(ROWS, 16, 16)
    graph = traced(Products(), x, classes={"matmul_2": NodeClass.FULL})
    same, more = (profile(graph, inputs=[x], rows=ROWS, batch_rows=n * ROWS).nodes["matmul_2"] for n in (1, 4))
    assert same.forward_s == pytest.approx(1.0), "as much work as the products that took a tick each"
    assert more.forward_s > same.forward_s
