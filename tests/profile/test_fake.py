"""The fake pass: FLOPs by formula, saved storages as autograd keeps them, transients, nodes that need care."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.profile.node_costs.combine import profile
from autosplit.profile.node_costs.fake import fake_costs
from autosplit.profile.types import NodeProfile
from autosplit.trace.graph import NodeClass, TracedGraph
from tests.profile.graphs import Leaf, traced

ROWS = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        chunks = self.qkv(self.norm(x)).chunk(3, 2)
        query, key, value = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in (chunks[0], chunks[1], chunks[2]))
        return F.scaled_dot_product_attention(query, key, value).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x)).flatten(1).add_(1.0).sigmoid()


CONVOLUTIONAL = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten()
)
PERCEPTRON = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.GELU(), nn.Softmax(-1), nn.Linear(5, 2))


def recording(name: str) -> tuple[nn.Module, TracedGraph, Tensor]:
    if name == "perceptron":
        model, x, mutated = PERCEPTRON, torch.randn(ROWS, 4), ()
    elif name == "attention":
        model, x, mutated = Attention(), torch.randn(ROWS, 5, 8), ()
    elif name == "recurrent":
        model, x, mutated = Recurrent(), torch.randn(ROWS, 5, 4), ()
    elif name == "in place":
        model, x, mutated = InPlace(), torch.randn(ROWS, 3, 6, 6), ("conv", "relu", "flatten", "add_")
    else:
        model, x, mutated = CONVOLUTIONAL, torch.randn(ROWS, 3, 6, 6), ()
    return model, traced(model, x, mutated=mutated), x


def costs_of(graph: TracedGraph) -> dict[str, NodeProfile]:
    costs = fake_costs(graph, rows=ROWS, batch_rows=2 * ROWS)
    assert all(node.estimated is None for node in costs.values())
    return costs


def union(maps: list[dict[int, int]]) -> int:
    return sum({number: size for part in maps for number, size in part.items()}.values())


def really_saved(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of the storages that autograd holds after a real forward; state and inputs left out."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        output = model(x)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del output
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_flops_of_a_linear_chain():
    nodes = costs_of(recording("perceptron")[1])
    first, second, last = nodes["_0"], nodes["_2"], nodes["_5"]
    assert first.forward_flops == 2 * ROWS * 4 * 8
    assert first.backward_flops == first.forward_flops, "the model's input needs no gradient"
    assert (second.forward_flops, second.backward_flops) == (2 * ROWS * 8 * 5, 4 * ROWS * 8 * 5)
    assert (last.forward_flops, last.backward_flops) == (2 * ROWS * 5 * 2, 4 * ROWS * 5 * 2)


def test_an_input_that_requires_grad_costs_its_gradient():
    model, graph, _ = recording("perceptron")
    first = fake_costs(graph, rows=ROWS, batch_rows=ROWS, input_grads=[True])["_0"]
    assert first.backward_flops == 2 * first.forward_flops
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_have_no_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)).requires_grad_(False)
    model[2].weight.requires_grad_(True)
    nodes = costs_of(traced(model, torch.randn(ROWS, 4)))
    assert [node.backward_flops for node in nodes.values()] == [0, 0, 2 * ROWS * 8 * 5]
    assert [union([node.saved]) for node in nodes.values()] == [0, 0, ROWS * 8 * 4]


def test_equal_storages_have_equal_ids():
    nodes = costs_of(recording("perceptron")[1])
    relu, second = nodes["_1"], nodes["_2"]
    assert nodes["_0"].saved == {}, "input and weights are the model's own"
    assert relu.saved == relu.outputs == second.saved
    assert list(second.saved.values()) == [ROWS * 8 * 4]
    assert not set(second.outputs) & set(relu.outputs)


@pytest.mark.parametrize("name", ["perceptron", "attention", "recurrent", "in place", "convolutional"])
def test_saved_bytes_are_what_autograd_keeps(name):
    model, graph, x = recording(name)
    saved = union([dict(node.saved) for node in costs_of(graph).values()])
    assert saved == really_saved(model, x) > 0


def test_views_share_the_storage_of_their_base():
    nodes = costs_of(recording("attention")[1])
    qkv, chunk, view = nodes["qkv"], nodes["chunk"], nodes["unflatten"]
    assert qkv.outputs == chunk.outputs == view.outputs == {next(iter(qkv.outputs)): ROWS * 5 * 24 * 4}
    assert (chunk.output_bytes, view.output_bytes) == (ROWS * 5 * 24 * 4, ROWS * 5 * 8 * 4)


def test_in_place_nodes_keep_the_storage():
    nodes = costs_of(recording("in place")[1])
    assert nodes["conv"].outputs == nodes["relu"].outputs == nodes["add_"].outputs == nodes["relu"].saved
    assert nodes["relu"].forward_transient_bytes == 0


def test_transients_count_cotangents_and_new_gradients():
    nodes = costs_of(recording("perceptron")[1])
    assert nodes["_0"].forward_transient_bytes == 0
    cotangent, gradient, parameters = ROWS * 5 * 4, ROWS * 8 * 4, (8 * 5 + 5) * 4
    assert nodes["_2"].backward_transient_bytes == cotangent + gradient + parameters


def test_a_transient_that_is_gone_after_the_forward():
    class Temporary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.cosine_similarity(x, x.flip(1), dim=1)

    with torch.no_grad():
        node = costs_of(traced(Temporary(), torch.randn(ROWS, 100)))["cosine_similarity"]
    assert node.saved == {}
    assert node.forward_transient_bytes >= 2 * ROWS * 100 * 4


def test_full_nodes_are_profiled_on_the_batch():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.linear(x)
            return (rows @ rows.t()).exp()

    full = dict.fromkeys(["matmul", "exp"], NodeClass.FULL)
    nodes = fake_costs(traced(Loss(), torch.randn(ROWS, 4), classes=full), rows=2, batch_rows=10)
    assert nodes["linear"].forward_flops == 2 * 2 * 4 * 6
    assert nodes["matmul"].forward_flops == 2 * 10 * 10 * 6
    assert nodes["matmul"].saved == {next(iter(nodes["linear"].outputs)): 10 * 6 * 4}, "the id of the micro pass"
    assert nodes["exp"].output_bytes == 10 * 10 * 4


def test_a_node_whose_backward_fails_is_tagged():
    class OneWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x @ weight

        @staticmethod
        def backward(ctx, cotangent):
            raise RuntimeError("there is no way back")

    graph = traced(nn.Linear(4, 5, bias=False), torch.randn(ROWS, 4))
    linear = next(node for node in graph.graph.nodes if node.op == "call_function")
    linear.target = lambda x, weight, _bias: OneWay.apply(x, weight.t())
    costs = fake_costs(graph, rows=ROWS, batch_rows=ROWS)
    (node,) = costs.values()
    assert node.forward_flops == 2 * ROWS * 4 * 5
    assert node.backward_flops == 2 * node.forward_flops
    assert "there is no way back" in node.estimated


def test_a_node_that_reads_values_is_estimated_and_tagged():
    class Routed(Leaf):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.expert(x) if x.sum().item() < 1e9 else self.expert(-x)

    model = nn.Sequential(nn.Linear(4, 6), Routed(), nn.ReLU())
    costs = fake_costs(traced(model, torch.randn(ROWS, 4)), rows=ROWS, batch_rows=ROWS)
    assert [name for name, node in costs.items() if node.estimated] == ["_1"]
    assert "fake tensors" in costs["_1"].estimated
    routed = costs["_1"]
    assert routed.forward_flops == 2 * (6 * 5 + 5) * ROWS
    assert routed.saved == costs["_0"].outputs
    assert costs["_2"].output_bytes == ROWS * 5 * 4


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
