"""Repeated blocks: each runs once at the first size, one of its equals at the later ones, with the same recording."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample
from autosplit.trace.gather import gather, record_at
from autosplit.trace.inputs import flatten
from autosplit.trace.ladder import trace
from autosplit.trace.merge import BATCH_SIZES
from autosplit.trace.recording import Attribute, Call, Recording
from autosplit.trace.repeats import Repeats, equals
from autosplit.trace.run import FlatInputs
from autosplit.trace.scope import Scope

WIDTH = 6
RUNS: Counter[str] = Counter()
"""How often the Python of each block ran; blocks are known by their mark."""
LOG = logging.getLogger(__name__)
"""Counts runs by its handler: what a forward changes itself is put back after a recording, or is left by the call."""


class _Counting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        RUNS[record.getMessage()] += 1


LOG.addHandler(_Counting())
LOG.setLevel(logging.INFO)
LOG.propagate = False
Body = Callable[[Any, Tensor], Any]


def plain(block: Any, x: Tensor) -> Tensor:
    return x + block.down(torch.relu(block.up(x))) * block.factor


class Block(nn.Module):
    """Two linear layers, a buffer, a number of its own, and a forward that a case brings along."""

    table: Tensor

    def __init__(self, index: int, body: Body, factor: float) -> None:
        super().__init__()
        self.index, self.factor, self._body = index, factor, body
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        LOG.info(f"{self.index}")
        return self._body(self, x)


class Chain(nn.Module):
    """An embedding, blocks one after the other, and a head."""

    def __init__(self, *bodies: Body, factors: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        given = factors or (1.0,) * len(bodies)
        pairs = enumerate(zip(bodies, given, strict=True))
        self.blocks = nn.ModuleList(Block(index, body, factor) for index, (body, factor) in pairs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(model: nn.Module, rows: int = 7) -> FlatInputs:
    return flatten(model, Sample(torch.randn(rows, WIDTH)))


def runs_of(model: nn.Module, rows: int = 7) -> dict[str, int]:
    """Return how often each block's Python ran while the model was recorded and merged, by index."""
    flat = inputs(model, rows)
    RUNS.clear()
    gather(model, flat)
    return dict(RUNS)


def alike_of(model: nn.Module, rows: int = 7) -> dict[str, str]:
    """Return which modules are each other's equals, by a recording at the first size."""
    first = record_at(model, inputs(model, rows), BATCH_SIZES[0], Scope())
    return equals(first.calls, first.segments, {path: type(module) for path, module in model.named_modules()})


LATER = len(BATCH_SIZES[1:]) + 1
"""Recordings that follow equals: at the other sizes and at one row; the caller's own size runs every block."""


def test_every_block_runs_at_the_first_and_the_callers_size_and_one_at_the_others() -> None:
    assert runs_of(Chain(*[plain] * 4)) == {"0": 2 + LATER, "1": 2, "2": 2, "3": 2}


def gated(block: Any, x: Tensor) -> Tensor:
    return x + block.down(torch.sigmoid(block.up(x))) * block.factor


def test_alternating_blocks_are_two_kinds() -> None:
    model = Chain(plain, gated, plain, gated, plain, gated)
    assert alike_of(model) == {
        "blocks.2": "blocks.0",
        "blocks.3": "blocks.1",
        "blocks.4": "blocks.0",
        "blocks.5": "blocks.1",
    }
    assert runs_of(model) == {"0": 2 + LATER, "1": 2 + LATER, "2": 2, "3": 2, "4": 2, "5": 2}


def test_blocks_that_differ_in_a_constant_are_told_apart() -> None:
    model = Chain(*[plain] * 4, factors=(0.5, 0.25, 0.5, 0.125))
    assert alike_of(model) == {"blocks.2": "blocks.0"}


def by_index(block: Any, x: Tensor) -> Tensor:
    hidden = block.down(torch.relu(block.up(x)))
    return x + (torch.tanh(hidden) if block.index == 2 else torch.sin(hidden))


def test_python_that_depends_on_the_index_is_told_apart() -> None:
    model = Chain(*[by_index] * 4)
    assert alike_of(model) == {"blocks.1": "blocks.0", "blocks.3": "blocks.0"}
    names = [info.name for _, info in trace(model, Sample(torch.randn(7, WIDTH))).graph.compute_nodes()]
    assert [f"blocks.{i}#0/{'tanh' if i == 2 else 'sin'}_0" in names for i in range(4)] == [True] * 4


def by_index_and_rows(block: Any, x: Tensor) -> Tensor:
    hidden = block.down(torch.relu(block.up(x)))
    return x + hidden * (2 if block.index == 2 and len(x) == 7 else 1)


def test_what_only_one_block_does_at_the_callers_size_is_found() -> None:
    model = Chain(*[by_index_and_rows] * 4)
    with pytest.raises(Exception, match="forward does other things at 7 rows than at 3, 4, 6"):
        gather(model, inputs(model, 7))
    assert alike_of(model).keys() == {"blocks.1", "blocks.2", "blocks.3"}
    gather(model, inputs(model, 8))


def casts(block: Any, x: Tensor) -> Tensor:
    """Cast to what it is already: the operation returns its operand, and stands for it from then on."""
    x = x.to(torch.float32).contiguous()
    return x + block.down(torch.relu(block.up(x)).to(torch.float32))


def in_place(block: Any, x: Tensor) -> Tensor:
    hidden = block.up(x)
    hidden.mul_(2).relu_()
    out = block.down(hidden)
    out[:, 0] = 0
    return out


def changes_its_input(block: Any, x: Tensor) -> Tensor:
    x.add_(block.down(torch.relu(block.up(x))))
    return x


def counts(block: Any, x: Tensor) -> Tensor:
    block.table.add_(1)
    return x + block.down(torch.relu(block.up(x))) + block.table


def views(block: Any, x: Tensor) -> Tensor:
    left, right = block.up(x).chunk(2, -1)
    return (left * right.sigmoid()).view(-1, WIDTH)[: x.shape[0]]


def early(block: Any, x: Tensor) -> Tensor:
    """Return the input itself after doing work on the side."""
    block.down(torch.relu(block.up(x) * 2))
    return x


BODIES = {body.__name__: body for body in (plain, casts, in_place, changes_its_input, counts, views, early)}


def shown(recording: Recording) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return all that a recording says, without source lines; storages by the order of their first use."""
    numbers: dict[int, int] = {-1: -1}

    def renumbered(found: list[int]) -> list[int]:
        return [numbers.setdefault(number, len(numbers)) for number in found]

    calls = []
    for call in recording.calls:
        said = {field.name: getattr(call, field.name) for field in fields(Call) if field.name != "source"}
        for name in ("storages", "reads_storages", "mutates"):
            said[name] = renumbered(said[name])
        calls.append(said)
    return calls, recording.output


@pytest.mark.parametrize("name", BODIES)
def test_what_is_written_again_is_what_the_block_would_have_done(name: str) -> None:
    model = Chain(*[BODIES[name]] * 3)
    flat = inputs(model)
    alike = alike_of(model)
    assert alike == {"blocks.1": "blocks.0", "blocks.2": "blocks.0"}
    for rows in (1, 4, 7):
        RUNS.clear()
        repeated = record_at(model, flat, rows, Scope(), repeats=Repeats(alike))
        assert dict(RUNS) == {"0": 1}
        every = record_at(model, flat, rows, Scope())
        calls, output = shown(repeated)
        expected, expected_output = shown(every)
        assert [call["name"] for call in calls] == [call["name"] for call in expected]
        for mine, other in zip(calls, expected, strict=True):
            assert mine == other
        assert output == expected_output


def test_copied_calls_have_the_blocks_own_parameters_and_buffers() -> None:
    model = Chain(*[counts] * 3)
    flat = inputs(model)
    alike = alike_of(model)
    calls = {c.name: c for c in record_at(model, flat, 4, Scope(), repeats=Repeats(alike)).calls}
    for index in range(3):
        assert calls[f"blocks.{index}.up#0"].reads == [f"blocks.{index}.up.weight", f"blocks.{index}.up.bias"]
        assert calls[f"blocks.{index}.up#0"].target == calls[f"blocks.{index}.up#0"].leaf == f"blocks.{index}.up"
        assert calls[f"blocks.{index}#0/add_0"].writes == [f"blocks.{index}.table"]
        assert calls[f"blocks.{index}#0/add_0"].args[0] == Attribute(f"blocks.{index}.table")
        assert calls[f"blocks.{index}.up#0"].source == calls["blocks.0.up#0"].source


@pytest.mark.parametrize("name", BODIES)
def test_merged_recordings_are_the_same_with_and_without_repeats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(*[BODIES[name]] * 3)
    flat = inputs(model)
    found = gather(model, flat)
    monkeypatch.setattr("autosplit.trace.gather.equals", lambda *_, **__: {})
    RUNS.clear()
    every = gather(model, flat)
    assert set(RUNS.values()) == {2 + LATER}
    assert [m.call.name for m in found.recording.calls] == [m.call.name for m in every.recording.calls]
    for mine, other in zip(found.recording.calls, every.recording.calls, strict=True):
        assert (mine.args, mine.kwargs, mine.tensors) == (other.args, other.kwargs, other.tensors)
    assert found.min_rows == every.min_rows


def test_blocks_that_are_called_twice_run_every_time() -> None:
    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x)

    model = Twice(*[plain] * 2)
    assert alike_of(model) == {}
    assert set(runs_of(model).values()) == {2 * (3 + LATER)}


def test_a_block_that_is_given_something_else_runs_itself() -> None:
    """Its equal was given half as many features at this size: what it did says nothing."""

    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block(index, plain, 1.0) for index in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](self.first(x)))
            return self.last(self.blocks[2](x[None] if len(x) > 3 else x)).reshape(-1, WIDTH)

    model = Widening()
    flat = inputs(model)
    RUNS.clear()
    record_at(model, flat, 4, Scope(), repeats=Repeats({"blocks.1": "blocks.0", "blocks.2": "blocks.0"}))
    assert dict(RUNS) == {"0": 1, "2": 1}
