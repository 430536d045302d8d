"""Streams of stages with replicas: what the reference computes, in float64 to 1e-12; one stage is data parallel."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError, autosplit
from tests.stream.streams import (
    Normed,
    Pair,
    Skipping,
    adamw,
    cross_entropy,
    expected,
    pair,
    run,
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
    check(replicas, staleness, optimizer, words(14, rows=(6, 6, 5, 2)), lanes=lanes, make=lambda: Skipping(dropout=0.3))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 1, 1], [1, 2, 1], [3, 1]], ids=str)
@pytest.mark.parametrize("staleness", ["stash", "2bw"])
@pytest.mark.parametrize("optimizer", MAKES)
def test_50_minibatches_with_skips_and_ties(replicas: list[int], staleness: str, optimizer: str) -> None:
    check(replicas, staleness, optimizer, words(50, rows=(6,)))


def check(replicas: list[int], staleness: str, optimizer: str, items: Any, *, make: Any = Skipping, **how: Any) -> None:
    """Compare a stream with the reference."""
    own = replicated(replicas, items[0][0], make, **how)
    assert [stage.replicas for stage in own.pipe.plan.stages] == replicas
    found = run(own, items, staleness, MAKES[optimizer])
    assert found == pytest.approx(expected(own, items, staleness, MAKES[optimizer]), rel=1e-12, abs=1e-12)
    own.assert_equal()


def test_running_statistics_are_updated_in_the_loaders_order() -> None:
    items = vectors(11, rows=(6,))
    own = replicated([1, 2], items[0][0], Normed)
    assert run(own, items, "stash", adamw) == pytest.approx(expected(own, items, "stash", adamw), rel=1e-12)
    own.assert_equal()


@pytest.fixture
def own() -> Pair:
    torch.manual_seed(1)
    items = words(13, rows=(6,))
    made = replicated([2, 1, 1], items[0][0])
    made.find_stages(items[0])
    return made


def test_a_drain_ends_a_round_early_and_the_next_begins_anew(own: Pair) -> None:
    items = words(13, rows=(6,))
    optimizer = sgd(list(own.model.parameters()))
    stream = own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=optimizer)
    losses = [next(stream).item() for _ in range(4)]
    stream.drain()
    done = stream.minibatches
    losses += [loss.item() for loss in stream]
    assert stream.minibatches == len(items)
    assert losses == pytest.approx(expected(own, items, "stash", sgd, drains=[done]), rel=1e-12)
    own.assert_equal()


def test_a_saved_stream_is_resumed_and_a_synchronous_step_follows(own: Pair) -> None:
    items = words(12, rows=(6,))
    first = own.pipe.train_stream(items[:7], loss_fn=cross_entropy, optimizer=adamw)
    list(first)
    model = Skipping().double()
    model.load_state_dict(own.model.state_dict())
    pipe = autosplit(model, plan=own.pipe.plan, **own.how)
    second = pipe.train_stream(items[7:], loss_fn=cross_entropy, optimizer=adamw)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    list(second)
    expected(own, items, "stash", adamw, drains=[7])
    torch.testing.assert_close(model.state_dict(), own.plain.state_dict(), rtol=1e-12, atol=1e-12)
    own.plain.zero_grad()
    tokens, target = items[0]
    loss = pipe.train_step(tokens, target=target, loss_fn=cross_entropy)
    wanted = cross_entropy(own.plain(tokens), target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(model.parameters(), own.plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", ["loss", "loader"])
@pytest.mark.parametrize("at", [0, 1, 6, 7])
def test_an_error_leaves_the_stages_as_after_a_stream_that_ends_there(own: Pair, where: str, at: int) -> None:
    items = words(13, rows=(6,))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if (target == -1).all():
            raise ValueError("no target")
        return cross_entropy(output, target)

    def loader() -> Iterator[Any]:
        for number, (tokens, target) in enumerate(items):
            if number == at and where == "loader":
                raise ValueError("no minibatch")
            yield tokens, torch.full_like(target, -1) if number == at else target

    stream, found = own.pipe.train_stream(loader(), loss_fn=loss, optimizer=sgd), []
    with pytest.raises(ValueError, match="no ") as caught:
        found += (value.item() for value in stream)
    assert len(found) == stream.minibatches == at
    if where == "loss":
        assert f"all stages are as after {at} minibatches" in "".join(caught.value.__notes__)
    assert found == pytest.approx(expected(own, items[:at], "stash", sgd), rel=1e-12)
    own.assert_equal()


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


def test_what_does_not_go_with_replicas(own: Pair) -> None:
    items = words(5, rows=(6,))
    before = copy.deepcopy(own.model.state_dict())
    with pytest.raises(InputError, match="'vertical' is one version on all stages"):
        next(own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=sgd, staleness="vertical"))
    odd = pair(Skipping, items[0][0], chunks=3, replicas=[2, 1])
    with pytest.raises(InputError, match="3 microbatches of a minibatch evenly"):
        next(odd.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=sgd, staleness="2bw"))
    with pytest.raises(InputError, match="'vertical' is one version on all stages"):
        own.pipe.plan.version_bytes("vertical")
    torch.testing.assert_close(own.model.state_dict(), before, rtol=0, atol=0)
