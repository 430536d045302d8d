"""Measuring: every node gets a time, the model is left as it was, errors name their node."""

from __future__ import annotations

import copy
import random
import time
from types import MethodType
from typing import Any, ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import InputError, ProfileError
from autosplit.profile.measured import measure
from autosplit.profile.node_costs.shadow import shadow
from autosplit.trace.graph import NodeClass
from tests.profile.graphs import Leaf, traced

ROWS = 4


class Trap(nn.Module):
    """Everything that a forward leaves behind: statistics, counters, draws, parameter hooks, values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(8, 3, batch_first=True)
        self.fired: list[Tensor] = []
        self.linear.weight.register_hook(self.fired.append)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.relu(self.norm(self.linear(x.mul_(1.0)))))
        return self.lstm(hidden.unsqueeze(1))[0].flatten(1)


def state_of(model: nn.Module) -> dict[str, Any]:
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    training = {name: module.training for name, module in model.named_modules()}
    identities = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return {"attributes": attributes, "training": training, "identities": identities}


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def trap() -> tuple[Trap, Tensor]:
    model, x = Trap(), torch.randn(ROWS, 6)
    model.norm.eval()
    model.linear.bias.requires_grad_(False)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    return model, x


def test_every_node_has_a_time():
    model, x = trap()
    graph = traced(model, x, mutated=("x", "norm"))
    times = measure(graph, inputs=[x], rows=ROWS)
    assert times.device == "cpu"
    assert set(times.nodes) == {info.name for _, info in graph.compute_nodes()}
    assert all(node.forward_s > 0 for node in times.nodes.values())
    assert times.nodes["linear"].backward_s > 0
    assert times.nodes["mul_"].backward_s == 0, "the input needs no gradient"


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model, x = trap()
    model.norm.train()
    graph = traced(model, x, mutated=("x", "norm"))
    if fails:
        next(node for node in graph.graph.nodes if node.target == "flatten").args += (7,)
    expected, inputs = copy.deepcopy(model.state_dict()), x.clone()
    before, draws, threads = state_of(model), random_states(), torch.get_num_threads()
    if fails:
        with pytest.raises(ProfileError):
            measure(graph, inputs=[x], rows=ROWS)
    else:
        measure(graph, inputs=[x], rows=ROWS)
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(x, inputs)
    assert state_of(model) == before
    assert random_states() == draws
    assert torch.get_num_threads() == threads
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 6))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "linear.weight")
    assert model.fired == []


def test_an_error_names_the_node_and_keeps_its_cause():
    graph = traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(ROWS, 4))
    graph.root[1] = nn.Linear(5, 4)
    with pytest.raises(ProfileError, match=r"node '_1' failed while it was measured: RuntimeError: .*shape") as caught:
        measure(graph, inputs=[torch.randn(ROWS, 4)], rows=ROWS)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_inputs_must_have_the_rows():
    graph = traced(nn.Linear(4, 4), torch.randn(ROWS, 4))
    with pytest.raises(InputError, match=r"input/\w+ has shape \(3, 4\), the recording at 4 rows has \(4, 4\)"):
        measure(graph, inputs=[torch.randn(3, 4)], rows=4)
    with pytest.raises(InputError, match="has 1 input tensors, got 2"):
        measure(graph, inputs=[torch.randn(4, 4)] * 2, rows=4)


def test_full_nodes_and_their_users_are_left_out():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.linear(x), dim=0).exp()

    graph = traced(Loss(), torch.randn(ROWS, 4), classes={"log_softmax": NodeClass.FULL})
    assert set(measure(graph, inputs=[torch.randn(ROWS, 4)], rows=ROWS).nodes) == {"linear"}


class Clock:
    """Time that passes only in nodes that say so."""

    now_s = 0.0
    runs: ClassVar[list[float]] = []


class Wait(torch.autograd.Function):
    """Known times: the backward takes twice as long as the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        Clock.now_s += seconds
        Clock.runs.append(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        Clock.now_s += 2 * ctx.seconds
        return cotangent, None


class Waiter(Leaf):
    """A leaf that takes known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(x * self.scale, self.seconds)


def test_times_are_right_and_long_nodes_run_less_often(monkeypatch):
    monkeypatch.setattr(time, "thread_time", lambda: Clock.now_s)
    seconds = {"_0": 0.004, "_1": 0.02, "_2": 4.0}
    graph = traced(nn.Sequential(*map(Waiter, seconds.values())), torch.randn(ROWS, 4))
    Clock.runs.clear()
    times = measure(graph, inputs=[torch.randn(ROWS, 4)], rows=ROWS, repeats=3).nodes
    for name, expected_s in seconds.items():
        assert times[name].forward_s == pytest.approx(expected_s)
        assert times[name].backward_s == pytest.approx(2 * expected_s)
    assert Clock.runs.count(0.004) == 4, "a warm-up and three"
    assert Clock.runs.count(0.02) == 2, "60 ms: a warm-up and one"
    assert Clock.runs.count(4.0) == 2


def test_equal_nodes_share_their_samples():
    blocks = [nn.Linear(16, 16) for _ in range(6)]
    graph = traced(nn.Sequential(*blocks, nn.Linear(16, 4)), torch.randn(ROWS, 16))
    times = measure(graph, inputs=[torch.randn(ROWS, 16)], rows=ROWS).nodes
    assert len({times[f"_{index}"] for index in range(1, 6)}) == 1
    assert times["_0"] != times["_1"], "the first one has no input gradient"
    assert times["_6"] != times["_1"], "another shape"


def test_layers_with_other_settings_are_measured_apart():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few = nn.MultiheadAttention(8, 1)
            self.many = nn.MultiheadAttention(8, 4)
            self.again = nn.MultiheadAttention(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.few(x, x, x)[0].detach()
            x = self.many(x, x, x)[0].detach()
            return self.again(x, x, x)[0]

    x = torch.randn(ROWS, 5, 8)
    times = measure(traced(Two(), x), inputs=[x], rows=ROWS).nodes
    assert times["few"] != times["many"]
    assert times["again"] == times["many"]


@pytest.mark.cuda
def test_a_model_on_cuda_is_measured_there():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda(), torch.randn(ROWS, 64, device="cuda")
    times = measure(traced(model, x), inputs=[x], rows=ROWS)
    assert times.device.startswith("cuda")
    assert all(node.forward_s > 0 and node.backward_s > 0 for node in times.nodes.values())
    assert times.nodes["_0"].forward_peak_bytes >= ROWS * 64 * 4
    assert times.nodes["_0"].backward_peak_bytes > times.nodes["_0"].forward_peak_bytes


def test_a_caller_without_gradients_gets_the_times_of_training():
    graph = traced(nn.Linear(4, 4), torch.randn(ROWS, 4))
    with torch.inference_mode():
        times = measure(graph, inputs=[torch.randn(ROWS, 4)], rows=ROWS).nodes
    assert all(node.backward_s > 0 for node in times.values())


def twin_of(module: nn.Module) -> nn.Module:
    return shadow(module, replace=lambda t: nn.Parameter(t.detach() + 1, requires_grad=False)).module


def test_tensors_are_replaced_once_per_object():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    twin = twin_of(model)
    assert twin[0].weight is twin[1].weight
    assert list(twin.state_dict()) == list(model.state_dict())
    assert all(torch.equal(t, model.state_dict()[name] + 1) for name, t in twin.state_dict().items())


def test_what_runs_on_the_twin_stays_there():
    model = nn.BatchNorm1d(3)
    model.seen, model.count = [], 0
    twin = shadow(model, replace=lambda t: nn.Parameter(t.detach().clone(), requires_grad=False)).module
    twin(torch.randn(4, 3))
    twin.seen.append(1)
    twin.count += 1
    twin.extra = nn.Linear(1, 1)
    assert (model.seen, model.count) == ([], 0)
    assert not hasattr(model, "extra")
    assert model.num_batches_tracked == 0
    assert twin.num_batches_tracked == 1


def test_tensors_in_attributes_and_bound_methods_are_followed():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.tables = {"scales": [torch.zeros(2), torch.zeros(2)]}

        def patched(self, x: Tensor) -> Tensor:
            return x + self.weight + self.tables["scales"][1]

    model = Model()
    model.forward = MethodType(Model.patched, model)
    assert model(torch.zeros(2)).tolist() == [0, 0]
    assert twin_of(model)(torch.zeros(2)).tolist() == [2, 2]
