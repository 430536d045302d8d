"""What a minibatch of a stream does not do again once the pipeline is full."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.runtime.step import sums
from tests.stream.streams import CPU

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
