"""The comparison with peers: what its figures and checks are made of, and that every contender does the same work."""

from __future__ import annotations

import json

import pytest

from autosplit.planning.timeline import StagesAlone
from autosplit.schedule.catalog import build
from benchmarks import pairs, peers_cpu, peers_local
from benchmarks.peers_local import Cells
from benchmarks.peers_models import subjects


def cells(input_s: float = 1.0) -> Cells:
    """Return cells of 1 s forward and 2 s backward, whose second backward splits into two parts."""
    forward, whole = (1.0, 1.0), (2.0, 2.0)

    def alone(name: str, seconds: dict) -> StagesAlone:
        return StagesAlone(build(name, stages=2, microbatches=8), seconds, {}, (), 0.0, (None, None))

    parts = {"F": forward, "I": (0.0, input_s), "W": (2.0, 1.0)}
    return Cells(alone("1f1b", {"F": forward, "B": whole}), alone("zb_h1", parts))


PEER = () if pairs.torchgpipe() is None else tuple(peers_cpu.GPIPE)
RUNNABLE = (peers_cpu.DEFAULT, *peers_cpu.OURS, *PEER, "plain, 1", peers_cpu.LOOP)


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def test_a_contender_that_finds_other_gradients_is_not_timed(monkeypatch):
    subject, real = subjects()["tiny"], peers_local.microbatched

    def twice(made):
        step = real(made)
        return peers_local.Local(lambda: (step.run(), step.run()), step.parameters)

    monkeypatch.setattr(peers_local, "microbatched", twice)
    with pytest.raises(ValueError, match="the gradients of 'microbatched' are off by 1"):
        peers_cpu.read(subject, ["microbatched"], rounds=1)


def test_the_benchmark_runs_and_every_contender_finds_the_plain_gradients(tmp_path, capsys):
    path = tmp_path / "peers.json"
    peers_cpu.main(["--models", "tiny", "--rounds", "2", "--json", str(path), "--only", *RUNNABLE])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert [figure["contender"] for figure in content["figures"]] == list(RUNNABLE)
    assert all(figure["wall_s"]["median"] > 0 and figure["cpu_s"]["median"] > 0 for figure in content["figures"])
    assert set(content["settings"]["cells"]["tiny"]) == {"seconds", "split"}
    assert "cells of the two stages alone" in capsys.readouterr().out
