"""Repeated blocks traced twice and multiplied: to the change what a trace of all of them says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Sample
from autosplit.profile.blocks import CostMemo, block_trace, shorten
from autosplit.profile.expand import Traces
from autosplit.profile.node_costs.fake import fake_costs
from autosplit.profile.stage_trace import kinds
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.profile.types import NodeProfile
from autosplit.trace.graph import NodeClass, TracedGraph
from autosplit.trace.ladder import trace
from tests.pairwise import in_turn, mostly_slow
from tests.profile.test_stage_kinds import shape

ROWS, LENGTH, WIDTH = 3, 5, 8


class Block(nn.Module):
    """Attention and a feed-forward net, each beside a residual."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH),
        )

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.down(F.gelu(self.up(x)))
        return x if scale is None else x * scale


class Stack(nn.Module):
    """Blocks between an embedding and a head, in the way that ``body`` says."""

    def __init__(self, blocks: list[nn.Module], body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(11, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 11)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = body

    def forward(self, words: Tensor) -> Any:
        return self.body(self, self.words(words))


def plain(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def shared(model: Any, x: Tensor) -> Tensor:
    """All blocks take one value that gradients flow back to."""
    scale = torch.tanh(model.scale) * x.mean()
    for block in model.blocks:
        x = block(x, scale)
    return model.head(x)


def collected(model: Any, x: Tensor) -> list[Tensor]:
    """Every block's result is an output."""
    found = []
    for block in model.blocks:
        x = block(x)
        found.append(x)
    return [model.head(x), *found]


def skipped(model: Any, x: Tensor) -> Tensor:
    """The second block's result goes to the head too."""
    second = x
    for number, block in enumerate(model.blocks):
        x = block(x)
        second = x if number == 1 else second
    return model.head(x + second)


def tied(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return F.linear(x, model.words.weight)


CASES: dict[str, tuple[Callable[[int], list[nn.Module]], Callable[[Any, Tensor], Any], bool]] = {
    "plain": (lambda count: [Block() for _ in range(count)], plain, True),
    "shared": (lambda count: [Block() for _ in range(count)], shared, True),
    "tied": (lambda count: [Block() for _ in range(count)], tied, True),
    "frozen": (lambda count: [Block().requires_grad_(False) for _ in range(count)], plain, True),
    "nested": (lambda count: [nn.Sequential(Block(), Block()) for _ in range(count)], plain, True),
    "inner": (lambda count: [nn.Sequential(*(Block() for _ in range(count))), nn.Tanh()], plain, True),
    "two runs": (lambda count: [Block() for _ in range(count)] + [Block(3 * WIDTH) for _ in range(count)], plain, True),
    "collected": (lambda count: [Block() for _ in range(count)], collected, False),
    "skipped": (lambda count: [Block() for _ in range(count)], skipped, True),
    "uneven": (lambda count: [Block(WIDTH + number) for number in range(count)], plain, False),
}


@cache
def made(name: str, count: int) -> TracedGraph:
    make, body, _ = CASES[name]
    with torch.device("meta"):
        model = Stack(make(count), body).train()
    return trace(model, Sample(torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta"))).graph


@in_turn(share=(1, 2), case=[*((name, "never") for name in CASES), ("shared", "block"), ("tied", "always")])
def test_a_trace_of_few_blocks_expands_to_that_of_all(case: tuple[str, str]) -> None:
    name, recompute = case
    stage = Stages(made(name, 6)).of()
    units = {f"blocks.{number}" for number in range(6)} if recompute == "block" else ()
    how = How(ROWS, units=units, whole=recompute == "always")
    assert shape(block_trace(stage, how)) == shape(trace_stage(stage, how))


@pytest.mark.parametrize("name", mostly_slow(["plain", "tied", "nested", "two runs"], "nested"))
def test_no_block_is_run_that_another_stands_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, ran = Stages(made(name, 6)).of(), []
    monkeypatch.setattr(kinds, "trace_stage", lambda given, how: ran.append(given) or trace_stage(given, how))
    block_trace(stage, How(ROWS))
    (short,) = ran
    assert len(short.computing()) < len(stage.computing())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_left_out_where_they_may_be(name: str) -> None:
    stage = Stages(made(name, 6)).of()
    short, runs = shorten(stage)
    nodes, left = len(stage.computing()), len(short.computing())
    assert (left < nodes) == CASES[name][2]
    if name == "two runs":
        assert [len(run.paths) for run in runs] == [6, 6]


def described(costs: dict[str, NodeProfile]) -> Any:
    numbers: dict[int, int] = {}

    def own(storages: Any) -> list[tuple[int, int]]:
        return [(numbers.setdefault(i, len(numbers)), size) for i, size in storages.items()]

    nodes = costs.values()
    return [(replace(node, saved={}, outputs={}), own(node.outputs), own(node.saved)) for node in nodes]


@in_turn(share=(0, 2), name=list(CASES))
def test_costs_of_few_blocks_are_those_of_all(name: str) -> None:
    graph = made(name, 6)
    assert described(CostMemo(graph).costs(rows=2, batch_rows=ROWS)) == described(
        fake_costs(graph, rows=2, batch_rows=ROWS)
    )


class Turning(nn.Module):
    """Scales by a value of its own that does not depend on the batch: a gradient may flow back to it."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.block, self.angle = Block(), nn.Parameter(torch.ones(WIDTH), requires_grad=learned)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * torch.cos(self.angle).unsqueeze(0))


@in_turn(recompute=("never", "block"), learned=(True, False))
def test_values_of_the_whole_step_that_each_block_takes_for_itself(learned: bool, recompute: str) -> None:
    """As a transformer's layers take sines and cosines: they come from outside of the stage."""
    model = Stack([Turning(learned=learned) for _ in range(6)], plain).train()
    graph = trace(model, Sample(torch.zeros(ROWS, LENGTH, dtype=torch.long))).graph
    infos = [info for _, info in graph.compute_nodes()]
    stage = Stages(graph).of([info.name for info in infos if info.node_class is NodeClass.MICRO])
    units = {f"blocks.{number}" for number in range(6)} if recompute == "block" else ()
    grads = {info.name: learned for info in infos if info.node_class is NodeClass.SHARED}
    how = How(ROWS, input_grads=grads, units=units, apart=True)
    short, runs = shorten(stage, behind=1)
    assert len(short.computing()) < len(stage.computing())
    expanded = block_trace(stage, how) if learned else Traces(runs, trace_stage(short, how)).expanded()
    assert shape(expanded)[:2] == shape(trace_stage(stage, how))[:2]


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_gradients_that_are_there_and_casts_that_autocast_keeps(apart: bool, amp: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        stage = Stages(made.__wrapped__("plain", 5)).of()
        how = How(ROWS, apart=apart)
        short, runs = shorten(stage)
        whole, expanded = trace_stage(stage, how), Traces(runs, trace_stage(short, how)).expanded()
    sizes = [sorted(c for s in t.backward_later for _, c in s.changes) for t in (whole, expanded)]
    assert sizes[0] == sizes[1]
    assert shape(expanded)[:2] == shape(whole)[:2]
    assert len(expanded.kept) == len(whole.kept)
    assert bool(whole.kept) == amp


class Mixing(nn.Module):
    """Adds up rows: what it costs depends on the microbatch and on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).cumsum(0)


@pytest.mark.parametrize(
    "other",
    [{"rows": 3}, {"batch_rows": 2 * ROWS}, {"input_grads": (False,)}, {"kernels": "cuda"}],
    ids=lambda other: next(iter(other)),
)
def test_costs_that_are_known_are_those_of_the_same_question(other: dict[str, Any]) -> None:
    graph = trace(Mixing(), Sample(torch.zeros(ROWS, LENGTH))).graph
    memo = CostMemo(graph)
    asked: dict[str, Any] = {"rows": 2, "batch_rows": ROWS, "input_grads": None, "kernels": "cpu"}
    first = memo.costs(**asked)
    assert all(node is first[name] for name, node in memo.costs(**asked).items())
    again = memo.costs(**asked | other)
    assert any(node is not first[name] for name, node in again.items())
    assert described(again) == described(CostMemo(graph).costs(**asked | other))
