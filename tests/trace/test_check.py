"""A recording is compared with its model before it is accepted, and the model does not notice."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.compare import digest, distance
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.trace.check import check_recording
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.ladder import Trace, trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, numbers
from tests.pairwise import mostly_slow

VALUE = numbers(7, WIDTH, gradient=False)


def check(model: nn.Module, recording: Trace, **options: Any) -> str | None:
    return check_recording(model, recording.graph, recording.inputs, **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_and_batch_norm_agree_in_every_dtype(training: bool, dtype: torch.dtype) -> None:
    layers = [nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.1)]
    model = nn.Sequential(*layers).to(dtype).train(training)
    recording = trace(model, Sample(torch.randn(7, 6, dtype=dtype)))
    assert check(model, recording) is None
    with torch.no_grad():
        assert check(model, recording) is None


class Stateful(nn.Module):
    """Everything that a check could leave behind: statistics, a counter, a cache, a clipped table, dropout, LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, max_norm=0.1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.scale = torch.ones(1, requires_grad=True)
        self.rest = [torch.ones(1)]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.drop(self.table(tokens)) * self.scale + self.rest[0])
        hidden = self.norm(hidden[:, -1])
        self.ema = 0.9 * self.ema + 0.1 * hidden.detach().mean(0)
        return hidden


def everything(model: nn.Module) -> dict[str, Any]:
    """Return all that belongs to a model, down to the identity and the version of its tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        entries = module.__dict__ | module._parameters | module._buffers
        found |= {f"{path}.{key}": value for key, value in entries.items() if not isinstance(value, (dict, list))}
        found |= {f"{path}.{key}": list(value) for key, value in entries.items() if isinstance(value, list)}
    return found


def test_the_model_does_not_notice() -> None:
    model = Stateful()
    tokens = torch.arange(28).reshape(7, 4) % 9
    model(tokens).sum().backward()
    recording = trace(model, Sample(tokens))
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda leaf, name=name: calls.append(name))
    tensors = [*model.parameters(), *model.buffers(), model.scale, *model.rest]
    before, contents = everything(model), [t.detach().clone() for t in tensors]
    versions, gradients = [t._version for t in tensors], [t.grad for t in tensors]
    states = [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
    assert check(model, recording) is None
    after = everything(model)
    assert list(after) == list(before)
    for key, value in before.items():
        same = isinstance(value, list) and all(a is b for a, b in zip(after[key], value, strict=True))
        assert same or after[key] is value, key
    assert all(torch.equal(t, content) for t, content in zip(tensors, contents, strict=True))
    assert [t._version for t in tensors] == versions
    assert all(t.grad is gradient for t, gradient in zip(tensors, gradients, strict=True))
    assert [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())] == states
    assert calls == []


def test_gradients_of_all_parameters_never_live_at_once() -> None:
    layers = [layer for _ in range(16) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers)
    recording = trace(model, Sample(torch.randn(4, 128)))
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    with Ledger() as ledger:
        for parameter in model.parameters():
            ledger.storage(parameter)
        ledger.open()
        assert check(model, recording) is None
    assert ledger.peak_bytes - parameter_bytes < parameter_bytes / 2


# -- recordings that are wrong -------------------------------------------------------------------------------------


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a counter in Python": (lambda m: setattr(m, "_body", count), "output 0 differs"),
    "another factor": (lambda m: setattr(m, "_body", lambda m, x: m.b(m.a(x)) * 1.001), "output 0 differs"),
    "a lost gradient": (
        lambda m: setattr(m, "_body", lambda m, x: m.b(m.a(x)) + m.c(x) - m.c(x).detach()),
        "the gradient of c.",
    ),
    "one output less": (lambda m: setattr(m, "_body", lambda m, x: [m.b(m.a(x)), x]), "output 1 is missing"),
    "a number instead": (lambda m: setattr(m, "_body", lambda m, x: 3), "output 0 is"),
    "an input changed in place": (lambda m: setattr(m, "_body", change_input), "input"),
    "a rare choice": (lambda m: setattr(m, "_body", rare), "Python's random state"),
    "other draws": (lambda m: setattr(m, "_body", draw_unused), "torch's random state"),
    "another dtype": (lambda m: setattr(m, "_body", lambda m, x: m.b(m.a(x)).float()), "is float64"),
}


def count(model: Any, value: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return model.b(model.a(value)) * min(model.calls, 2)


def change_input(model: Any, value: Tensor) -> Tensor:
    result = model.b(model.a(value))
    with torch.no_grad():
        value.mul_(2)
    return result


def rare(model: Any, value: Tensor) -> Tensor:
    return model.b(model.a(value)) * (2 if random.random() < 1e-6 else 1)


def draw_unused(model: Any, value: Tensor) -> Tensor:
    torch.rand(())
    return model.b(model.a(value))


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_graph_lacks_is_found(name: str) -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    recording = trace(model, Sample(VALUE))
    change, message = CHANGES[name]
    change(model)
    found = check(model, recording)
    assert found is not None
    assert message in found


def test_answers_to_value_reads_reach_the_model() -> None:
    model = Model(lambda m, x: m.b(m.a(x)), answer=False)
    recording = trace(model, Sample(VALUE))
    model._body = lambda m, x: m.b(m.a(x)) if m.answer or bool(x.sum() > 1e9) else x
    asked = []

    @contextlib.contextmanager
    def answers(leaves: list[Any]) -> Iterator[None]:
        asked.append([leaf.shape[0] for leaf in leaves])
        model.answer = True
        yield
        model.answer = False

    assert check(model, recording, answers=answers) is None
    assert asked == [[2], [2]]
    assert "output 0" in (check(model, recording) or "")


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (drawn * 100).to(dtype) if dtype != torch.bool else drawn > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (), (7,), (1024,), (3, 1025), (1100, 1000)])
def test_equal_tensors_are_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(math.prod(shape), dtype).reshape(shape)
    other = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()
    assert digest(tensor).kind == digest(other).kind == (shape, dtype)
    assert distance(digest(tensor), digest(other)) == 0.0


@given(st.data(), st.sampled_from(DTYPES))
def test_one_element_that_differs_is_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    count = data.draw(st.integers(1, 3000))
    place = data.draw(st.integers(0, count - 1))
    tensor = values(count, dtype)
    other = tensor.clone()
    other[place] = ~other[place] if dtype == torch.bool else other[place] + 1 + other[place].abs()
    assert distance(digest(other), digest(tensor)) > 0.0


@given(st.data())
def test_two_elements_that_change_places_are_seen(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 3000))
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    tensor = torch.arange(count, dtype=torch.float32)
    other = tensor.clone()
    other[first], other[second] = tensor[second], tensor[first]
    assert distance(digest(other), digest(tensor)) > 0.0


@pytest.mark.parametrize("size", [1e-4, 1e-7, 1e-10])
def test_the_distance_is_a_share_of_the_size(size: float) -> None:
    tensor = values(5000, torch.float64)
    noise = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apart = distance(digest(tensor * (1 + size * noise)), digest(tensor))
    assert size / 10 < apart < size * 10


def test_what_is_not_finite() -> None:
    tensor = values(3000, torch.float32)
    other = tensor.clone()
    other[17] = math.nan
    assert distance(digest(other), digest(tensor)) == math.inf
    assert distance(digest(other), digest(other.clone())) == 0.0
    moved = tensor.clone()
    moved[2900] = math.inf
    assert distance(digest(other), digest(moved)) == math.inf


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 gives one although they are asked for
def test_other_kinds_of_tensors() -> None:
    indices, entries = torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, entries, (3, 2), check_invariants=True)
    moved = torch.sparse_coo_tensor(indices.flip(1), entries, (3, 2), check_invariants=True)
    assert distance(digest(sparse), digest(sparse.clone())) == 0.0
    assert distance(digest(sparse), digest(moved)) > 0.0
    assert digest(torch.empty(3, device="meta")).numbers is None
    assert digest(torch.ones(2), True).kind != digest(torch.ones(2), False).kind


# pytest rewrites ``assert``, so these raise themselves
def draws(net: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    normal = distributions.Normal(net.a(x), F.softplus(net.b(x)) + 0.1)
    drawn = normal.rsample()
    return drawn, normal.log_prob(drawn)


def chooses(net: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    choice = distributions.Categorical(logits=net.b(torch.relu(net.a(x))))
    return choice.log_prob(choice.sample()), choice.entropy()


def asserts(net: Model, x: Tensor) -> Tensor:
    h = net.a(x)
    if h.max() >= 50:
        raise AssertionError("too large")
    if not torch.isfinite(h).all():
        raise FloatingPointError(f"not finite: {h.shape}")
    return net.b(torch.relu(h))


def asserts_a_mean(net: Model, x: Tensor) -> Tensor:
    h = net.a(x)
    if not x.mean() + 0 * h.mean() < 1:
        raise ValueError("a large mean")
    return net.b(torch.relu(h))


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def node_classes(net: Model) -> dict[str, NodeClass]:
    found = trace(net, Sample(batch(7)))
    assert not found.whole
    infos = [node.meta[INFO] for node in found.graph.graph.nodes if INFO in node.meta]
    return {info.name: info.node_class for info in infos}


@pytest.mark.parametrize("body", mostly_slow([draws, chooses, asserts, asserts_a_mean], draws, asserts_a_mean))
def test_equal_to_the_plain_model_in_all_microbatches(body: Callable[..., Any]) -> None:
    plain = Model(body)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for number, rows in enumerate((7, 5)):
        torch.manual_seed(number)
        expected = forward_backward(plain, Batch((batch(rows, number),)))
        torch.manual_seed(number)
        assert_equal_runs(forward_backward(pipe, Batch((batch(rows, number),))), expected)
    assert pipe.plan.rung == "recorded"


@pytest.mark.parametrize("body", [draws, asserts])
def test_checks_of_all_rows_run_by_microbatch(body: Callable[..., Any]) -> None:
    assert NodeClass.FULL not in node_classes(Model(body)).values()


def test_a_check_of_a_mean_sees_the_whole_batch_and_all_else_runs_by_microbatch() -> None:
    found = node_classes(Model(asserts_a_mean))
    assert [found[name] for name in ("a#0", "#0/relu_0", "b#0")] == [NodeClass.MICRO] * 3
    assert found["#0/bool_0"] is NodeClass.FULL


def test_one_row_that_breaks_a_check_of_the_mean_does_not_raise() -> None:
    net = Model(asserts_a_mean)
    pipe = autosplit(net, devices=["cpu"] * 2, chunks=3)
    x = batch(6)
    x[:2] += 2
    assert x.mean() < 1
    torch.testing.assert_close(pipe(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_a_check_that_fails_raises_what_the_model_raises(value: float) -> None:
    net = Model(asserts)
    pipe = autosplit(net, devices=["cpu"] * 2, chunks=3)
    pipe(batch(6))
    x = batch(6)
    x[4] = value
    raised = []
    for module in (net, pipe):
        with pytest.raises((AssertionError, FloatingPointError)) as error:
            module(x)
        raised.append((error.type, str(error.value)))
    assert raised[0][0] is raised[1][0]
    assert raised[0][1] == "too large" if value == 1e6 else raised[1][1].startswith("a check of the model's values")
    assert raised[0][0] is not AssertionError or raised[0] == raised[1]


def test_arguments_of_a_distribution_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile turns the checks off for the rest of the process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    pipe = autosplit(Model(draws), devices=["cpu"] * 2, chunks=3)
    pipe(batch(6))
    with pytest.raises(ValueError, match="check of the model's values failed"):
        pipe(torch.full((6, WIDTH), float("nan"), dtype=torch.float64))
