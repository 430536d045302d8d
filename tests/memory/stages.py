"""Traces of real stages: blocks of several widths, under every way to recompute, with autocast and without."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from autosplit.options import Sample
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.schedule.memory.pieces import Recompute, StageTrace, StageTraces
from autosplit.trace.ladder import trace as traced
from tests.models.blocks import wide_blocks

ROWS, LENGTH = 2, 3


def stage(width: int, blocks: int, *, logits: int = 0) -> nn.Sequential:
    """Return some blocks, with a head behind them where it is the last stage."""
    head = [nn.Linear(width, logits)] if logits else []
    return nn.Sequential(*wide_blocks(blocks, width, norm=True), *head)


@cache
def _trace(width: int, blocks: int, logits: int, cast: bool, how: str) -> StageTrace:
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        graph = traced(stage(width, blocks, logits=logits), Sample(torch.zeros(ROWS, LENGTH, width))).graph
        units = {str(block) for block in range(blocks)} if how == "block" else ()
        return trace_stage(Stages(graph).of(), How(ROWS, units=units, whole=how == "always"))


def traces(
    width: int, blocks: int = 1, recompute: Recompute = "never", *, logits: int = 0, cast: bool = False
) -> StageTraces:
    """Return the traces that a stage needs under ``recompute``; "except_last" recomputes the stage as a whole."""
    how = "block" if recompute == "block" else "always"
    return StageTraces(
        recompute=recompute,
        never=_trace(width, blocks, logits, cast, "never") if recompute in ("never", "except_last") else None,
        recomputed=_trace(width, blocks, logits, cast, how) if recompute != "never" else None,
    )


def model(stages: int, recompute: Recompute = "never", *, cast: bool = False) -> dict[int, StageTraces]:
    """Return the traces of stages of unequal width and depth; the last one has a head."""
    return {
        index: traces(4 + 2 * (index % 3), 1 + index % 2, recompute, logits=50 if index == stages - 1 else 0, cast=cast)
        for index in range(stages)
    }
