"""The quick replay of a cut against the slow one, family by family: every stage traced whole."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from autosplit.options import Options, Sample
from autosplit.planning.memory import Cut, fullest_moments
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.profile.autocasting import autocast_of
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.schedule.catalog import build
from autosplit.schedule.memory.pieces import Recompute
from autosplit.trace.ladder import Trace, trace
from benchmarks.families import families
from tests.profile.test_trace_memo import Plain

STAGES, CHUNKS = 3, 3
WAYS = [
    ("gpt2", "always", None),
    ("llama", "block", None),
    pytest.param("gpt2", "never", "amp_bf16", marks=pytest.mark.slow),
    pytest.param("resnet50", "never", None, marks=pytest.mark.slow),
    pytest.param("unet", "block", None, marks=pytest.mark.slow),
]


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
    memo = TraceMemo(found(name, precision)[0].graph)
    with autocast_of(precision, kernels="cuda"):
        for seed in range(2):
            own = cut(name, recompute, precision, seed=seed)
            quick = fullest_moments(own, memo=memo)
            if seed:  # the first fills the memo
                assert quick == fullest_moments(own, memo=Plain(own.traced))
