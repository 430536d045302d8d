"""Stages traced once: every cut's moments are those of stages that were all traced as they are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Options, Sample
from autosplit.planning.memory import Cut, fullest_moments
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.schedule.catalog import build
from autosplit.schedule.memory.pieces import RankParts, Recompute, StageTraces
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.ladder import Trace, trace

WIDTH, LAYERS, CHUNKS = 8, 5, 3


class Plain(TraceMemo):
    """Knows nothing: every stage is traced as it is."""

    def traces(
        self,
        stage: StageNodes,
        recompute: Recompute,
        *,
        never: How | None,
        recomputed: How | None,
        parts: RankParts | None = None,
    ) -> StageTraces:
        assert parts is None
        one, other = (None if how is None else trace_stage(stage, how) for how in (never, recomputed))
        return StageTraces(recompute, never=one, recomputed=other)


class Block(nn.Module):
    """A residual feed-forward net that turns its input by a value of its own."""

    def __init__(self, tied: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        if tied is not None:
            self.up = tied
        self.angle = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) * torch.cos(self.angle))))


class Net(nn.Module):
    """Blocks between an embedding and a head that may be tied to it."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        blocks = [Block() for _ in range(LAYERS)]
        self.words, self.blocks = nn.Embedding(2200, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 2200, bias=False)
        if tied:
            self.head.weight = self.words.weight
            self.blocks.append(Block(blocks[0].up))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def found(tied: bool) -> tuple[Trace, Any]:
    with torch.device("meta"):
        model, words = Net(tied=tied), torch.zeros(CHUNKS, 4, dtype=torch.long)
    traced = trace(model, Sample(words))
    return traced, profile(traced.graph, rows=1, batch_rows=CHUNKS, inputs=[words[:1]], measure=False)


def cut(tied: bool, stages: int, recompute: Recompute, seed: int) -> Cut:
    """Return a cut at places drawn by a seed, inside blocks too."""
    traced, costs = found(tied)
    names = [info.name for _, info in traced.graph.compute_nodes()]
    places = sorted(random.Random(seed).sample(range(1, len(names)), stages - 1))
    stage_of = {name: sum(number >= place for place in places) for number, name in enumerate(names)}
    options = Options(devices=(torch.device("cpu"),) * stages, chunks=CHUNKS, measure=False)
    schedule = build("1f1b", stages=stages, microbatches=CHUNKS)
    return Cut(traced.graph, costs, options, stage_of, (1,) * CHUNKS, schedule, (recompute,) * stages)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["never", "block", "except_last"])
def test_every_cut_is_as_if_traced_alone(tied: bool, recompute: Recompute) -> None:
    memo = TraceMemo(found(tied)[0].graph)
    for seed in range(2):
        own = cut(tied, 3, recompute, seed)
        assert fullest_moments(own, memo=memo) == fullest_moments(own, memo=Plain(own.traced))


def test_equal_stages_may_be_recomputed_in_different_ways() -> None:
    own = by_block("always", "never", "always", "except_last", "except_last", "except_last")
    assert fullest_moments(own) == fullest_moments(own, memo=Plain(own.traced))


def by_block(*recompute: Recompute) -> Cut:
    """Return a cut with a block per stage, the embedding alone in the first and the head in the last."""
    own = cut(False, 2, "never", 0)
    stage_of = {name: (int(name.split(".")[1][0]) + 1 if name.startswith("blocks") else 0) for name in own.stage_of}
    stage_of |= {name: LAYERS for name in stage_of if name.startswith("head")}
    stages = len(recompute)
    options = Options(devices=(torch.device("cpu"),) * stages, chunks=CHUNKS, measure=False)
    schedule = build("1f1b", stages=stages, microbatches=CHUNKS)
    return Cut(own.traced, own.profile, options, stage_of, own.sizes, schedule, recompute)


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 2},
        {"input_grads": {}},
        {"roots": ()},
        {"averaged": "LAST"},
        {"units": ("blocks.1", "blocks.2")},
        {"whole": True},
        {"apart": True},
        {"kernels": "cuda"},
        {"observed": {"sort(float32[8])": 512}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_ways_to_run_a_stage_are_told_apart(other: dict[str, Any]) -> None:
    traced = found(False)[0].graph
    memo = TraceMemo(traced)
    infos = [info for _, info in traced.compute_nodes()]
    stage = memo.stages.of([info.name for info in infos if info.module.startswith(("blocks.1", "blocks.2"))])
    given = next(node.meta[INFO].name for node in stage.inputs if node.meta[INFO].node_class is NodeClass.MICRO)
    last = stage.outputs[-1].meta[INFO].name
    own = How(1, input_grads={given: True}, roots=(last,))
    changed = replace(own, **{name: last if value == "LAST" else value for name, value in other.items()})

    assert memo.key(stage, own) == memo.key(stage, replace(own))
    assert memo.key(stage, own) != memo.key(stage, changed)


def test_microbatches_of_other_sizes_are_traced_anew() -> None:
    memo = TraceMemo(found(False)[0].graph)
    for rows in (1, 2):
        own = replace(cut(False, 3, "never", 0), sizes=(rows,) * CHUNKS)
        assert fullest_moments(own, memo=memo) == fullest_moments(own, memo=Plain(own.traced))
