"""The benchmark over several processes: what its figures are made of, and what it does in two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import distributed, distributed_step
from benchmarks.distributed_step import Torch
from benchmarks.peers_models import subjects
from tests.distributed.processes import Pool


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
