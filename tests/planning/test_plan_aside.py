"""A plan that was made with a second core's help is the same to every bit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.aside import second_core
from autosplit.errors import TraceError
from autosplit.planning import sweep, weighing
from autosplit.planning.plan import Plan
from autosplit.profile import trace_memo

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Whatever can be done aside is, on two cores; the process numbers of the children."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for module in (sweep, trace_memo, weighing):
        monkeypatch.setattr(module, "_WORTH", 0)
    made, fork = list[int](), os.fork

    def counted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", counted)
    yield made
    for process in made:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def _planned(memory_limit: str | None) -> Plan:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        model = nn.Sequential(nn.Linear(8, 16), blocks, nn.Linear(16, 9))
    sample = torch.empty((4, 6, 8), device="meta")
    return autosplit.plan(model, "4xL4-24GB", sample=sample, schedule="1f1b", memory_limit=memory_limit)


@pytest.mark.parametrize("memory_limit", [None, "70KiB"])
def test_the_plan_is_the_same(forks: list[int], memory_limit: str | None) -> None:
    alone = _planned(memory_limit)
    assert not forks
    with second_core():
        helped = _planned(memory_limit)
    assert len(forks) > 1
    assert helped.model_dump_json() == alone.model_dump_json()


def test_children_that_die_change_nothing(forks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    alone, counted, here = _planned(None), os.fork, os.getpid()

    def dying() -> int:
        process = counted()
        if os.getpid() != here:
            os._exit(3)
        return process

    monkeypatch.setattr(os, "fork", dying)
    with second_core():
        helped = _planned(None)
    assert len(forks) > 1
    assert helped.model_dump_json() == alone.model_dump_json()


class AtOneSize(nn.Module):
    """Does something at the caller's number of rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        return self.second(value.tanh() if len(value) == 16 else value)


def test_a_model_that_no_graph_follows_is_refused_in_the_same_words(forks: list[int]) -> None:
    with torch.device("meta"):
        model, sample = AtOneSize(), torch.empty((16, 4))
    with pytest.raises(TraceError) as alone:
        autosplit.plan(model, "2xL4-24GB", sample=sample)
    with second_core(), pytest.raises(TraceError) as helped:
        autosplit.plan(model, "2xL4-24GB", sample=sample)
    assert forks
    assert str(helped.value) == str(alone.value)
