"""Ranks of stages up to which nothing is trained run forwards only, and get no gradients."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed.perform import PerformedStep
from autosplit.schedule.entry import Entry
from tests.distributed.processes import Pool
from tests.distributed.replicas import mesh_of

WIDTH, ROWS, LAYERS = 8, 12, 8


def performed(schedule: str, replicas: int) -> tuple[float, list[tuple[set[str], set[str]]]]:
    """Return the largest difference to the plain model's gradients, and of each step what runs, and what is planned.

    The first layers are frozen; then some of them are trained, then they are frozen again.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).double()
    value, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    plain[:6].requires_grad_(False)
    size = dist.get_world_size() // replicas
    where: dict[str, Any] = {"mesh": mesh_of(replicas, size)} if replicas > 1 else {"devices": "torchrun"}
    model = copy.deepcopy(plain)
    pipe = autosplit(model, chunks=4, sample=value, schedule=schedule, **where)
    part, log, worst, do = dist.get_rank() // size if replicas > 1 else 0, set[str](), 0.0, PerformedStep.do
    rows = slice(part * ROWS // replicas, (part + 1) * ROWS // replicas)

    def noting(step: PerformedStep, cells: Any, entry: Entry, *args: Any, **how: Any) -> None:
        log.add(str(entry))
        do(step, cells, entry, *args, **how)

    steps = []
    with mock.patch.object(PerformedStep, "do", noting):
        for trained in (range(6, LAYERS), range(6, LAYERS), range(3, LAYERS), range(6, LAYERS)):
            for number in range(LAYERS):
                for net in (plain, model):
                    net.get_submodule(str(number)).requires_grad_(number in trained)
            plain.zero_grad(), pipe.zero_grad(), log.clear()
            F.mse_loss(plain(value), target).backward()
            pipe.train_step(value[rows], target=target[rows], loss_fn=F.mse_loss)
            wanted = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                expected = wanted[name].grad
                assert (parameter.grad is None) == (expected is None), name
                if expected is not None:
                    worst = max(worst, float((parameter.grad - expected).abs().max()))
            steps.append((set(log), set(map(str, pipe.plan.actions[dist.get_rank() % size]))))
    return worst, steps


def _backwards(texts: set[str]) -> set[str]:
    return {text for text in texts if any(kind in text for kind in ("B", "I", "W")) and "REDUCE" not in text}


@pytest.mark.parametrize(("schedule", "size", "replicas"), [("1f1b", 4, 1), ("zb_h1", 3, 1), ("1f1b", 4, 2)])
def test_ranks_make_gradients_only_where_they_are_needed(ranks: Pool, schedule: str, size: int, replicas: int) -> None:
    found = ranks(size).run(performed, schedule, replicas)
    assert max(worst for worst, _ in found) < 1e-12
    for _, (first, later, _, again) in found:
        assert first[0] == later[0] == again[0] == later[1]
    frozen = [steps for _, steps in found if not _backwards(steps[0][1])]
    assert frozen
    assert all(not _backwards(performed) for steps in frozen for performed, _ in (steps[0], steps[1], steps[3]))
