"""Streams of stages with replicas: what the reference computes, in float64 to 1e-12; one stage is data parallel."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError
from tests.stream.streams import (
    Normed,
    Pair,
    Skipping,
    adamw,
    check,
    cross_entropy,
    pair,
    sgd,
    vectors,
    words,
)

MAKES = {"sgd": sgd, "adamw": adamw}
CHUNKS = 6
"""What 2 and 3 divide."""


def replicated(replicas: list[int], sample: Any, make: Any = Skipping, **how: Any) -> Pair:
    """Split a model of seed 0 into stages with replicas."""
    return pair(make, sample, chunks=CHUNKS, replicas=replicas, **how)


@pytest.mark.parametrize(
    ("replicas", "staleness", "optimizer", "lanes"),
    [
        ([2, 1], "stash", "adamw", "threads"),
        ([1, 2, 1], "stash", "sgd", "threads"),
        ([1, 2], "2bw", "adamw", "threads"),
        ([3, 1], "stash", "sgd", "inline"),
        ([2, 1, 1], "2bw", "sgd", "inline"),
    ],
)
def test_losses_and_weights_are_the_references(replicas: list[int], staleness: str, optimizer: str, lanes: str) -> None:
    items = words(14, rows=(6, 6, 5, 2))
    own = replicated(replicas, items[0][0], lambda: Skipping(dropout=0.3), lanes=lanes)
    check(own, items, staleness, MAKES[optimizer])
    assert [stage.replicas for stage in own.pipe.plan.stages] == replicas


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 1, 1], [1, 2, 1], [3, 1]], ids=str)
@pytest.mark.parametrize("staleness", ["stash", "2bw"])
@pytest.mark.parametrize("optimizer", MAKES)
def test_50_minibatches_with_skips_and_ties(replicas: list[int], staleness: str, optimizer: str) -> None:
    items = words(50, rows=(6,))
    check(replicated(replicas, items[0][0]), items, staleness, MAKES[optimizer])


def test_running_statistics_are_updated_in_the_loaders_order() -> None:
    items = vectors(11, rows=(6,))
    check(replicated([1, 2], items[0][0], Normed), items, "stash", adamw)


def test_a_loss_behind_one_that_fails_is_not_returned() -> None:
    items = [(torch.randn(4, 6, dtype=torch.float64), torch.full((4,), number)) for number in range(4)]
    own = pair(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), items[0][0], replicas=[2])
    other = threading.Event()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target[0] == 1:
            other.set()
        elif target[0] == 0:
            assert other.wait(10)
            raise ValueError("no loss")
        return output.square().mean()

    before = copy.deepcopy(own.model.state_dict())
    with pytest.raises(ValueError, match="no loss"):
        next(own.pipe.train_stream(items, loss_fn=loss, optimizer=sgd))
    torch.testing.assert_close(own.model.state_dict(), before, rtol=0, atol=0)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        self.seen.add_(1)
        return self.second(value)


def test_a_buffer_that_replicas_would_change_in_no_order_is_refused() -> None:
    items = vectors(3, rows=(6,))
    own = replicated([2], items[0][0], Counting)
    with pytest.raises(InputError, match="changes 'seen', which replicas"):
        next(own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=sgd))


def test_what_does_not_go_with_replicas() -> None:
    items = words(5, rows=(6,))
    own = replicated([2, 1, 1], items[0][0])
    before = copy.deepcopy(own.model.state_dict())
    with pytest.raises(InputError, match="'vertical' is one version on all stages"):
        next(own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=sgd, staleness="vertical"))
    odd = pair(Skipping, items[0][0], chunks=3, replicas=[2, 1])
    with pytest.raises(InputError, match="3 microbatches of a minibatch evenly"):
        next(odd.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=sgd, staleness="2bw"))
    with pytest.raises(InputError, match="'vertical' is one version on all stages"):
        own.pipe.plan.version_bytes("vertical")
    torch.testing.assert_close(own.model.state_dict(), before, rtol=0, atol=0)
