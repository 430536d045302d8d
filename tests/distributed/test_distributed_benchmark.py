"""The benchmark over several processes: what its figures are made of, and what it does in two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import distributed, distributed_step, pairs
from benchmarks.distributed_step import Cells, Torch
from benchmarks.peers_models import CHUNKS, Stage, subjects
from tests.distributed.processes import Pool

CELLS = Cells(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), process_s=(24.0, 25.0), message_bytes=512)


def test_all_cuts_are_timed() -> None:
    assert distributed_step.cuts(4, 2) == [(0, 1), (0, 2), (0, 3)]
    assert distributed_step.cuts(4, 3) == [(0, 1, 2), (0, 1, 3), (0, 2, 3)]


@pytest.mark.parametrize("schedule", distributed_step.SCHEDULES)
def test_the_bound_is_the_simulated_schedule(schedule: str) -> None:
    bound = distributed.bound_s(schedule, CELLS.forward_s, CELLS.backward_s, chunks=8)
    assert bound < 9 * 3.0 if schedule == "zb_h1" else bound == 9 * 3.0  # M + S - 1 cells, less what W fills


def test_messages_delay_the_bound() -> None:
    late = distributed.bound_s("gpipe", (1.0, 1.0), (2.0, 2.0), chunks=8, message_s=0.25)
    assert late == 9 * 3.0 + 2 * 0.25  # the first value there and the last gradient back


def test_what_is_beyond_the_cells_is_ours() -> None:
    readings = [pairs.Reading(wall_s=35.0, process_s=26.5, thread_s=0.0)] * 3
    message_s, own_s = distributed.overhead(readings, CELLS, "1f1b")
    assert message_s == (35.0 - 27.0) / 16
    assert own_s == 1.5


def test_more_ranks_are_simulated_and_say_what_they_compute() -> None:
    exact = distributed.scale(CELLS, message_s=0.0, own_s=0.0)
    assert [entry["ranks"] for entry in exact] == [2, 4, 8, 16, 32, 64]
    assert exact[-1]["computes"] == pytest.approx(256 / (256 + 63))
    slower = distributed.scale(CELLS, message_s=0.0, own_s=CHUNKS * 3.0)  # as much again for every action
    assert slower[-1]["computes"] == pytest.approx(exact[-1]["computes"] / (2 * (1.5 + 1.5) / 3.0), rel=0.02)
    later = distributed.scale(CELLS, message_s=0.5, own_s=0.0)
    assert exact[-1]["computes"] > later[-1]["computes"] > 0.5


def figure(**given: Any) -> dict[str, Any]:
    cells = {"forward": (0.01, 0.01), "backward": (0.02, 0.02)}
    speed = pairs.Spread(1.01, 1.0, 1.02)
    return {
        "model": "mlp",
        "contender": "ours",
        "speed": speed,
        "own_share": 0.01,
        "error": -0.2,
        "cells_s": cells,
    } | given


def test_what_is_asked() -> None:
    figures = [
        figure(),
        figure(contender="ours, auto", own_share=0.03, error=0.05),
        figure(contender="torch", error=None),
        figure(model="empty", own_share=0.5, cells_s={"forward": (1e-6, 1e-6)}),
    ]
    checks = {check.name: (check.asked, check.ok) for check in distributed.checks_of(figures)}
    assert checks == {
        "mlp: ours, over torch": (">= 1", True),
        "mlp: ours, own share of a step": ("<= 0.02", True),
        "mlp: ours, |error|": ("<= 0.1", False),
        "mlp: ours, auto, over torch": (">= 1.03", False),
        "mlp: ours, auto, own share of a step": ("<= 0.02", False),
        "mlp: ours, auto, |error|": ("<= 0.1", True),
        "empty: ours, over torch": (">= 1", True),
    }


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


def _cells() -> tuple[Cells, int]:
    made = subjects()["tiny"].make()
    cells = distributed_step.cells_of(made, (0, 2), repeats=2)
    passed = Stage(made.parts[:2], last=False)(made.batch.tensor_split(CHUNKS)[0])
    return cells, sum(4 * value.numel() for value in passed)


def test_every_rank_has_the_same_cells(ranks: Pool) -> None:
    (cells, sent), (other, _) = ranks(2).run(_cells)
    assert cells == other
    assert cells.message_bytes == sent
    assert len(cells.forward_s) == len(cells.process_s) == 2
    assert min(*cells.forward_s, *cells.backward_s) > 0


def _unequal() -> str:
    class Off(Torch):
        def loss(self) -> float | None:
            loss = super().loss()
            return loss and loss * 1.01

    made = [subjects()["tiny"].make() for _ in range(2)]
    with pytest.raises(ValueError, match="differ") as caught:
        distributed_step.read({"torch": Torch(made[0], (0, 2), "1f1b"), "off": Off(made[1], (0, 2), "1f1b")}, rounds=1)
    return str(caught.value)


def test_contenders_with_other_losses_are_not_read(ranks: Pool) -> None:
    assert all(text.startswith("the losses of round 0 differ: {'torch': ") for text in ranks(2).run(_unequal))


def _trains() -> list[float]:
    losses: list[float] = []

    class Noted(Torch):
        def loss(self) -> float | None:
            loss = super().loss()
            losses.append(0.0 if loss is None else loss)
            return loss

    distributed_step.read({"torch": Noted(subjects()["tiny"].make(), (0, 2), "1f1b")}, rounds=3, calls=2)
    return losses


def test_parameters_are_updated_between_rounds(ranks: Pool) -> None:
    losses = ranks(2).run(_trains)[1]
    assert len(set(losses)) == len(losses) == 4


def _measured(model: str) -> list[dict[str, Any]]:
    return distributed.measure(model, ["torch"], schedule="1f1b", rounds=2)


def test_a_models_figure(ranks: Pool) -> None:
    [found] = ranks(2).run(_measured, "tiny")[0]
    assert found["cuts_s"].keys() == {"(0, 1)", "(0, 2)", "(0, 3)"}
    assert found["wall_s"].median > 0
    assert found["speed"] == pairs.Spread(1.0, 1.0, 1.0)
    assert found["error"] is None
    assert len(found["simulated"]) == len(distributed.SIMULATED_RANKS)
    assert distributed.row(found)["computes at 64 (simulated)"].endswith("%")


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


@pytest.mark.campaign
def test_it_starts_its_own_ranks_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "distributed.json"
    command = [
        "-m",
        "benchmarks.distributed",
        "--models",
        "empty",
        "--only",
        "torch",
        "--rounds",
        "1",
        "--json",
        str(file),
    ]
    given = os.environ | {"PYTHONPATH": str(Path(distributed.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=given, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks, 1f1b, 8 microbatches" in ended.stdout
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [own["contender"] for own in content["figures"]] == ["torch"]
    assert content["figures"][0]["message_bytes"] == distributed.TINY_BYTES
    assert content["settings"]["ranks"] == 2
