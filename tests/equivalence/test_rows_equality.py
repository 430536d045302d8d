"""What mixes rows, forward, backward or in a sort, what looks as if it did, and what that leaves to the pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit, plan
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, Tripled, numbers

Body = Callable[..., Any]


def full_share(body: Body, *shape: int, **parts: Any) -> float:
    """Compare outputs, gradients and buffers with the plain model over two batches; return the FLOPs' full share."""
    plain = Model(body, **parts)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for rows in (8, 7):
        batch = Batch((numbers(rows, *(shape or (4, WIDTH)), seed=rows),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert pipe.plan is not None
    return pipe.plan.class_flops["full"]


def encoded(model: Any, value: Tensor) -> Tensor:
    return torch.tanh(model.b(torch.tanh(model.a(value)))).mean(1)


def clip_loss(model: Any, value: Tensor) -> Tensor:
    left, right = F.normalize(encoded(model, value), dim=-1), F.normalize(encoded(model, value * 0.5 + 1), dim=-1)
    logits, labels = left @ right.T * 5, torch.arange(len(value))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def sim_clr_loss(model: Any, value: Tensor) -> Tensor:
    both = F.normalize(torch.cat([encoded(model, value), encoded(model, value.flip(1))]), dim=-1)
    logits = (both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -9.0)
    return F.cross_entropy(logits, torch.arange(len(both)).roll(len(value)))


def hardest_triplet_loss(model: Any, value: Tensor) -> Tensor:
    rows = encoded(model, value)
    distance = torch.cdist(rows, rows)
    labels = torch.arange(len(rows)) % 3
    same = labels[:, None] == labels
    return (distance.where(same, -1).amax(1) - distance.where(~same, 99.0).amin(1) + 1).relu().mean()


def routed_with_capacity(model: Any, value: Tensor) -> Tensor:
    flat = torch.tanh(model.a(value)).flatten(0, 1)
    weight, expert = flat[:, :3].softmax(-1).max(-1)
    place = (F.one_hot(expert, 3).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
    slot = torch.where(place < 5, expert * 5 + place, 15)
    held = torch.zeros(16, WIDTH, dtype=flat.dtype).index_add(0, slot, flat * weight[:, None])
    return model.b(model.c(held)[slot].unflatten(0, value.shape[:2]) + value)


def filled(mask: Tensor) -> Tensor:
    mask[1:3] = 2.0
    return mask


LATE: dict[str, Body] = {
    "clip": clip_loss,
    "sim_clr": sim_clr_loss,
    "hardest triplets": hardest_triplet_loss,
    "a softmax over rows at the end": lambda m, x: encoded(m, x).softmax(0),
    "a norm over the batch": lambda m, x: (lambda v: v / v.norm())(encoded(m, x)),
    "standardised rows": lambda m, x: (lambda v: (v - v.mean(0)) / (v.std(0) + 1e-3))(encoded(m, x)),
    "ranks of rows": lambda m, x: encoded(m, x).argsort(0).argsort(0) + encoded(m, x),
    "a covariance": lambda m, x: (lambda v: v.T @ v / len(v))(encoded(m, x)),
}


@pytest.mark.parametrize("name", LATE)
def test_rows_that_meet_at_the_end_leave_the_layers_to_the_pipeline(name: str) -> None:
    assert full_share(LATE[name]) < 0.3


MIXED: dict[str, Body] = {
    "experts with a capacity": routed_with_capacity,
    "a share of the rows": lambda m, x: m.b(torch.tanh(m.a(x)) * torch.linspace(0, 1, len(x))[:, None, None]),
    "zeros that are filled by rows": lambda m, x: (
        lambda z: m.b(torch.tanh(m.a(x)) + z.index_fill(0, torch.tensor([0]), 1.0)[:, None, None])
    )(torch.zeros(len(x), dtype=x.dtype)),
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_in_the_middle_are_right(name: str) -> None:
    full_share(MIXED[name])


APART: dict[str, Body] = {
    "zeros per row": lambda m, x: m.b(torch.tanh(m.a(x)) + torch.zeros(len(x), 1, 1, dtype=x.dtype)),
    "a state of zeros": lambda m, x: m.gru(torch.tanh(m.a(x)), torch.zeros(1, len(x), WIDTH, dtype=x.dtype))[0],
    "ones like rows": lambda m, x: m.b(torch.tanh(m.a(x)) * torch.ones_like(x[:, :1])),
    "a token taken by row number": lambda m, x: m.b(torch.tanh(m.a(x)))[
        torch.arange(len(x)), x.detach()[..., 0].argmax(1)
    ],
    "a mask per row": lambda m, x: m.b(torch.tanh(m.a(x)) * (torch.arange(4) < torch.full((len(x), 1), 3))[..., None]),
    "row numbers used for both": lambda m, x: (lambda v: (v[torch.arange(len(v)), 0], v))(m.b(torch.tanh(m.a(x)))),
    "there and back": lambda m, x: m.b(torch.tanh(m.a(x)).flip(0).flip(0)),
    "a mask of a fixed size": lambda m, x: m.b(torch.tanh(m.a(x)) + filled(x.new_zeros((4, 1)))),
    "a table in the type of rows": lambda m, x: m.b(torch.tanh(m.a(x)) + torch.arange(4)[:, None].type_as(x)),
    "ones of a fixed size": lambda m, x: m.b(torch.tanh(m.a(x)) * F.pad(x.new_ones(3, 1), (0, 0, 1, 0))),
    "a full tensor of a fixed size": lambda m, x: m.b(torch.tanh(m.a(x)) * x.new_full(size=[4, 1], fill_value=3)),
    "an empty sum": lambda m, x: m.b(torch.tanh(m.a(x))) + x[:, :0].sum(),
}


@pytest.mark.parametrize("name", APART)
def test_what_only_looks_as_if_it_mixed_rows_stays_by_rows(name: str) -> None:
    parts = {"gru": lambda: torch.nn.GRU(WIDTH, WIDTH, batch_first=True)} if "state" in name else {}
    assert full_share(APART[name], **parts) < 0.05


def doubles_a_row(model: Any, value: Tensor) -> Tensor:
    out = encoded(model, value)
    out[0].mul_(2)
    return out


def shifts_rows(model: Any, value: Tensor) -> Tensor:
    out = encoded(model, value)
    out[1:] = out[:-1].clone()
    return out


def fills_the_first(model: Any, value: Tensor) -> Tensor:
    out = encoded(model, value)
    out.view(-1)[0] = 5
    return out


@pytest.mark.parametrize("body", [doubles_a_row, shifts_rows, fills_the_first])
def test_a_write_into_rows_of_the_output_is_right(body: Body) -> None:
    """The output is the tensor that was written to: nothing takes the result of the write."""
    full_share(body)


def test_noise_for_every_row_is_drawn_for_every_row() -> None:
    pipe = autosplit(Model(lambda m, x: (m.b(m.a(x)), torch.randn(len(x)))), devices=["cpu"] * 2, chunks=3)
    for rows in (8, 7):
        noise = pipe(numbers(rows, WIDTH))[1]
        assert noise.shape == (rows,)
        assert len(noise.unique()) == rows


# -- rows that meet in the backward -----------------------------------------------------------------------------
class Centred(Tripled):
    """Takes the mean over the rows off the gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Clipped(Tripled):
    """Clips the gradient by its norm over all rows, which small gradients do not show."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Turned(Tripled):
    """Sends each row's gradient to the next row."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 0)


class Weighted(torch.autograd.Function):
    """A product with a weight; the weight's gradient is a sum over the rows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradient @ weight.T, value.T @ gradient


class Averaged(Weighted):
    """The same with a mean over the rows in the place of the sum."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradient @ weight.T, value.T @ gradient / len(value)


def applied(function: Any, *, weight: bool = False) -> Body:
    def body(model: Any, value: Tensor) -> Tensor:
        hidden = torch.tanh(model.c(value))
        return model.b(torch.tanh(model.a(function.apply(hidden, *([model.b.weight] if weight else [])))))

    return body


@pytest.mark.parametrize("function", [Centred, Clipped, Turned, Averaged])
def test_rows_mixed_in_the_backward_only(function: Any) -> None:
    assert full_share(applied(function, weight=function is Averaged), WIDTH) > 0.0


def _centred(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output - output.mean(0)


def _gradient_of_length_one(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (inputs[0] / inputs[0].norm(),)


@pytest.mark.filterwarnings("ignore:2 devices were given")
@pytest.mark.parametrize("late", [False, True], ids=["before the split", "after a call"])
@pytest.mark.parametrize(
    "register",
    [
        lambda model: model[0].register_forward_hook(_centred),
        lambda model: model[2].register_full_backward_hook(_gradient_of_length_one),
    ],
    ids=["forward", "backward"],
)
def test_a_hook_that_mixes_rows_sees_the_whole_batch(register: Callable[[nn.Module], object], late: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(7, 6, dtype=torch.float64)
    pipe = autosplit(model, devices=2, chunks=3)
    if late:
        pipe(inputs)
    register(model)
    register(plain)
    assert_equal_runs(forward_backward(pipe, Batch((inputs,))), forward_backward(plain, Batch((inputs,))))


# -- tokens sorted by expert and back, as mixtures of experts do it --------------------------------------------------
SIZE, EXPERTS, CHOICES = 16, 4, 2


class Grouped(nn.Module):
    """Experts in one product of groups: tokens sorted by expert and put back; ``kind`` says how, or what is off."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.gate = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE) / 4)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, value: Tensor) -> Tensor:
        flat = torch.tanh(self.first(value)).reshape(-1, SIZE)
        shares, chosen = self.gate(flat).softmax(-1).topk(CHOICES, -1)
        return self.last(self.experts(flat, chosen.reshape(-1), shares.reshape(-1)).reshape(value.shape))

    def experts(self, flat: Tensor, keys: Tensor, shares: Tensor) -> Tensor:
        ordered, order = torch.sort(keys)
        picked = flat[order // CHOICES]
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        if self.kind == "capacity":
            held = counts[:-1].clamp(max=5)
            counts = torch.cat([held, (len(order) - held.sum())[None]])
        bounds = torch.cumsum(counts, 0, dtype=torch.int32)
        made = F.grouped_mm(picked, self.weight.transpose(-2, -1), offs=bounds)
        if self.kind == "position":
            made = made * torch.arange(1, len(order) + 1)[:, None] / 10
        if self.kind == "neighbour":
            made = made + made.roll(1, 0)
        if self.kind == "load":
            made = made / counts.sum()
        if self.kind == "gated halves":
            made = torch.cat([made[..., ::2] * made[..., 1::2].sigmoid(), made[:, SIZE // 2 :]], -1)
        if self.kind == "moved on":
            made = torch.cat([made[1:], made[:1]])
        made = made * shares[order][:, None]
        return self.back(made, order, keys, flat)

    def back(self, made: Tensor, order: Tensor, keys: Tensor, flat: Tensor) -> Tensor:
        if self.kind == "index_add":
            return torch.zeros_like(flat).index_add_(0, order // CHOICES, made)
        if self.kind == "argsort":
            made = made[torch.argsort(order)]
        elif self.kind == "assigned":
            result = torch.zeros_like(made)
            result[order] = made
            made = result
        elif self.kind == "another way back":
            made = made[keys.argsort()]
        elif self.kind != "no way back":
            way = torch.empty_like(order)
            way[order] = torch.arange(order.size(0))
            made = made[way]
        return made.reshape(-1, CHOICES, SIZE).sum(1)


def shares(kind: str) -> dict[str, float]:
    """Compare forward and backward with the plain model at two batch sizes; return the shares of FLOPs by class."""
    plain = Grouped(kind)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3)
    for rows in (7, 10):
        value = torch.randn(rows, 5, SIZE, generator=torch.Generator().manual_seed(rows))
        runs: list[Any] = [forward_backward(module, Batch((value,))) for module in (pipe, plain)]
        assert_equal_runs(*runs, dtype=torch.float32)
    assert pipe.plan is not None
    return pipe.plan.class_flops


@pytest.mark.parametrize("kind", ["assigned", "assigned way", "argsort", "index_add", "gated halves"])
def test_tokens_that_are_sorted_by_expert_and_put_back_stay_rows(kind: str) -> None:
    assert shares(kind).get("full", 0.0) == 0.0


@pytest.mark.parametrize(
    "kind", ["capacity", "position", "neighbour", "moved on", "load", "no way back", "another way back"]
)
def test_what_hangs_on_other_tokens_on_the_way_is_computed_on_the_whole_batch(kind: str) -> None:
    assert shares(kind)["full"] > 0.3


def test_sliced_rows_are_followed_where_there_are_no_values() -> None:
    with torch.device("meta"):
        model, value = Grouped("gated halves"), torch.empty(8, 5, SIZE)
    asked = {"chunks": 2, "schedule": "1f1b", "precision": "bf16", "loss_fn": lambda output: output.sum()}
    found = plan(model, "2xL4-24GB", sample=value, **asked)
    assert found.class_flops.get("full", 0.0) == 0.0
