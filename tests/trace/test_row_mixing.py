"""Operations that mix rows run on the whole batch, whatever the sample's values, tables of operators or draws say."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.models.three_layers import WIDTH, Model
from tests.pairwise import in_turn

ROWS = 8
Body = Callable[[Tensor], Tensor]


def between(body: Body) -> Model:
    """An operation between two layers."""
    return Model(lambda m, x: m.b(body(m.a(x))))


def inverted(h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return h[order].relu()[order.argsort()]


def assigned(h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result[h[:, 0].argsort()] = h
    return result


def gated_roll(h: Tensor) -> Tensor:
    """Neighbours reach a row through a gate that is zero in the sample, in a tensor that is no stack of rows."""
    flat = torch.cat([h, h.cos()])
    return (flat + (flat > 1e3).to(h.dtype) * flat.roll(1, 0)).chunk(2)[0]


def own_or_first(h: Tensor) -> Tensor:
    """Pick the row itself by every value of the sample, and the first row by others."""
    return h + h[torch.where(h[:, 0] < 1e3, torch.arange(len(h)), 0)]


def beyond(h: Tensor) -> Tensor:
    at = torch.arange(len(h)) * WIDTH + (h[:, 0] > 1.2).long() * WIDTH
    return h + h.reshape(-1)[at % h.numel()][:, None]


def changed(body: Callable[[Tensor], object]) -> Body:
    """Return a body that returns a copy of its rows, changed in place."""

    def run(h: Tensor) -> Tensor:
        copied = h.clone()
        body(copied)
        return copied

    return run


def viewed_before(h: Tensor) -> Tensor:
    copied = h.clone()
    column = copied[:, 1:2]
    copied.sub_(copied.mean(0))
    return copied + column


def places(h: Tensor) -> Tensor:
    return torch.arange(len(h))


def gates() -> Tensor:
    return torch.cat([torch.ones(5), torch.full((27,), 0.3)]).double()


def numbers() -> Tensor:
    return torch.cat([torch.arange(5), torch.zeros(27, dtype=torch.long)])


PLACED: dict[str, Body] = {
    "tril along the batch": lambda h: h.T.tril(1).T,
    "tril with rows first": lambda h: h.tril(2),
    "triu along the batch": lambda h: h.T.triu(2).T,
    "triu of ones": lambda h: h * torch.ones(len(h), WIDTH).double().triu(-3),
    "tril in place": changed(lambda h: h.T.tril_(2)),
    "a fifth row and later ones": changed(lambda h: h[5:].mul_(2)),
    "an assignment from the fifth row": changed(lambda h: h.__setitem__(slice(5, None), 0)),
    "a diagonal in a view": changed(lambda h: h[:, :].fill_diagonal_(0)),
    "roll by the probe's rows": lambda h: h + h.roll(4, 0),
    "roll by many of the probe's rows": lambda h: h + h.roll(60, 0),
    "roll along a second dimension": lambda h: h + h.T.roll(4, 1).T,
    "where": lambda h: torch.where(places(h)[:, None] < 5, h, -h),
    "a gate by places, reshaped": lambda h: (h * (places(h) < 5).double()[:, None]).reshape(-1, 2, 3).reshape(-1, 6),
    "a gate by places between flips": lambda h: (h.flip(0) * (places(h) < 5).double()[:, None]).flip(0),
    "roll by the probe's rows between flips": lambda h: h.flip(0).roll(4, 0).flip(0),
    "roll by many of the probe's rows between flips": lambda h: h.flip(0).roll(36, 0).flip(0),
    "a gated roll between flips": lambda h: (lambda r: r + (r > 1e3).double() * r.roll(4, 0))(h.flip(0)).flip(0),
    "a gated roll in place between flips": lambda h: changed(lambda r: r.add_((r > 1e3).double() * r.roll(4, 0)))(
        h.flip(0)
    ).flip(0),
    "triu between flips": lambda h: h.flip(0).triu(-3).flip(0),
    "two rolls of merged rows": lambda h: (
        torch.stack([h, h.sin()]).reshape(-1, WIDTH).roll(-4, 0).roll(-4, 0).reshape(2, -1, WIDTH)[0]
    ),
    "the first rows turned, then a flip": lambda h: h[torch.where(places(h) < 4, 3 - places(h), places(h))].flip(0),
    "a mask by places of merged rows": lambda h: (
        torch.stack([h, h.sin()])
        .reshape(-1, WIDTH)
        .masked_fill((torch.arange(2 * len(h)) > 4)[:, None], 0.0)
        .reshape(2, -1, WIDTH)[0]
    ),
    "places by a remainder between turns": lambda h: h[len(h) - 1 - places(h)][places(h) % 5][len(h) - 1 - places(h)],
    "masked_fill by places": lambda h: h.masked_fill((places(h) > 4)[:, None], 0.0),
    "one-hot of places": lambda h: h + F.one_hot(places(h), 32).double()[:, 5:6],
    "identity": lambda h: h + torch.eye(len(h), 32).double()[:, 6:12],
    "one-hot of places, of few classes": lambda h: h + F.one_hot(places(h).clamp(min=4), 8).double()[:, 2:],
    "a slice of a table": lambda h: h * gates()[: len(h), None],
    "a table by places": lambda h: h * gates()[places(h)][:, None],
    "an index from a table": lambda h: h + h[numbers()[: len(h)]],
    "clamped places": lambda h: h + h[places(h).clamp(max=4)],
    "places by a remainder": lambda h: h + h[places(h) % 5],
    "places among thresholds": lambda h: h * torch.searchsorted(torch.tensor([4.5, 7.0]), places(h).float())[:, None],
}
"""What treats the first rows alike, or returns them to their places, and others not."""
MIXING: dict[str, Body] = PLACED | {
    "mean": lambda h: h - h.mean(0),
    "faint mean": lambda h: h - 1e-6 * h.mean(0),
    "largest": lambda h: h / h.abs().amax(0, keepdim=True),
    "number of rows": lambda h: h / len(h),
    "position": lambda h: h + places(h)[:, None],
    "later rows": lambda h: torch.cat([h[1:], h[-1:]]),
    "earlier rows": lambda h: torch.cat([h[:1], h[:-1]]),
    "sum from the end": lambda h: h.flip(0).cumsum(0).flip(0),
    "flip": lambda h: h.flip(0),
    "pairs": lambda h: (h @ h.T).softmax(1) @ h,
    "a view changed by a mean": changed(lambda h: h[:, 1:3].sub_(h[:, 1:3].mean(0))),
    "a view of before a mean": viewed_before,
    "argsort of one value per row": lambda h: h + h[h[:, 0].argsort()],
    "sort of one value per row": lambda h: h + h[h[:, 0].sort().indices],
    "sort along the batch": lambda h: h.sort(0).values,
    "msort": lambda h: torch.msort(h),
    "msort of one value per row": lambda h: h * torch.msort(h[:, 0])[:, None],
    "order at random": lambda h: h[torch.rand(len(h)).argsort()],
    "permutation at random": lambda h: h[torch.randperm(len(h))],
    "ranks": lambda h: h * h[:, 0].argsort().argsort()[:, None],
    "topk": lambda h: h * h[:, 0].topk(len(h)).values[:, None],
    "cummax": lambda h: h * h[:, 0].cummax(0).values[:, None],
    "cumsum of a rare event": lambda h: h * (1 + (h[:, 0] > 1e3).long().cumsum(0))[:, None],
    "bucketize": lambda h: h * torch.bucketize(h[:, 0].clone().detach(), h[:, 0].detach().sort().values)[:, None],
    "quantiles": lambda h: h * torch.bucketize(h, torch.quantile(h, torch.tensor([0.2, 0.8]).double()).detach()),
    "searchsorted": lambda h: h * torch.searchsorted(h[:, 0].detach().sort().values, h[:, 1].clone().detach())[:, None],
    "unique": lambda h: h * torch.unique((h[:, 0] > 0).long()).sum(),
    "compaction": lambda h: h + F.pad(h[(h[:, 0] > 0).nonzero()[:, 0]], (0, 0, 0, len(h)))[: len(h)],
    "counts": lambda h: h * F.one_hot((h[:, 0] > 0).long(), 2).sum(0)[0],
    "histogram": lambda h: h * torch.histc(h[:, 0].detach(), 4)[0],
    "masked_scatter": lambda h: h.masked_scatter(h > 0, h.flip(1)),
    "index_put": lambda h: torch.zeros_like(h).index_put((h[:, 0].argsort(),), h),
    "assignment": assigned,
    "index_add": lambda h: torch.zeros_like(h).index_add(0, (h[:, 0] > 0).long(), h),
    "scatter": lambda h: torch.zeros_like(h).scatter(0, (h > 0).long(), h),
    "gather": lambda h: h.gather(0, h.argsort(0)),
    "above the median": lambda h: torch.where(h > h.median(), h, 0 * h),
    "diff": lambda h: h + torch.diff(h[:, 0], prepend=h[:1, 0])[:, None],
    "normalize": lambda h: F.normalize(h, 2.0, 0),
    "softmax without a dimension": lambda h: h * F.softmax(h[:, 0], dim=-1)[:, None],
    "a gate that is zero": lambda h: h + (h > 1e3).to(h.dtype) * h.roll(1, 0),
    "a gate that is zero among merged rows": gated_roll,
    "a choice of rows": own_or_first,
    "the row before, by a value that is rare": lambda h: h + h[torch.arange(len(h)) - (h[:, 0] > 1.2).long()],
    "the row before, by the largest of rare values": lambda h: (
        h + h[torch.arange(len(h)) - (h > 1.9).long().max(1).values]
    ),
    "a place beyond the row, by a value that is rare": beyond,
    "renorm of rare values": lambda h: h.renorm(2, 1, 1e3),
    "dilated convolution": lambda h: (
        F.conv1d(h.T[:, None], torch.tensor([[[1.0, 0.0, 0.5]]]).double(), padding=6, dilation=6)[:, 0].T
    ),
}
APART: dict[str, Body] = {
    "one value of each row": lambda h: h + h[torch.arange(len(h)), h.argmax(1)][:, None],
    "row numbers": lambda h: h[places(h)],
    "transposed": lambda h: (h.T.contiguous() * 2).T,
    "two flips": lambda h: h.flip(0).relu().flip(0),
    "columns rolled between flips": lambda h: h.flip(0).roll(2, 1).flip(0),
    "sums of a row between flips": lambda h: h.flip(0).cumsum(1).flip(0),
    "merged rows rolled by all of them": lambda h: (
        torch.stack([h, h.cos()]).reshape(-1, WIDTH).roll(len(h), 0).tanh().reshape(2, -1, WIDTH)[1]
    ),
    "columns sorted": lambda h: h.gather(1, h.argsort(1)).cumsum(1),
    "two views": lambda h: torch.cat([h, h.cos()]).tanh().chunk(2)[1],
    "merged dimensions": lambda h: torch.stack([h, h.cos()]).reshape(-1, WIDTH).tanh().reshape(2, -1, WIDTH)[1],
    "sort and back": inverted,
    "a draw per row": lambda h: h * torch.rand(len(h), 1).add(0.9).floor(),
}


def full_nodes(model: nn.Module, x: Tensor) -> list[str]:
    found = trace(copy.deepcopy(model), Sample(x)).graph.compute_nodes()
    return [info.name for _, info in found if info.node_class is NodeClass.FULL]


def assert_equal(model: nn.Module, batches: list[Tensor]) -> None:
    """Compare outputs and all gradients of a pipe and of the model on several batches."""
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4)
    for seed, x in enumerate(batches):
        results = []
        for called in (model, pipe):
            torch.manual_seed(seed)
            leaf = x.clone().requires_grad_()
            out = called(leaf)
            found = torch.autograd.grad((out * torch.arange(1.0, 1 + out.numel()).reshape(out.shape)).sum(), leaf)
            results.append((out.detach(), *found))
        for plain, split in zip(*results, strict=True):
            torch.testing.assert_close(split, plain, rtol=1e-10, atol=1e-10)


@in_turn(share=(0, 2), name=list(MIXING))
def test_what_mixes_rows_is_equal(name: str) -> None:
    torch.manual_seed(1)
    assert_equal(between(MIXING[name]), [torch.randn(ROWS, WIDTH).double() for _ in range(2)])


@pytest.mark.parametrize("name", ["mean", "faint mean", "later rows", "sum from the end", "pairs"])
def test_a_sample_of_equal_rows_hides_nothing(name: str) -> None:
    model, x = between(MIXING[name]), torch.randn(ROWS, WIDTH).double()
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4, sample=torch.zeros_like(x))
    torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=1e-10)


def test_an_event_that_no_row_of_the_sample_has_is_counted_over_all_rows() -> None:
    for body in (MIXING["cumsum of a rare event"], lambda h: h * (1 + (h[:, 0] > 1e3).long().sum())):
        model, x = between(body), torch.randn(ROWS, WIDTH).double()
        pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4)
        for scale in (1.0, 1e4):
            torch.testing.assert_close(pipe(scale * x), model(scale * x), rtol=1e-10, atol=1e-10)


def in_one_mode(body: Body, *, training: bool) -> Model:
    """An operation in training or in eval mode only."""
    return Model(lambda m, x: m.b(body(m.a(x)) if m.training is training else m.a(x)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["mean", "flip"])
def test_rows_that_meet_in_one_mode_only(name: str, training: bool) -> None:
    model, x = in_one_mode(MIXING[name], training=training), torch.randn(ROWS, WIDTH).double()
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4)
    for mode in (not training, training, not training):
        model.train(mode), pipe.train(mode)
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=1e-10)


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": lambda h, dim: h.cumsum(dim),
    "cummax": lambda h, dim: h.cummax(dim=dim).values,
    "softmax": lambda h, dim: F.softmax(h, dim),
    "a layer": lambda h, dim: nn.LogSoftmax(dim)(h),
    "sort": lambda h, dim: h.sort(dim).values,
    "argsort": lambda h, dim: h * torch.argsort(h, descending=True, dim=dim),
    "topk": lambda h, dim: h * h.topk(h.shape[dim], dim).values,
    "diff": lambda h, dim: torch.diff(h, prepend=h.narrow(dim, 0, 1), dim=dim),
    "normalize": lambda h, dim: F.normalize(h, 2.0, dim),
    "flip": lambda h, dim: h.flip(dim),
    "roll": lambda h, dim: h.roll(1, dim),
}


@pytest.mark.parametrize("name", ALONG)
def test_without_values_the_dimension_says_whether_rows_mix(name: str) -> None:
    for dim in (0, 1):
        model, x = between(lambda h, dim=dim: ALONG[name](h, dim)).to("meta"), torch.empty(ROWS, WIDTH, device="meta")
        assert bool(full_nodes(model, x)) is (dim == 0)


class OverRows(nn.Module):
    """A softmax over the rows, by an operator that no table names."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._safe_softmax.default(x, 0)
        return result


def test_rows_that_are_masked_in_the_sample_hide_no_influence() -> None:
    x = torch.randn(ROWS, WIDTH).double()
    x[1:3] = -torch.inf
    assert full_nodes(OverRows(), x)


def test_what_is_never_used_may_mix_rows() -> None:
    model = between(lambda h: (h[torch.randperm(len(h))], h[h[:, 0].argsort()], h)[2])
    assert_equal(model, [torch.randn(ROWS, WIDTH).double()])


@in_turn(share=(1, 2), name=list(APART))
def test_rows_that_stay_apart_run_in_microbatches(name: str) -> None:
    torch.manual_seed(1)
    model, x = between(APART[name]), torch.randn(ROWS, WIDTH).double()
    assert not full_nodes(model, x)
    assert_equal(model, [x])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_dynamically_quantized_layer_takes_its_scale_from_the_whole_batch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).eval()
    model = torch.ao.quantization.quantize_dynamic(plain, {"2"}, dtype=torch.qint8)
    pipe = autosplit(copy.deepcopy(model), devices=2, chunks=3)
    for largest in (1, 100):
        x = torch.randn(9, 16) * torch.linspace(0.1, largest, 9)[:, None]
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-6, atol=1e-6)
    assert pipe.plan.class_flops["full"] > 0


# -- an index that depends on the model's state: the next call may have another one --------------------------------
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "modulo": lambda h, shift: h[(torch.arange(len(h)) + shift) % len(h)],
    "product": lambda h, shift: h[(torch.arange(len(h)) * (1 - 0.1 * shift)).long()],
    "index_select": lambda h, shift: h.index_select(0, (torch.arange(len(h)) + shift) % len(h)),
    "two indices": lambda h, shift: h[(torch.arange(len(h)) + shift) % len(h), torch.zeros(len(h)).long()][:, None],
    "take_along_dim": lambda h, shift: h.take_along_dim(((torch.arange(len(h)) + shift) % len(h))[:, None], 0),
    "own column": lambda h, shift: h[torch.arange(len(h)), shift.expand(len(h))][:, None],
    "most likely": lambda h, shift: h[torch.arange(len(h)), (h * (1 + shift)).argmax(1)][:, None],
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(6, 8), nn.Linear(8, 3), read
        self.register_buffer("shift", torch.tensor(0))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h + self.read(h, self.shift if shift is None else shift))


@pytest.mark.parametrize("argument", [False, True], ids=["buffer", "argument"])
@pytest.mark.parametrize("name", READS)
def test_an_index_that_depends_on_state(name: str, argument: bool) -> None:
    torch.manual_seed(0)
    model = Reads(READS[name]).double()
    plain, x = copy.deepcopy(model), torch.randn(7, 6).double()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=3)
    for shift in map(torch.tensor, (0, 1, 3)):
        plain.shift.copy_(shift)
        pipe.shift.copy_(shift)
        args = (x, shift) if argument else (x,)
        torch.testing.assert_close(pipe(*args), plain(*args), rtol=1e-12, atol=1e-12)
    assert pipe.plan is not None
    by_rows = pipe.plan.class_flops["micro"] == 1.0
    assert by_rows == (name in ("own column", "most likely"))


def test_a_table_as_long_as_the_batch_whose_rows_are_equal_still_has_places() -> None:
    model = Model(lambda own, x: own.c(own.a(x) + own.table[: len(x)]))
    model.table = nn.Parameter(torch.zeros(8, model.a.out_features, dtype=torch.float64))
    autosplit(model, ["cpu", "cpu"], 4)(
        torch.randn(8, model.a.in_features, dtype=torch.float64)
    ).square().sum().backward()
    assert model.table.grad.abs().sum(1).gt(0).all()
