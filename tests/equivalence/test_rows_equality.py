"""Operations that mix rows: noticed in whatever direction and mode they do it, and then run on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit

Mix = Callable[[bool, Tensor], Tensor]
MIXES: dict[str, Mix] = {
    "mean": lambda training, x: x - x.mean(0),
    "faint mean": lambda training, x: x - 1e-6 * x.mean(0),
    "mean in training": lambda training, x: x - x.mean(0) if training else x,
    "mean in eval": lambda training, x: x if training else x - x.mean(0),
    "softmax in training": lambda training, x: x.softmax(0) if training else x,
    "dropout and mean": lambda training, x: F.dropout(x, 0.0, training) - x.mean(0),
    "largest": lambda training, x: x / x.abs().amax(0, keepdim=True),
    "count": lambda training, x: x / x.shape[0],
    "position": lambda training, x: x + torch.arange(x.shape[0]).to(x).unsqueeze(1),
    "later rows": lambda training, x: torch.cat([x[1:], x[-1:]]),
    "earlier rows": lambda training, x: torch.cat([x[:1], x[:-1]]),
    "sum from the start": lambda training, x: x.cumsum(0),
    "sum from the end": lambda training, x: x.flip(0).cumsum(0).flip(0),
    "roll": lambda training, x: x.roll(1, 0),
    "flip": lambda training, x: x.flip(0),
    "sort": lambda training, x: x.sort(0).values,
    "pairs": lambda training, x: (x @ x.T).softmax(1) @ x,
}
HEALS: dict[str, Mix] = {
    "flip twice": lambda training, x: x.flip(0).flip(0),
    "row numbers": lambda training, x: x[torch.arange(x.shape[0])],
    "transposed": lambda training, x: (x.T.contiguous() * 2).T,
}


class Mixing(nn.Module):
    """Linear, an operation between rows, linear."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(4, 4, bias=False), mix, nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.mix(self.training, self.first(value)))


def full_share(mix: Mix, *, training: bool, batch: Tensor) -> float:
    """Compare both modes and gradients with the plain model; return the FLOPs' share of full nodes in the plan."""
    plain = Mixing(mix).double().train(training)
    pipe = autosplit(copy.deepcopy(plain), devices=2, chunks=4)
    for mode in (training, not training):
        plain.train(mode), pipe.train(mode)
        weights = torch.randn(batch.shape[0], 4, dtype=torch.float64)
        for module in (plain, pipe):
            module.zero_grad()
            (module(batch) * weights).sum().backward()
        with torch.no_grad():
            expected, found = plain(batch), pipe(batch)
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max() + 1e-6)
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            bound = 1e-12 * float(theirs.grad.abs().max() + 1e-6)
            assert float((ours.grad - theirs.grad).abs().max()) <= bound
    assert pipe.plan is not None
    return pipe.plan.class_flops["full"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MIXES)
def test_mixed_rows_equal_the_plain_model(name: str, training: bool):
    full_share(MIXES[name], training=training, batch=torch.randn(10, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mean", "faint mean", "later rows", "sum from the end", "pairs"])
def test_a_sample_of_equal_rows_hides_nothing(name: str):
    plain = Mixing(MIXES[name]).double()
    pipe = autosplit(copy.deepcopy(plain), devices=2, chunks=4, sample=torch.zeros(8, 4, dtype=torch.float64))
    batch = torch.randn(8, 4, dtype=torch.float64)
    with torch.no_grad():
        expected, found = plain(batch), pipe(batch)
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("name", HEALS)
def test_influence_that_heals_does_not_end_the_pipeline(name: str):
    assert full_share(HEALS[name], training=True, batch=torch.randn(10, 4, dtype=torch.float64)) == 0.0
