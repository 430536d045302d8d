"""Repeated blocks of a model on meta: what is not run again is what would have been recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample
from autosplit.errors import TraceError
from autosplit.trace.gather import Gathered, gather
from autosplit.trace.graph import INFO
from autosplit.trace.inputs import flatten
from autosplit.trace.ladder import trace
from autosplit.trace.twins import Twins
from tests.trace.test_repeats import BODIES, LATER, LOG, RUNS, WIDTH, Chain, by_index_and_rows, plain


def gathered(model: nn.Module, rows: int = 7) -> Gathered:
    RUNS.clear()
    device = next(model.parameters()).device
    return gather(model, flatten(model, Sample(torch.zeros(rows, WIDTH, device=device))))


def on_meta(*bodies: Any, **attributes: Any) -> Chain:
    with torch.device("meta"):
        return Chain(*bodies, **attributes)


class Quiet(nn.Module):
    """Counts its runs, and does not look at its index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.up, self.down = index, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        LOG.info("quiet")
        return x + torch.relu(self.down(torch.relu(self.up(x))))


def test_on_meta_equals_run_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Quiet(index) for index in range(4)))
    gathered(model)
    assert RUNS["quiet"] == 4 + LATER + 1
    gathered(model.to_empty(device="cpu"))
    assert RUNS["quiet"] == 4 + LATER + 4


def test_a_block_that_reads_what_is_its_own_runs_at_the_callers_size() -> None:
    with pytest.raises(TraceError, match="forward does other things at 7 rows than at 3, 4, 6"):
        gathered(on_meta(*[by_index_and_rows] * 4))
    gathered(on_meta(*[by_index_and_rows] * 4), rows=8)
    assert dict(RUNS) == {"0": 2 + LATER, "1": 2, "2": 2, "3": 2}


@pytest.mark.parametrize("change", ["number", "list", "new", "buffer", "layer"])
def test_what_was_read_must_be_equal(change: str) -> None:
    model = on_meta(*[plain] * 2)
    first, other = model.blocks
    if change == "buffer":
        other.table = torch.zeros(WIDTH + 1, device="meta")
    twins = Twins(model)
    other.index = first.index
    first.sizes, other.sizes = [1, {"a": 2}], [1, {"a": 2}]  # type: ignore[assignment]
    with twins.watch():
        model(torch.empty(3, WIDTH, device="meta"))
        assert first.sizes
    assert twins.same("blocks.0", "blocks.1") == (change != "buffer")
    if change == "number":
        other.factor = 2.0  # type: ignore[assignment]
    elif change == "list":
        other.sizes = [1, {"a": 3}]  # type: ignore[assignment]
    elif change == "new":
        other.more = 1  # type: ignore[assignment]
    elif change == "layer":
        other.down = nn.Sequential()
    assert not twins.same("blocks.0", "blocks.1")


@pytest.mark.parametrize("name", BODIES)
def test_merged_on_meta_is_the_same_with_and_without_repeats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(*[BODIES[name]] * 3)
    sample = Sample(torch.empty(7, WIDTH, device="meta"))
    found, graph = gathered(model), trace(model, sample).graph
    monkeypatch.setattr("autosplit.trace.gather.equals", lambda *_, **__: {})
    every, plainly = gathered(model), trace(model, sample).graph
    assert found.recording.again
    assert not every.recording.again
    assert repr(found.recording.calls) == repr(every.recording.calls)
    assert repr(found.recording.output) == repr(every.recording.output)
    assert found.min_rows == every.min_rows
    shown = [[(n.op, n.name, str(n.args), repr(n.meta.get(INFO))) for n in g.graph.nodes] for g in (graph, plainly)]
    assert shown[0] == shown[1]
    assert (graph.order, graph.tied, graph.min_rows) == (plainly.order, plainly.tied, plainly.min_rows)


class Flagged(nn.Module):
    """Three blocks; the last one is told whether there is some number of rows, which matters to nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.rows = nn.Linear(WIDTH, WIDTH), rows
        self.blocks = nn.ModuleList(Told() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, told=index == 2 and len(x) == self.rows)
        return x


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, told: bool) -> Tensor:
        return x + torch.relu(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("rows", [1, 4, 6, 7])
def test_a_block_that_is_given_something_else_at_one_size_is_recorded_there(rows: int) -> None:
    with torch.device("meta"):
        told, never = Flagged(rows), Flagged(99)
    found, expected = gathered(told), gathered(never)
    assert repr(found.recording.calls).replace("told=True", "") == repr(expected.recording.calls)
    assert found.min_rows == expected.min_rows == 1


class Tied(nn.Module):
    """An embedding and a head with one weight; the head is used or not, or its weight is used once more."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.embed, self.head = use, nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.other(self.embed(x))
        if self.use == "head":
            return self.head(hidden)
        if self.use == "weight":
            return hidden @ self.embed.weight.t()
        return self.other(hidden) if self.use == "twice" else hidden


@pytest.mark.parametrize("use", ["head", "weight", "nothing", "twice"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_layers_are_entered_as_if_their_uses_had_been_seen_first(
    use: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device(device):
        model = Tied(use)
    flat = flatten(model, Sample(torch.zeros(5, 3, dtype=torch.int64, device=device)))
    found = gather(model, flat)
    monkeypatch.setattr("autosplit.trace.gather.tied_layers", lambda *_: {})
    expected = gather(model, flat)
    assert repr(found.recording.calls) == repr(expected.recording.calls)
    assert found.scope == expected.scope
    assert bool(found.scope.entered) == (use != "nothing")
