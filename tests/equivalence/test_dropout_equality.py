"""Random layers: the same seed gives the same bits for every cut, and the draws are what dropout promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import (
    LANES,
    Batch,
    Run,
    assert_equal_runs,
    assert_same_bits,
    forward_backward,
    train_step,
)
from tests.equivalence.named_models import WIDTH, flat, numbers, sequence

SHARE = 0.3


class Dropouts(nn.Module):
    """Dropout as a layer and as a function, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(SHARE)

    def forward(self, value: Tensor) -> Tensor:
        value = self.dropout(torch.tanh(self.layers[0](value)))
        value = F.dropout(torch.tanh(self.layers[1](value)), SHARE, self.training)
        return self.layers[3](self.dropout(self.layers[2](value)))


class AttentionDropout(nn.Module):
    """Dropout inside scaled-dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.first(value))
        share = SHARE if self.training else 0.0
        return self.last(value + F.scaled_dot_product_attention(value, value, value, dropout_p=share))


class RecurrentDropout(nn.Module):
    """Dropout between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=SHARE), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.lstm(value)[0])


class Mask(nn.Module):
    """The identity, with dropout: what it returns shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(200, dtype=torch.float64))
        self.dropout = nn.Dropout(SHARE)

    def forward(self, value: Tensor) -> Tensor:
        return self.dropout(value * self.gain) * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "dropout": (Dropouts, flat),
    "attention": (AttentionDropout, sequence),
    "lstm": (RecurrentDropout, sequence),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return MODELS[name][0]().double()


def seeded(seed: int, module: nn.Module, batch: Batch) -> Run:
    torch.manual_seed(seed)
    return forward_backward(module, batch)


def masked(*, rows: int = 64, chunks: int = 5, lanes: str = "auto") -> Run:
    pipe = autosplit(Mask(), devices=["cpu"] * 2, chunks=chunks, lanes=lanes)
    torch.manual_seed(8)
    return forward_backward(pipe, Batch((torch.ones(rows, 200, dtype=torch.float64, requires_grad=True),)))


pytestmark = pytest.mark.filterwarnings("ignore:.*stage:UserWarning")


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", list(MODELS))
def test_same_seed_same_bits_for_every_device_count_and_run(name: str, lanes: str) -> None:
    batch = MODELS[name][1](10)
    runs = []
    for devices in (1, 2, 4):
        pipe = autosplit(build(name), devices=["cpu"] * devices, chunks=4, lanes=lanes)
        pipe(*batch.args)  # the call that plans
        runs += [seeded(5, pipe, batch), seeded(5, pipe, batch)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("name", list(MODELS))
def test_the_call_that_plans_draws_what_a_later_call_draws(name: str) -> None:
    batch = MODELS[name][1](10)
    pipe = autosplit(build(name), devices=["cpu"] * 2, chunks=4)
    assert_same_bits(seeded(5, pipe, batch), seeded(5, pipe, batch))


@pytest.mark.parametrize("name", list(MODELS))
def test_train_step_repeats_its_bits(name: str) -> None:
    batch = MODELS[name][1](10)
    target = numbers(*batch.args[0].shape, seed=4)
    runs = []
    for devices in (1, 3, 3):
        pipe = autosplit(build(name), devices=["cpu"] * devices, chunks=4)
        torch.manual_seed(6)
        runs.append(train_step(pipe, batch, target=target, loss_fn=F.mse_loss))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("name", list(MODELS))
def test_other_seeds_and_later_calls_draw_anew(name: str) -> None:
    batch = MODELS[name][1](10)
    pipe = autosplit(build(name), devices=["cpu"] * 2, chunks=4)
    torch.manual_seed(5)
    first, second = forward_backward(pipe, batch), forward_backward(pipe, batch)
    other = seeded(6, pipe, batch)
    values = [run.outputs["/"] for run in (first, second, other)]
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert not torch.equal(values[1], values[2])


@pytest.mark.parametrize("name", list(MODELS))
def test_eval_mode_draws_nothing(name: str) -> None:
    batch = MODELS[name][1](10)
    plain, pipe = build(name).eval(), autosplit(build(name), devices=["cpu"] * 2, chunks=4).eval()
    before = torch.get_rng_state()
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("lanes", LANES)
def test_the_share_that_is_dropped_and_the_scale_of_the_rest(lanes: str) -> None:
    output = masked(lanes=lanes).outputs["/"].detach()
    kept = output[output != 0]
    assert abs((output == 0).double().mean() - SHARE) < 0.02
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / (1 - SHARE)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunks", [1, 5, 64])
def test_every_row_has_a_mask_of_its_own(chunks: int) -> None:
    masks = masked(chunks=chunks).outputs["/"] != 0
    assert len(torch.unique(masks, dim=0)) == len(masks)


def test_backward_uses_the_mask_of_the_forward() -> None:
    run = masked()
    gradient = run.gradients["input 0"]
    assert gradient is not None
    assert torch.equal(gradient != 0, run.outputs["/"] != 0)


def test_the_share_may_change_between_calls() -> None:
    model = Mask()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4)
    value = torch.ones(64, 200, dtype=torch.float64)
    assert abs((pipe(value) == 0).double().mean() - SHARE) < 0.02
    model.dropout.p = 0.8
    assert abs((pipe(value) == 0).double().mean() - 0.8) < 0.02
