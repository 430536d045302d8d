"""A stage run alone on the CPU under its schedule, by the allocator's own events, against the replay of its trace."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosplit.devices import Allocations
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.memory.pieces import Recompute, StageTraces
from autosplit.schedule.memory.replay import StaticBytes, replay
from autosplit.schedule.memory.updates import Updated, optimizer_changes
from tests.models.blocks import wide_blocks
from tests.profile.graphs import traced

WIDTH, ROWS, LENGTH = 64, 4, 32
SHAPE = (ROWS, LENGTH, WIDTH)
SCALARS_BYTES = 100
"""Numbers that torch wraps in tensors."""


@cache
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *wide_blocks(2, WIDTH, norm=True))


@cache
def stage(recompute: Recompute) -> StageTraces:
    graph = Stages(traced(model(), torch.zeros(2, LENGTH, WIDTH))).of()
    plain, again = (
        trace_stage(graph, How(rows=ROWS, input_grads={"input/input_1": True}, whole=whole)) for whole in (False, True)
    )
    return StageTraces(
        recompute,
        never=None if recompute == "always" else plain,
        recomputed=None if recompute == "never" else again,
    )


def run(lane: tuple[Action, ...], recompute: Recompute, *, adam: bool) -> int:
    """The most bytes that one step of a lane allocates."""
    net = model()
    optimizer = _with_state(net) if adam else None
    net.zero_grad(set_to_none=True)
    last = max(action.microbatch for action in lane)
    live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with Allocations() as found:
        for action in lane:
            if action.kind == "F":
                x = torch.empty(SHAPE).requires_grad_(True)
                plain = recompute == "never" or (recompute == "except_last" and action.microbatch == last)
                y = net(x) if plain else checkpoint(net, x, use_reentrant=False)
                live[action.microbatch] = x, y
            else:
                x, y = live.pop(action.microbatch)
                cotangent = torch.empty(SHAPE)
                y.backward(cotangent)
                x.grad = None
                del cotangent
            del x, y
        if optimizer is not None:
            optimizer.step()
    return found.peak_bytes


def _with_state(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize(("name", "device", "microbatches"), [("gpipe", 0, 3), ("1f1b", 0, 5), ("1f1b", 2, 5)])
def test_replay_is_what_the_allocator_did(
    name: str, device: int, microbatches: int, recompute: Recompute, *, adam: bool
) -> None:
    schedule = build(name, stages=3, microbatches=microbatches)
    updated = [Updated(p.numel()) for p in model().parameters()]
    finish = {device: optimizer_changes(updated, name="adam", foreach=False)} if adam else {}
    replayed = replay(schedule, dict.fromkeys(range(3), stage(recompute)), [StaticBytes()] * 3, finish=finish)
    found = run(schedule.lanes[device], recompute, adam=adam)
    short = found - replayed[device].peak_bytes
    held = schedule.in_flight[device]
    random_state = 0 if recompute == "never" else held * torch.get_rng_state().numel()
    assert -SCALARS_BYTES <= short <= random_state + SCALARS_BYTES
