"""The example that runs a plan by torch's own engine: every schedule, the chain's cut, and its start by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import distributed, distributed_step
from benchmarks.distributed_step import Torch
from benchmarks.peers_models import subjects
from examples import torch_pipelining_from_plan as example
from tests.distributed.processes import Pool

EXAMPLE = Path(example.__file__)


def trained(schedule: str, layers: int) -> tuple[float, float, bool]:
    """Run the example and return its number of stages, its largest difference, and whether its losses fall."""
    outcome = example.run(
        schedule=schedule, chunks=4, steps=4, rows=8, layers=layers, dtype=torch.float64, device=torch.device("cpu")
    )
    assert set(outcome.differences) == {"loss", "parameters of all stages"}
    losses = outcome.losses["torch's engine"]
    return outcome.figures["stages"], max(outcome.differences.values()), losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v"])
def test_torchs_engine_trains_by_the_plan_as_the_plain_model(schedule: str, ranks: Pool) -> None:
    each = 1 if schedule in ("gpipe", "1f1b", "zb_h1") else 2
    for stages, difference, falls in ranks(2).run(trained, schedule, 4):
        assert stages == 2 * each
        assert difference < 1e-12
        assert falls


def test_torchrun_starts_it() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--steps", "2"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=given, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"lane 1 \| .* 1F0", ended.stdout)
    assert re.search(r"parameters of all stages +\S+  equal", ended.stdout)


def _gradients(cut: tuple[int, ...], schedule: str) -> float:
    made, whole = subjects()["tiny"].make(), subjects()["tiny"].make()
    contender = Torch(made, cut, schedule)
    contender.step()
    whole.subject.loss(whole.whole()(whole.batch), whole.target).backward()
    own, expected = (
        list(distributed_step.stage_of(one, cut, torch.distributed.get_rank()).parameters()) for one in (made, whole)
    )
    assert own
    return max(float((a.grad - b.grad).abs().max()) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("schedule", distributed_step.SCHEDULES)
def test_the_peer_has_the_plain_gradients(schedule: str, ranks: Pool) -> None:
    assert max(ranks(2).run(_gradients, (0, 2), schedule)) < 1e-6


def _compared() -> list[dict[str, Any]]:
    return distributed.measure("tiny", distributed.NAMES, schedule="1f1b", rounds=2)


def test_ours_trains_beside_the_peer_and_is_compared_with_it(ranks: Pool) -> None:
    found = {own["contender"]: own for own in ranks(2).run(_compared)[0]}
    assert list(found) == ["torch", "ours", "ours, auto"]
    ours = found["ours"]
    assert len(ours["stages"]) == 2
    assert ours["schedule"] == "1f1b"
    assert ours["error"] == pytest.approx(ours["predicted_s"] / ours["wall_s"].median - 1)
    assert ours["speed"].low <= ours["speed"].median <= ours["speed"].high != 1.0
