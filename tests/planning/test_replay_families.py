"""The quick replay of a cut against the slow one, family by family: every stage traced whole, the allocator itself."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from autosplit.memory.allocator import device_changes, simulate_allocator
from autosplit.memory.pieces import Recompute, StageTraces
from autosplit.options import Options, Sample
from autosplit.planning.memory import Cut, fullest_moments, replayed_stages
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.profile.autocasting import autocast_of
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.stage_trace.stage_graph import StageGraphs
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.profile.stage_trace.trace_memo import Kinds, TraceMemo, Wanted
from autosplit.schedule.catalog import build
from autosplit.trace.ladder import Trace, trace
from benchmarks.families import families

STAGES, CHUNKS = 3, 3
WAYS = [
    ("gpt2", "always", None),
    ("llama", "block", None),
    pytest.param("gpt2", "never", "amp_bf16", marks=pytest.mark.slow),
    pytest.param("resnet50", "never", None, marks=pytest.mark.slow),
    pytest.param("unet", "block", None, marks=pytest.mark.slow),
]


class Slow(TraceMemo):
    """Knows nothing: every stage is copied, and traced as it is."""

    def traces(self, wanted: Iterable[Wanted]) -> list[StageTraces]:
        return [self._slow(own) for own in wanted]

    @staticmethod
    def _slow(own: Wanted) -> StageTraces:
        one, other = (None if how is None else trace_stage(own.stage.copied(), how) for how in own.hows)
        return StageTraces(own.recompute, never=one, recomputed=other)


@cache
def found(name: str, precision: str | None) -> tuple[Trace, Any]:
    family = families()[name]
    with torch.device("meta"):
        model, inputs = family.make(), family.batch(CHUNKS)
    traced = trace(model, Sample(*inputs))
    with autocast_of(precision, kernels="cuda"):
        one = [tensor[:1] for tensor in inputs]
        costs = profile(traced.graph, rows=1, batch_rows=CHUNKS, inputs=one, measure=False, kernels="cuda")
    return traced, costs


def cut(name: str, recompute: Recompute, precision: str | None, *, seed: int) -> Cut:
    """Return a legal cut near places drawn by a seed, inside of blocks too."""
    traced, costs = found(name, precision)
    names = [info.name for _, info in traced.graph.compute_nodes()]
    places = sorted(random.Random(seed).sample(range(1, len(names)), STAGES - 1))
    wanted = {name: sum(number >= place for place in places) for number, name in enumerate(names)}
    devices = tuple(torch.device("cuda", number) for number in range(STAGES))
    options = Options(devices=devices, chunks=CHUNKS, measure=False, precision=precision)
    schedule = build("1f1b", stages=STAGES, microbatches=CHUNKS)
    stage_of = assign(DataflowIndex(traced.graph), wanted, stages=STAGES)
    return Cut(traced.graph, costs, options, stage_of, (1,) * CHUNKS, schedule, (recompute,) * STAGES)


@pytest.mark.parametrize(("name", "recompute", "precision"), WAYS)
def test_the_quick_replay_is_the_slow_one(name: str, recompute: Recompute, precision: str | None) -> None:
    memo = TraceMemo()
    with autocast_of(precision, kernels="cuda"):
        for seed in range(2):
            own = cut(name, recompute, precision, seed=seed)
            quick = fullest_moments(own, memo=memo)
            if seed:  # the first fills the memo
                assert quick == fullest_moments(own, memo=Slow())
        stages = replayed_stages(own, memo=memo, stages=range(STAGES))
    traces = {stage: each.traces for stage, each in stages.items()}
    changes = list(device_changes(own.schedule, traces, [each.static for each in stages.values()], device=0))
    assert len(changes) > 100
    reserved = simulate_allocator(changes)
    assert reserved.requested_peak_bytes <= reserved.allocated_peak_bytes <= reserved.reserved_peak_bytes


@pytest.mark.parametrize("name", ["gpt2", "llama", "unet"])
def test_a_stage_that_was_not_copied_has_the_key_of_its_copy(name: str) -> None:
    """And says of its inputs and outputs what the recording does."""
    graph = found(name, None)[0].graph
    graphs, kinds = StageGraphs(graph), Kinds()
    own = cut(name, "never", None, seed=0)
    for stage in range(STAGES):
        names = {info.name for info in own.nodes[stage]}
        nodes = graphs.nodes(names)
        copy, how = nodes.copied(), How(1, kernels="cuda")
        assert kinds.key(nodes, how) == kinds.key(copy, how)
        assert [info.name for _, info in copy.computing()] == [info.name for info in own.nodes[stage]]
        outside = {node for node in graph.graph.nodes if node not in nodes.own}
        assert all(any(user in outside for user in node.users) for node in nodes.outputs)
        assert outside.issuperset(nodes.inputs)
        assert outside.union(copy.given).isdisjoint(nodes.own)
