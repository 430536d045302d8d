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
from tests.trace.test_repeats import BODIES, LATER, RUNS, WIDTH, Chain, by_index_and_rows


def gathered(model: nn.Module, rows: int = 7) -> Gathered:
    RUNS.clear()
    device = next(model.parameters()).device
    return gather(model, flatten(model, Sample(torch.zeros(rows, WIDTH, device=device))))


def on_meta(*bodies: Any, **attributes: Any) -> Chain:
    with torch.device("meta"):
        return Chain(*bodies, **attributes)


def test_a_block_that_reads_what_is_its_own_runs_at_the_callers_size() -> None:
    with pytest.raises(TraceError, match="forward does other things at 7 rows than at 3, 4, 6"):
        gathered(on_meta(*[by_index_and_rows] * 4))
    gathered(on_meta(*[by_index_and_rows] * 4), rows=8)
    assert dict(RUNS) == {"0": 2 + LATER, "1": 2, "2": 2, "3": 2}


@pytest.mark.parametrize("name", BODIES)
def test_merged_on_meta_is_the_same_with_and_without_repeats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(*[BODIES[name]] * 3)
    sample = Sample(torch.empty(7, WIDTH, device="meta"))
    found, graph = gathered(model), trace(model, sample).graph
    monkeypatch.setattr("autosplit.trace.gather.equals", lambda *_, **__: {})
    every, plainly = gathered(model), trace(model, sample).graph
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
