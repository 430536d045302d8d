"""A stream computes what the reference of the same staleness computes, in float64 to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit import Sample
from autosplit.schedule.stream import STALENESS
from tests.models.named import CASES
from tests.stream.streams import Normed, Skipping, adamw, check, cross_entropy, pair, sgd, vectors, words

MAKES = {"sgd": sgd, "adamw": adamw}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("optimizer", MAKES)
@pytest.mark.parametrize("staleness", STALENESS)
def test_50_minibatches_with_skips_and_ties(staleness: str, optimizer: str, stages: int) -> None:
    items = words(50)
    own = pair(Skipping, items[0][0], stages=stages, chunks=4)
    check(own, items, staleness, MAKES[optimizer])


@pytest.mark.parametrize("lanes", ["threads", "inline"])
@pytest.mark.parametrize("staleness", STALENESS)
def test_dropout_ragged_minibatches_and_either_kind_of_lanes(staleness: str, lanes: str) -> None:
    items = words(13, rows=(4, 4, 3, 1))
    own = pair(lambda: Skipping(dropout=0.3), items[0][0], lanes=lanes)
    check(own, items, staleness, sgd)


@pytest.mark.parametrize("staleness", ["stash", "vertical"])
def test_running_statistics_follow_the_forwards(staleness: str) -> None:
    items = vectors(9)
    own = pair(Normed, items[0][0])
    check(own, items, staleness, adamw)


@pytest.mark.parametrize("recompute", ["always", "block"])
def test_a_stage_that_runs_again_uses_its_minibatchs_version(recompute: str) -> None:
    items = words(9)
    own = pair(lambda: Skipping(dropout=0.3), items[0][0], recompute=recompute)
    check(own, items, "stash", sgd)


HOLDERS = "lstm batch first", "weight norm", "nested skips", "tiny gpt", "keyword inputs"
"""Models with weights in lists and parametrizations, values over several stages, and outputs of several parts."""


@pytest.mark.parametrize("name", HOLDERS)
def test_other_models(name: str) -> None:
    case = CASES[name]
    given = [case.batch(4) for _ in range(9)]
    items = [(Sample(*map(_plain, own.args), **{k: _plain(v) for k, v in own.kwargs.items()}), None) for own in given]
    own = pair(case.build, items[0][0])
    check(own, [(inputs, torch.zeros(4)) for inputs, _ in items], "stash", adamw, squares)


def test_a_first_stage_without_parameters() -> None:
    items = vectors(9)
    own = pair(lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)), items[0][0])
    check(own, items, "stash", adamw)
    assert set(own.stage_of.values()) == {1, 2}


class Sparse(Skipping):
    """A table with sparse gradients that is looked up twice; the head's matrix too, or dense before."""

    def __init__(self, words: int, *, first: bool) -> None:
        super().__init__(words)
        self.table, self.first = nn.Embedding(words, 6, sparse=True), first
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.table.weight[:6].mean(1)[:5, None] if self.first else 0.0
        value = value + self.table(tokens)
        for block in self.blocks:
            value = block(value)
        value = value + self.table(tokens)
        return value @ self.positions.weight.T if self.first else self.head(value)


@pytest.mark.parametrize(
    ("staleness", "replicas", "size", "first"),
    [
        ("stash", None, 11, False),
        ("2bw", None, 2000, False),
        ("2bw", None, 11, True),
        ("stash", [2, 1], 2000, True),
        ("2bw", [1, 2], 11, False),
    ],
)
def test_sparse_gradients(staleness: str, replicas: list[int] | None, size: int, first: bool) -> None:
    items = [(tokens, target % 8) for tokens, target in words(6)]
    own = pair(lambda: Sparse(size, first=first), items[0][0], stages=2, replicas=replicas, lanes="inline")
    check(own, items, staleness, plain_sgd)


@pytest.mark.parametrize("first", [False, True])
def test_sparse_gradients_of_a_step(first: bool) -> None:
    (tokens, target), *_ = words(1)
    own = pair(lambda: Sparse(11, first=first), tokens, stages=2)
    own.pipe.train_step(tokens, target=target % 8, loss_fn=cross_entropy)
    cross_entropy(own.plain(tokens), target % 8).backward()
    for parameter, plain in zip(own.model.parameters(), own.plain.parameters(), strict=True):
        assert (parameter.grad is None) == (plain.grad is None)
        if plain.grad is not None:
            torch.testing.assert_close(parameter.grad.to_dense(), plain.grad.to_dense(), rtol=1e-12, atol=1e-12)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def squares(output: Any, target: Any) -> torch.Tensor:
    first = getattr(output, "logits", output)
    return first.double().square().mean()
