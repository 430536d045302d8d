"""rng="plain": under one seed a pipe draws what its model draws, and leaves torch's generator where the model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit import autosplit
from tests.equivalence.equality import (
    LANES,
    Batch,
    Run,
    assert_equal_runs,
    assert_same_bits,
    forward_backward,
)
from tests.models.named import numbers
from tests.pairwise import in_turn, mostly_slow

WIDTH, LENGTH, SHARE = 8, 3, 0.3
Middle = Callable[[Tensor, bool], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*stage:UserWarning")


class Twice(nn.Module):
    """A random function, used twice between layers."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle = middle

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            value = self.middle(torch.tanh(layer(value)), self.training)
        return self.layers[2](torch.tanh(value))


class Around(nn.Module):
    """A random layer between linear ones; ``turned``: it takes its batch second."""

    def __init__(self, layer: nn.Module, *, turned: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.LazyLinear(WIDTH)
        self.turned = turned

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        value = value.transpose(0, 1) if self.turned else value
        given = (value,) * 3 if isinstance(self.layer, nn.MultiheadAttention) else (value,)
        found = self.layer(*given)
        found = found[0] if isinstance(found, tuple) else found
        return self.last(found.transpose(0, 1) if self.turned else found)


class Reading(nn.Module):
    """An opaque module, since its Python reads a value of its own state; ``region``: under a checkpoint."""

    def __init__(self, *, region: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.region = region

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(self.body, value, use_reentrant=False) if self.region else self.body(value)

    def body(self, value: Tensor) -> Tensor:
        value = self.layer(value)
        if float(self.layer.weight.detach().sum()) > -1e9:
            value = F.dropout(value, SHARE, self.training)
        return torch.tanh(value) + torch.rand(value.shape[0], 1, 1, dtype=value.dtype)


class OwnGenerator(nn.Module):
    """Noise of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.rand(value.shape, generator=self.generator, dtype=value.dtype)


def stochastic_depth(value: Tensor, training: bool) -> Tensor:
    mask = value.new_empty((value.shape[0], 1, 1)).bernoulli_(1 - SHARE).div_(1 - SHARE)
    return value * mask if training else value


def weights(value: Tensor) -> Tensor:
    return value[:, 0].detach().softmax(-1)


FUNCTIONS: dict[str, Middle] = {
    "dropout": lambda x, on: F.dropout(x, SHARE, on),
    "dropout in place": lambda x, on: F.dropout(x * 1, SHARE, on, inplace=True),
    "dropout, batch second": lambda x, on: F.dropout(x.transpose(0, 1), SHARE, on).transpose(0, 1),
    "dropout, contiguous, batch second": lambda x, on: F.dropout(x.mT.permute(1, 0, 2).clone(), SHARE, on).permute(
        1, 2, 0
    ),
    "alpha dropout": lambda x, on: F.alpha_dropout(x, SHARE, on),
    "feature alpha dropout": lambda x, on: F.feature_alpha_dropout(x, SHARE, on),
    "dropout of channels": lambda x, on: F.dropout1d(x, SHARE, on),
    "attention": lambda x, on: x + F.scaled_dot_product_attention(x, x, x, dropout_p=SHARE if on else 0.0),
    "stochastic depth": stochastic_depth,
    "bernoulli": lambda x, on: x * torch.bernoulli(x.detach().sigmoid()) + torch.bernoulli(x.detach(), 0.3),
    "bernoulli_ of a tensor": lambda x, on: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "rand": lambda x, on: x * torch.rand(x.shape[0], 1, 1, dtype=x.dtype) + torch.rand_like(x),
    "randn": lambda x, on: x + torch.randn(LENGTH, x.shape[0], WIDTH, dtype=x.dtype).transpose(0, 1),
    "few numbers": lambda x, on: x * torch.randn(x.shape[0], 1, 1, dtype=x.dtype) + torch.randn_like(x),
    "randint": lambda x, on: x * torch.randint(0, 5, (x.shape[0], LENGTH, 1)) + torch.randint_like(x, 3),
    "normal of tensors": lambda x, on: (
        x + torch.normal(x.detach(), 0.7) + torch.normal(0.3, x.detach().abs())
        + torch.normal(x.detach(), x.exp().detach())
    ),
    "fills": lambda x, on: (
        x + torch.empty_like(x).exponential_(2.0).log1p() + torch.empty_like(x).uniform_(-1, 1)
        + torch.empty_like(x).normal_(1, 2) + torch.empty_like(x).geometric_(0.4).log() + torch.empty_like(x).random_(3)
    ),
    "counts that hang on values": lambda x, on: x + torch.poisson(x.exp()).log1p(),
    "slopes that hang on values": lambda x, on: F.rrelu(x, training=on),
    "native dropout": lambda x, on: torch.native_dropout(x, SHARE, True)[0],
    "gumbel": lambda x, on: x + F.gumbel_softmax(x),
    "multinomial": lambda x, on: (
        x + torch.multinomial(weights(x), 2)[:, :, None].sum(1, keepdim=True)
        + torch.multinomial(weights(x), 1)[:, :, None]
    ),
    "shared noise": lambda x, on: x + torch.randn(WIDTH, dtype=x.dtype),
    "shared permutation": lambda x, on: x[..., torch.randperm(WIDTH)],
    "rows mixed": lambda x, on: F.dropout(x, SHARE, on) + F.dropout(x.mean(0, keepdim=True).expand_as(x), SHARE, on),
}  # fmt: skip
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dropout, then an opaque module": lambda: nn.Sequential(nn.Dropout(SHARE), Reading(), nn.Dropout(SHARE)),
    "a checkpoint": lambda: nn.Sequential(nn.Dropout(SHARE), Reading(region=True)),
    "a generator of its own": lambda: nn.Sequential(nn.Dropout(SHARE), OwnGenerator(), nn.Dropout(SHARE)),
    "attention layer": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=SHARE, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=SHARE, batch_first=True),
}
TURNED: dict[str, Callable[[], nn.Module]] = {
    "attention layer, batch second": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=SHARE),
    "lstm, batch second": lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=SHARE),
}
NAMES = (*FUNCTIONS, *LAYERS, *TURNED)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        if name in FUNCTIONS:
            return Twice(FUNCTIONS[name]).to(dtype)
        turned = name in TURNED
        model = Around((TURNED if turned else LAYERS)[name](), turned=turned).to(dtype)
        model.eval()(torch.zeros(2, LENGTH, WIDTH, dtype=dtype))
        return model.train()


def split(model: nn.Module, **options: Any) -> Any:
    return autosplit(model, **({"devices": ["cpu"] * 2, "chunks": 4} | options))


def seeded(module: nn.Module, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Run, Tensor]:
    """Run forward and backward; return what that left, and what the generator draws next."""
    batch = Batch((numbers(rows, LENGTH, WIDTH, seed=seed, gradient=True).detach().to(dtype).requires_grad_(),))
    torch.manual_seed(seed)
    return forward_backward(module, batch), torch.rand(4)


def assert_equal(pipe: Any, plain: nn.Module, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> None:
    (actual, after), (expected, expected_after) = (seeded(m, rows, seed, dtype) for m in (pipe, plain))
    assert_equal_runs(actual, expected, dtype=dtype)
    assert torch.equal(after, expected_after), "the generator is elsewhere"


@in_turn(share=(0, 2), name=NAMES)
def test_every_random_operation_draws_the_models_numbers(name: str) -> None:
    plain = build(name)
    pipe = split(build(name), recompute="always" if len(name) % 2 else "never", lanes=LANES[len(name) // 2 % 2])
    for rows, seed in ((10, 1), (7, 2), (3, 3)):
        assert_equal(pipe, plain, rows, seed)
    assert pipe.draws_as_model
    assert not any("seeded generators" in note for note in pipe.plan.notes)


@in_turn(context=(torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")), name=("dropout", "attention"))
def test_other_modes_of_torch(context: Callable[[], Any], name: str) -> None:
    dtype, value = torch.float32, numbers(10, LENGTH, WIDTH).float()
    found = []
    for module in (build(name, dtype), split(build(name, dtype))):
        torch.manual_seed(4)
        with context():
            found.append((module(value), torch.rand(4)))
    (plain, after), (actual, actual_after) = found
    torch.testing.assert_close(actual, plain, rtol=0, atol=3e-2 if plain.dtype is torch.bfloat16 else 1e-5)
    assert torch.equal(actual_after, after)


@in_turn(loss_fn=(nn.MSELoss(), lambda output, target: (output - target).abs().mean()), lanes=LANES)
def test_train_step_draws_the_models_numbers_also_behind_a_proof(lanes: str, loss_fn: Any) -> None:
    plain, pipe = build("dropout"), split(build("dropout"), lanes=lanes, recompute="always")
    value, target = numbers(10, LENGTH, WIDTH), numbers(10, LENGTH, WIDTH, seed=1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = loss_fn(plain(value), target)
        expected.backward()
        after = torch.rand(4)
        torch.manual_seed(seed)
        torch.testing.assert_close(pipe.train_step(value, target=target, loss_fn=loss_fn), expected.detach())
        assert torch.equal(torch.rand(4), after)
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)


class Branches(nn.Module):
    """Numbers that hang on values, and others behind them that do not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        counts = torch.poisson(value.detach().exp())
        return counts + self.last(F.dropout(value, SHARE))


def test_what_cannot_wait_for_its_turn_is_drawn_by_counter_and_said() -> None:
    pipe = split(Branches().double())
    runs = [seeded(pipe, 10, 1) for _ in range(2)]
    assert torch.equal(runs[0][0].outputs["/"], runs[1][0].outputs["/"])
    assert not pipe.draws_as_model
    assert any("1 random operations draw per microbatch from seeded generators" in note for note in pipe.plan.notes)


class Mask(nn.Module):
    """The identity, with dropout: what it returns shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(200, dtype=torch.float64))
        self.dropout = nn.Dropout(SHARE)

    def forward(self, value: Tensor) -> Tensor:
        return self.dropout(value * self.gain) * 2


@pytest.mark.parametrize("lanes", LANES)
def test_masks_by_counter_are_dropouts_and_the_same_for_every_cut(lanes: str) -> None:
    batch = Batch((torch.ones(64, 200, dtype=torch.float64, requires_grad=True),))
    pipes = [split(Mask(), devices=["cpu"] * count, chunks=5, rng="counter", lanes=lanes) for count in (1, 2)]
    runs = []
    for pipe in (*pipes, pipes[1]):
        torch.manual_seed(8)
        runs.append(forward_backward(pipe, batch))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    output, gradient = runs[0].outputs["/"].detach(), runs[0].gradients["input 0"]
    assert gradient is not None
    assert torch.equal(gradient != 0, output != 0)
    assert len(torch.unique(output != 0, dim=0)) == len(output), "every row has a mask of its own"
    assert abs((output == 0).double().mean() - SHARE) < 0.02
    kept = output[output != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / (1 - SHARE)), rtol=1e-12, atol=0)
    later, pipe = forward_backward(pipes[0], batch), pipes[0].eval()
    assert not torch.equal(later.outputs["/"], output)
    before = torch.get_rng_state()
    assert not (pipe(*batch.args) == 0).any()
    assert torch.equal(torch.get_rng_state(), before), "eval mode draws nothing"


@pytest.mark.parametrize("name", mostly_slow(["dropout", "attention", "lstm, batch second"], "attention"))
def test_the_counter_gives_the_same_bits_for_every_cut_and_others_than_the_model(name: str) -> None:
    runs = []
    for devices in (1, 3):
        pipe = split(build(name), devices=["cpu"] * devices, rng="counter")
        runs += [seeded(pipe, 10, 1)[0], seeded(pipe, 10, 1)[0]]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    assert not torch.equal(runs[0].outputs["/"], seeded(build(name), 10, 1)[0].outputs["/"])


class Gammas(nn.Module):
    """Draws as many numbers for an element as its value asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch._standard_gamma((self.first(value) - 1).exp())


@pytest.mark.parametrize("chunks", [1, 3])
def test_draws_of_a_number_that_hangs_on_values_are_the_models(chunks: int) -> None:
    plain, value = Gammas().double(), torch.randn(5, WIDTH, dtype=torch.float64)
    pipe = split(copy.deepcopy(plain), chunks=chunks)
    drawn = []
    for module in (plain, pipe):
        torch.manual_seed(1)
        drawn.append((module(value), torch.get_rng_state()))
    torch.testing.assert_close(drawn[1], drawn[0])
