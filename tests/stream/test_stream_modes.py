"""Autocast around a stream: a minibatch runs in the mode in which it was taken, and no cast keeps an old version."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from tests.stream.streams import CPU

WIDTH = 16


def stream_of(lanes: str, lr: float) -> Any:
    """Return a stream of one minibatch over and over."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    item = torch.randn(4, WIDTH), torch.randint(WIDTH, (4,))
    pipe = autosplit(model, devices=[CPU] * 2, chunks=1, sample=item[0], lanes=lanes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return pipe.train_stream(itertools.repeat(item), loss_fn=_loss, optimizer=optimizer)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def _losses(lanes: str, is_on: Callable[[int], bool]) -> list[float]:
    """Return the losses by weights that stay as they are, with autocast on or off before each."""
    stream, found = stream_of(lanes, 0.0), list[float]()
    for number in range(16):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on(number)):
            found.append(next(stream).item())
    stream.drain()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_a_minibatch_runs_in_the_mode_in_which_it_was_taken(lanes: str) -> None:
    (full,), (half,) = set(_losses(lanes, lambda _: False)), set(_losses(lanes, lambda _: True))
    assert full != half
    for before, after, is_on in ((full, half, lambda n: n >= 6), (half, full, lambda n: n < 6)):
        losses = _losses(lanes, is_on)
        first = losses.index(after)
        assert losses == [before] * first + [after] * (16 - first)
        assert 6 < first < 10  # what was in flight goes first


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_autocast_around_the_loop_keeps_no_old_versions(lanes: str) -> None:
    def weights() -> int:
        gc.collect()
        return sum(
            issubclass(type(found), nn.Parameter) and found.shape == (WIDTH, WIDTH) for found in gc.get_objects()
        )

    with torch.autocast("cpu", torch.bfloat16):
        stream = stream_of(lanes, 0.1)
        for _ in range(4):
            next(stream)
        with stream.paused():
            before = weights()
        for _ in range(20):
            next(stream)
        with stream.paused():
            assert weights() <= before + 8  # lanes may be at other cells
        stream.drain()
