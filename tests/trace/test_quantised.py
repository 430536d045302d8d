"""Linear layers with a packed weight are single calls with known costs; what a module sets up once mixes no rows."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.profile.node_costs.fake import fake_costs
from autosplit.trace.graph import NodeClass
from tests.equivalence.equality import Batch
from tests.models.three_layers import WIDTH, Model, numbers
from tests.trace.test_atoms import Body, equal_on, host, nodes, recorded, rows

BATCHES = [rows(count, seed) for seed, count in enumerate((7, 7, 4))]


class Codes(nn.Parameter):
    """A weight with a state of its own, which is gone on stand-ins without values."""

    state: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        twin = Codes(self.data.clone(), requires_grad=False)
        twin.state = None if self.state is None else twin.data
        return twin


class Packed(nn.Module):
    """A layer of eight bits that moves its state from its weight to itself when it is called for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = WIDTH
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-127, 127, (WIDTH, WIDTH), generator=generator, dtype=torch.int8)
        self.weight = Codes(codes, requires_grad=False)
        self.weight.state, self.state = codes, SimpleNamespace(codes=None)

    def forward(self, value: Tensor) -> Tensor:
        if self.weight.state is not None:
            self.state.codes, self.weight.state = self.weight.state, None
        return F.linear(value, self.state.codes.to(value.dtype) / 127)


class Repacked(nn.Linear):
    """A layer that replaces its weight's memory when it is evaluated for the first time, as Linear4bit on some CPUs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-127, 127, (WIDTH, WIDTH), generator=generator, dtype=torch.int8)
        self.weight: Any = Codes(codes, requires_grad=False)
        self.weight.state = codes
        self.state = SimpleNamespace(packed=False)

    def forward(self, value: Tensor) -> Tensor:
        if not self.training and not self.state.packed:
            self.weight.data, self.state.packed = self.weight.data.flip(1).contiguous(), True
        codes = self.weight.data.flip(1) if self.state.packed else self.weight.data
        return F.linear(value, codes.to(value.dtype) / 127)


class Buffers(nn.Module):
    """A layer in GPTQ's form: codes and scales are buffers, and plain operations make the weight."""

    codes: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.infeatures = self.outfeatures = WIDTH
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 2**31 - 1, (WIDTH // 2, WIDTH), generator=generator, dtype=torch.int32)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.full((WIDTH,), 1e-4))

    def forward(self, value: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 16, dtype=torch.int32)
        unpacked = (self.codes[:, None] >> shifts[None, :, None]) & 65535
        return value @ ((unpacked.reshape(WIDTH, WIDTH) - 32768) * self.scales).to(value.dtype)


def between(layer: type[nn.Module]) -> Model:
    return Model(lambda m, x: m.c(torch.tanh(m.b(m.layer(torch.tanh(m.a(x)))))), layer=layer)


@pytest.mark.parametrize("layer", [Packed, Buffers])
def test_a_layer_with_a_packed_weight_is_one_call_by_rows(layer: type[nn.Module]) -> None:
    layers = {
        name: info for name, info in nodes(recorded(between(layer), numbers(7, WIDTH))).items() if "layer" in name
    }
    assert {name: info.node_class for name, info in layers.items()} == {"layer#0": NodeClass.MICRO}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = equal_on(between(layer), BATCHES)
    assert pipe.plan.whole == ()
    assert len(pipe.plan.stages) > 1


def test_a_layer_that_has_set_itself_up_is_not_recorded_again() -> None:
    pipe = equal_on(between(Packed), BATCHES)
    assert pipe.layer.weight.state is None
    assert pipe.layer.state.codes is not None
    assert len(pipe._core.recordings.history.notes) == 1


@pytest.mark.parametrize("modes", ["te", "et", "eet", "tete"])
def test_a_weight_that_is_packed_anew_once_is_so_in_the_first_call_that_does(modes: str) -> None:
    plain, pipe = between(Repacked), autosplit(between(Repacked), devices=["cpu"] * 2, chunks=3)
    for mode, batch in zip(modes, [*BATCHES, *BATCHES], strict=False):
        torch.testing.assert_close(pipe.train(mode == "t")(*batch.args), plain.train(mode == "t")(*batch.args))
        assert torch.equal(pipe.layer.weight, plain.layer.weight)
        assert pipe.layer.state.packed == plain.layer.state.packed


@pytest.mark.parametrize("layer", [Packed, Buffers])
def test_one_recording_serves_all_lengths(layer: type[nn.Module]) -> None:
    pipe = equal_on(between(layer), [Batch((numbers(7, length, WIDTH),)) for length in (4, 9, 5, 12)])
    assert len(pipe._core.recordings.history.notes) == 2


def test_its_cost_is_that_of_a_product_with_a_weight_that_is_whole_meanwhile() -> None:
    cost = fake_costs(recorded(between(Packed), numbers(7, WIDTH)).graph, rows=4, batch_rows=7)["layer#0"]
    assert cost.estimated is None
    assert sum(each.flops for each in cost.forward_operations) == 2 * 4 * WIDTH * WIDTH
    assert sum(each.flops for each in cost.backward_operations) == 2 * 4 * WIDTH * WIDTH
    assert cost.forward_transient_bytes >= 8 * WIDTH * WIDTH
    assert cost.backward_transient_bytes >= 8 * WIDTH * WIDTH


def keeps_the_mean(part: Any, x: Tensor) -> Tensor:
    part.calls = float(x.mean()) if x.abs().sum() > 0 else 0.0
    return part.own(x)


def keeps_the_rows(part: Any, x: Tensor) -> Tensor:
    part.calls = x.shape[0] if x.abs().sum() > 0 else 0
    return part.own(x)


def keeps_the_largest(part: Any, x: Tensor) -> Tensor:
    part.calls = max(part.calls, float(x.max()) if x.abs().sum() > 0 else 0)
    return part.own(x) / (1 + part.calls)


def keeps_the_first_mean(part: Any, x: Tensor) -> Tensor:
    if part.calls == 0 and x.abs().sum() > 0:
        part.calls = float(x.mean())
    return part.own(x) + part.calls


def counts_large_values(part: Any, x: Tensor) -> Tensor:
    if x.abs().max() > 100:
        part.calls += 1
    return part.own(x)


@pytest.mark.parametrize(
    "body", [keeps_the_mean, keeps_the_rows, keeps_the_largest, keeps_the_first_mean, counts_large_values]
)
def test_state_that_follows_the_rows_is_not_set_up_once(body: Body) -> None:
    found = nodes(recorded(host(body), numbers(7, WIDTH)))
    assert found["part0#0"].node_class is NodeClass.FULL
    pipe = equal_on(host(body), BATCHES)
    plain = host(body)
    for batch in BATCHES:
        plain(*batch.args)
    assert pipe.part0.calls == plain.part0.calls
