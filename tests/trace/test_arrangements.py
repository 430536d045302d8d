"""Counts and masks of later batches are arranged in another way than those of the first: other rows meet."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.models.three_layers import WIDTH, Model

PLACES = 10
COUNTS = ([1] * 8, [2, 0, 1, 1, 1, 1, 2, 0], [3, 0, 0, 1, 1, 1, 2, 0], [8] + [0] * 7, [0] * 7 + [8])
Body = Callable[[Tensor, Tensor], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*(collapsed|stage):UserWarning")


def counts(per_row: list[int]) -> Tensor:
    return torch.tensor(per_row)


def mask(per_row: list[int]) -> Tensor:
    """Return a mask with as many entries in each row, at random places."""
    made = torch.zeros(len(per_row), PLACES, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for row, count in enumerate(per_row):
        made[row, torch.randperm(PLACES, generator=generator)[:count]] = True
    return made


def places(h: Tensor) -> Tensor:
    return h[:, None] * torch.arange(1, PLACES + 1)[:, None]


def assigned(h: Tensor, chosen: Tensor) -> Tensor:
    made = places(h)
    made[chosen] = h
    return made


def if_any(h: Tensor, chosen: Tensor) -> Tensor:
    return scattered(h, chosen) if chosen.any() else places(h)


def scattered(h: Tensor, chosen: Tensor) -> Tensor:
    return places(h).masked_scatter(chosen[..., None].expand(-1, -1, WIDTH), h)


def in_place(h: Tensor, chosen: Tensor) -> Tensor:
    return places(h).masked_scatter_(chosen[..., None], h)


ARRANGED: dict[str, tuple[Body, Callable[[list[int]], Tensor]]] = {
    "masked_scatter": (scattered, mask),
    "masked_scatter_": (in_place, mask),
    "masked_scatter of what a mask has": (if_any, mask),
    "setitem": (assigned, mask),
    "index_put": (lambda h, m: torch.index_put(places(h), (m,), h), mask),
    "masked_select": (lambda h, m: h + places(h).masked_select(m[..., None]).reshape(h.shape), mask),
    "segment_reduce": (lambda h, n: torch.segment_reduce(h, "sum", lengths=n), counts),
    "segment_reduce, unsafe": (lambda h, n: torch.segment_reduce(h, "sum", lengths=n, unsafe=True), counts),
    "repeat_interleave": (lambda h, n: torch.repeat_interleave(h, n, 0, output_size=len(h)), counts),
    "repeat_interleave of counts": (
        lambda h, n: h * (1 + torch.repeat_interleave(n, output_size=len(n)))[:, None],
        counts,
    ),
    "compressed rows": (
        lambda h, n: (
            torch.sparse_csr_tensor(
                torch.nn.functional.pad(n.cumsum(0), (1, 0)),
                torch.arange(len(n)),
                torch.ones(len(n)).double(),
                (len(n), len(n)),
                check_invariants=False,
            )
            @ h
        ),
        counts,
    ),
}


EMPTY = [(name, -1) for name in ARRANGED if name.startswith("masked_scatter")]
"""Cases whose first mask has no entry."""


@pytest.mark.parametrize(("name", "first"), [*((name, first) for name in ARRANGED for first in (0, 2)), *EMPTY])
def test_batches_with_other_arrangements(name: str, first: int) -> None:
    body, made = ARRANGED[name]
    model = Model(lambda own, x, n: own.c(torch.tanh(body(own.a(x), n))))
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=4, lanes="inline")
    found = COUNTS[first:] + COUNTS[:first] if first >= 0 else ([0] * 8, *COUNTS)
    for seed, per_row in enumerate(found):
        x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(pipe(x, made(per_row)), model(x, made(per_row)), rtol=1e-12, atol=1e-12)


APART: dict[str, tuple[Callable[[Model, Tensor, Tensor], Tensor], Callable[[list[int]], Tensor]]] = {
    "a table": (lambda own, h, n: h + own.b.weight[n], counts),
    "a table with one row": (lambda own, h, n: h + own.a.bias[None][n * 0], counts),
    "a masked fill": (lambda own, h, m: places(h).masked_fill(m[..., None], 0.0), mask),
    "a masked scatter of the places": (lambda own, h, m: torch.where(m[..., None], places(h), h[:, None]), mask),
    "one-hot": (lambda own, h, n: h + torch.nn.functional.one_hot(n.clamp(max=1), WIDTH), counts),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_in_any_arrangement_run_in_microbatches(name: str) -> None:
    body, made = APART[name]
    model = Model(lambda own, x, n: own.c(body(own, own.a(x), n)))
    found = trace(model, Sample(torch.randn(8, WIDTH).double(), made(COUNTS[0]))).graph
    assert {info.node_class for _, info in found.compute_nodes()} <= {NodeClass.MICRO, NodeClass.SHARED}
