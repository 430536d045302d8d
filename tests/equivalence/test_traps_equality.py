"""Traps: models on which a pipeline is easily wrong without a word, or crashes; each is right or refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, assert_same_bits, difference, forward_backward
from tests.models.three_layers import ROWS, WIDTH, Body, Model, assert_equal_steps, numbers
from tests.pairwise import in_turn


@dataclass(frozen=True)
class Case:
    """A model and the batches that it sees one after the other."""

    build: Callable[[], nn.Module]
    batches: Sequence[Batch]
    options: tuple[tuple[str, Any], ...] = ()

    def pair(self, devices: int) -> tuple[nn.Module, Any]:
        """Return the plain model and a pipe over a copy of it."""
        plain = self.build()
        twin = self.build()
        return plain, autosplit(twin, devices=["cpu"] * devices, chunks=3, **dict(self.options))


def case(body: Body, *batches: Sequence[Any], options: dict[str, Any] | None = None, **parts: Any) -> Case:
    """Return a case of a Model; without batches it sees seven rows of numbers."""
    seen = [Batch(tuple(batch)) for batch in batches] or [Batch((numbers(7, WIDTH),))]
    return Case(partial(Model, body, **parts), seen, tuple((options or {}).items()))


def zero_head() -> nn.Linear:
    """Return a linear layer as classifiers often start: all zero."""
    layer = nn.Linear(WIDTH, 3)
    nn.init.zeros_(layer.weight)
    return layer


def capacity(model: Any, value: Tensor) -> Tensor:
    """Route each row to one of three experts that take three rows each, as a mixture with a capacity does."""
    hidden = model.a(value)
    weight, chosen = hidden[:, :3].softmax(-1).max(-1)
    position = (F.one_hot(chosen, 3).cumsum(0) - 1).gather(1, chosen[:, None])[:, 0]
    return model.b(torch.where((position < 3)[:, None], model.c(hidden) * weight[:, None], hidden))


def count_by_assignment(model: Any, value: Tensor) -> Tensor:
    output = model.b(model.a(value) * model.buffer_steps)
    model.buffer_steps = model.buffer_steps + 1
    return output


def reverse_gradient(model: Any, value: Tensor) -> Tensor:
    hidden = model.a(value)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: -0.5 * gradient)
    return model.b(hidden)


def forces(model: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    energy = model.b(torch.tanh(model.a(value))).sum(-1)
    return energy, torch.autograd.grad(energy.sum(), value, create_graph=True)[0]


def attention(model: Any, value: Tensor) -> Tensor:
    return model.b(model.heads(model.a(value), value, value, need_weights=False)[0])


def heads() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def add_one(model: Any, value: Tensor) -> Tensor:
    value += 1
    return model.b(model.a(value))


def shift_indices(model: Any, value: Tensor) -> Tensor:
    values, indices = value.topk(WIDTH, -1)
    before = indices * 1.0
    indices.add_(1)
    hidden = torch.tanh(model.b(values) + indices)
    return model.c(torch.tanh(model.a(hidden))) * before


def shift_state(model: Any, value: Tensor) -> Tensor:
    output, (_, state) = model.layer(value)
    state.add_(1.0)
    return model.b(output) * state.transpose(0, 1)


TOKENS = torch.arange(6 * 17).reshape(6, 17) % 9
PADDING = torch.tensor([[False] * 4, [False, False, True, True], *([[False] * 4] * 5)])
CAUSAL = torch.triu(torch.full((4, 4), float("-inf"), dtype=torch.float64), 1)
SHORT, LONG = torch.full((7,), 4), torch.tensor([1, 2, 3, 1, 1, 5, 2])
CASES = {
    # rows influence each other, and the sample's values hide it
    "a zero gate": case(lambda m, x: m.b(x) + m.gate * m.a(x).flip(0), gate=lambda: nn.Parameter(torch.zeros(1))),
    "a zero head": case(lambda m, x: m.head(torch.tanh(m.a(x) - m.b(x).mean(0))), head=zero_head),
    "a rectified mean": case(
        lambda m, x: m.b(m.a(x) - F.relu(m.c(x).mean(0) - 9)), [numbers(7, 6)], [numbers(7, 6, scale=99.0)]
    ),
    "a capacity": case(capacity, [numbers(16, 6)]),
    "the longest length": case(
        lambda m, x, n: m.b(m.a(x)) * (torch.arange(6) < n.max()), [numbers(7, 6), SHORT], [numbers(7, 6), LONG]
    ),
    "any row masked": case(
        lambda m, x, k: m.b(m.a(x)) * torch.where(k.any(), 1.0, 2.0),
        [numbers(7, 6), torch.zeros(7, 3, dtype=torch.bool)],
        [numbers(7, 6), torch.eye(7, 3).bool()],
    ),
    "only in training": case(lambda m, x: m.b(m.a(x) + (m.a(x).flip(0) if m.training else 0))),
    "noise after a mean": case(lambda m, x: m.b(F.dropout(m.a(x) - m.c(x).mean(0), 1e-17, True))),
    "tokens of length 17": case(lambda m, x: m.b(m.e(x).flip(0)), [TOKENS[:1]], [TOKENS], e=lambda: nn.Embedding(9, 6)),
    "a token per row": case(
        lambda m, x: m.b(m.e(x).flip(0)),
        [torch.zeros(1, dtype=torch.long)],
        [torch.arange(6)],
        e=lambda: nn.Embedding(9, 6),
    ),
    # rows influence each other in the backward only
    "gradients by frequency": case(
        lambda m, x: m.b(m.e(x)), [TOKENS], e=lambda: nn.Embedding(9, 6, scale_grad_by_freq=True)
    ),
    # a source that depends on the number of rows only
    "rows in reverse": case(lambda m, x: m.b(m.a(x)[torch.arange(x.shape[0] - 1, -1, -1)])),
    # Python code that depends on the number of rows
    "at most 8": case(lambda m, x: m.b(m.a(x) / min(8, x.shape[0])), [numbers(12, 6)]),
    "more than 8": case(lambda m, x: m.b(m.a(x) * (2 if x.shape[0] > 8 else 1)), [numbers(12, 6)]),
    "a square": case(lambda m, x: m.b(m.a(x) + x.new_ones(len(x) ** 2).sum() * 1e-3), [numbers(8, 6)], [numbers(3, 6)]),
    "odd numbers": case(
        lambda m, x: m.b(F.gelu(m.a(x)) if len(x) % 2 else torch.tanh(m.a(x))), [numbers(8, 6)], [numbers(3, 6)]
    ),
    "one row": case(lambda m, x: m.b(m.a(x) * (2 if len(x) == 1 else 1)), [numbers(5, 6)], [numbers(1, 6)]),
    # state
    "steps": case(count_by_assignment, *[[numbers(7, 6)]] * 2, buffer_steps=lambda: torch.ones(())),
    "a tensor hook": case(reverse_gradient),
    "an expanded buffer": case(
        lambda m, x: m.a(x) * m.buffer_k, buffer_k=lambda: torch.ones(1, dtype=torch.float64).expand(6)
    ),
    # crashes
    "a cell state in place": case(
        shift_state, [numbers(7, 4, 6)], layer=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)
    ),
    "conjugate": case(lambda m, x: m.b((lambda z: (z * z.conj()).real)(torch.fft.fft(m.a(x))))),
    "forces": case(forces),
    "attention": case(attention, [numbers(7, 4, 6)], heads=heads),
    "padding mask": case(lambda m, x, k: m.a(m.e(x, src_key_padding_mask=k)), [numbers(7, 4, 6), PADDING], e=encoder),
    "causal mask": case(
        lambda m, x, k: m.a(m.e(x, mask=k)),
        [numbers(7, 4, 6), CAUSAL],
        e=encoder,
        options={"batch_dims": (0, None)},
    ),
    "time-major view": case(
        lambda m, x: m.b(m.a(x.view(-1, 6)).view(x.shape)), [numbers(4, 7, 6)], options={"batch_dims": 1}
    ),
    "an input in place": case(add_one, [numbers(7, 6, gradient=False)]),
    "independent of the batch": case(lambda m, x: m.a(m.w), w=lambda: nn.Parameter(torch.ones(4, 6))),
}


OWN_PYTHON = {
    "at most 8": "at 3, 4, 12 rows it has the numbers",
    "more than 8": "at 3, 4, 12 rows it has the numbers",
    "a square": "not affine in the batch",
    "odd numbers": "4 rows than at 3.*gelu.*tanh",
    "one row": "1 rows than at 3 and 4",
    "forces": "calls grad",
    "a tensor hook": "calls register_hook",
    "independent of the batch": "nothing to pipeline",
}
"""What no graph can follow, at the last batch at least, and why."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:2 devices were given")
@in_turn(share=(0, 2), name=list(CASES))
def test_call_equals_the_plain_model(name: str) -> None:
    plain, pipe = CASES[name].pair(devices=2)
    for batch in CASES[name].batches:
        # equal copies, because a model may change its input
        assert_equal_runs(forward_backward(pipe, batch.fresh()), forward_backward(plain, batch.fresh()))
    assert ("module_tree" in pipe.code) == (name in OWN_PYTHON)
    if pipe.plan.rung == "module tree":
        assert any(re.search(OWN_PYTHON[name], note) for note in pipe.plan.notes), pipe.plan.notes


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
def test_the_second_part_of_a_result_changes_in_place_after_a_use(devices: int) -> None:
    plain, pipe = case(shift_indices).pair(devices)
    assert_equal_runs(forward_backward(pipe, ROWS), forward_backward(plain, ROWS))


class Tied(nn.Module):
    """An embedding with a hook whose weight is the head's too, or a GRU whose weight is used again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layer: nn.Module = nn.Embedding(9, WIDTH) if kind == "hook" else nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "hook":
            self.layer.register_forward_hook(lambda *_: None)
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        if self.kind == "hook":
            return F.linear(torch.tanh(self.inner(self.layer(value))), self.layer.weight)
        return F.linear(torch.tanh(self.inner(self.layer(value)[0])), self.layer.weight_ih_l0)


@pytest.mark.filterwarnings("ignore:.* devices were given")
@pytest.mark.parametrize("kind", ["hook", "gru"])
def test_a_leaf_and_another_stage_share_a_weight(kind: str) -> None:
    value = TOKENS[:, :4] if kind == "hook" else numbers(6, 4, WIDTH)
    runs = [forward_backward(Tied(kind), Batch((value,)))]
    runs += [forward_backward(autosplit(Tied(kind), devices=["cpu"] * n, chunks=3), Batch((value,))) for n in (1, 2, 3)]
    assert_equal_runs(runs[1], runs[0])
    for other in runs[2:]:
        assert_same_bits(other, runs[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* devices were given")
def test_complex_values_bit_for_bit() -> None:
    def body(model: Any, value: Tensor) -> Tensor:
        spectrum = torch.fft.fft(model.a(value))
        return model.b(spectrum.real * spectrum.imag) + model.c(spectrum.abs()) + model.b(torch.fft.ifft(spectrum).real)

    pipes = [autosplit(Model(body), devices=["cpu"] * count, chunks=3) for count in (1, 2, 3, 4, 5)]
    first, *others = (forward_backward(pipe, Batch((numbers(7, WIDTH),))) for pipe in pipes)
    for other in others:
        assert_same_bits(other, first)


class ComplexLayer(nn.Module):
    """Adds what a complex matrix makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) * 0.1)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.view_as_real(torch.complex(value, value) @ self.weight).sum(-1)


@pytest.mark.parametrize("first", ["complex", "real"])
def test_train_step_with_complex_parameters(first: str) -> None:
    def build() -> nn.Module:
        layers = [ComplexLayer(), ComplexLayer()]
        return (
            nn.Sequential(*layers) if first == "complex" else nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), *layers)
        )

    torch.manual_seed(0)
    model = build()
    other = copy.deepcopy(model)
    pipe = autosplit(other, devices=["cpu"] * 2, chunks=3)
    assert_equal_steps(model, pipe, ROWS, nn.MSELoss(), numbers(*ROWS.args[0].shape, seed=1, gradient=False))


@pytest.mark.filterwarnings("ignore:.* devices were given")
@pytest.mark.parametrize("name", ["attention", "one part"])
def test_train_step_where_a_cut_meets_a_tuple_of_one_tensor(name: str) -> None:
    if name == "attention":
        build, batch = partial(Model, attention, heads=heads), Batch((numbers(7, 4, WIDTH, gradient=False),))
    else:
        build, batch = partial(Model, lambda m, x: m.b(torch.split(m.a(x), 6, -1)[0])), ROWS
    target = numbers(*batch.args[0].shape, seed=1, gradient=False)
    for count in (2, 3, 4):
        pipe = autosplit(build(), devices=["cpu"] * count, chunks=3)
        assert_equal_steps(build(), pipe, batch, nn.MSELoss(), target)


def padded_mean(output: Tensor, target: Tensor) -> Tensor:
    keep = target >= 0
    return ((output.sum(-1) - target) ** 2 * keep).sum() / keep.sum()


LOSSES = {
    "a partial with ignore_index": (
        partial(F.cross_entropy, ignore_index=2),
        [[0, 1, 3, 4, 0, 1, 3], [0, 2, 2, 2, 4, 0, 1]],
    ),
    "a sum that begins at zero": (lambda o, t: F.relu(o[:, 0] - t).sum(), [[99.0] * 7, [-99.0] * 7]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_whose_first_batch_says_too_little(name: str) -> None:
    loss_fn, targets = LOSSES[name]
    plain = Model(lambda m, x: m.b(torch.tanh(m.a(x))))
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for target in targets:
        assert_equal_steps(plain, pipe, ROWS, loss_fn, torch.tensor(target))


def test_a_loss_that_stops_being_a_mean_is_refused_and_adds_no_gradient() -> None:
    pipe = autosplit(Model(lambda m, x: m.b(torch.tanh(m.a(x)))), devices=["cpu"] * 2, chunks=3)
    pipe.train_step(*ROWS.args, target=torch.ones(7), loss_fn=padded_mean)
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    with pytest.raises(InputError, match=r"mean over rows on the first batch and is none on this one.*loss_reduction"):
        pipe.train_step(*ROWS.args, target=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0]), loss_fn=padded_mean)
    after = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_whose_batch_is_not_its_first_dimension() -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    value, target = (numbers(4, 4, WIDTH, seed=seed, gradient=False) for seed in (0, 1))
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4, batch_dims=1)
    assert_equal_steps(model, pipe, Batch((value,)), nn.MSELoss(), target)


def test_planning_for_another_shape_leaves_an_earlier_graph_alive() -> None:
    plain = Model(lambda m, x: m.a(x) * m.buffer_k, buffer_k=lambda: torch.ones(WIDTH))
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for module in (plain, pipe):
        (module(numbers(7, WIDTH)).sum() + module(numbers(7, 2, WIDTH)).sum()).backward()
    assert difference(pipe.unsplit().a.weight.grad, plain.a.weight.grad) <= 1e-12
