"""Autocast around a stream: a minibatch runs in the mode in which it was taken, and no cast keeps an old version."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.runtime.step import sums
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


BATCH = torch.randn(4, 6), torch.randn(4, 6)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def _stream(model: nn.Module, staleness: str) -> Any:
    pipe = autosplit(model, devices=[CPU] * 2, chunks=2, sample=BATCH[0], lanes="inline")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pipe.train_stream([BATCH] * 12, loss_fn=nn.MSELoss(), optimizer=optimizer, staleness=staleness)


@pytest.mark.quick
@pytest.mark.parametrize("staleness", ["stash", "vertical", "2bw"])
def test_a_minibatch_walks_no_model_and_puts_no_weights_into_modules(
    staleness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _layers()
    stream = _stream(model, staleness)
    for _ in range(4):
        next(stream)
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((nn.Module, "named_modules"), (nn.Module, "__setattr__"), (sums, "leaf_of")):
        counted(owner, name)
    for _ in range(4):
        next(stream)
    assert not calls
    monkeypatch.undo()
    stream.drain()


def test_weights_that_a_hook_reads_in_its_module_are_the_minibatchs() -> None:
    """A layer with a hook is called as a module, which has the version of the minibatch then."""
    seen: list[torch.Tensor] = []
    model = _layers()
    model[0][0].register_forward_hook(lambda module, given, made: seen.append(module.weight.detach().clone()))
    before = model[0][0].weight.detach().clone()
    stream = _stream(model, "2bw")
    seen.clear()
    list(stream)
    assert all(torch.equal(own, before) for own in seen[:4])  # two minibatches of two microbatches
    assert not torch.equal(seen[4], before)
    assert len(seen) == 24
