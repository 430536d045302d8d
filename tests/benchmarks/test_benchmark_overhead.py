"""The overhead benchmark: every contender does what its hand loop does, and the difference is shared out over cells."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import overhead, pairs
from benchmarks.overhead import PEER, Bench

RUNNABLE = list(overhead.NAMES)
if pairs.torchgpipe() is None:
    RUNNABLE = [name for name in RUNNABLE if not name.startswith(PEER)]


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def outcome(bench: Bench, function) -> list[torch.Tensor]:
    """Return what a step leaves behind: its output where it has one, and the gradients where it makes some."""
    bench.model.zero_grad()
    output = function()
    gradients = [parameter.grad for parameter in bench.model.parameters() if parameter.grad is not None]
    return [*([] if output is None or output.dim() == 0 else [output]), *gradients]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_contender_does_what_its_hand_loop_does(name):
    bench = Bench.of("linear", stages=3, chunks=4)
    ours = outcome(bench, bench.contender(name))
    hand = outcome(bench, bench.reference(name))
    assert hand
    for value, plain in zip(ours, hand, strict=True):
        torch.testing.assert_close(value, plain)
        assert value.requires_grad == plain.requires_grad


def test_the_overhead_is_per_cell_and_held_against_what_is_asked(monkeypatch):
    walls = {"inline forward": 1400e-6, "inline 1f1b": 3000e-6, "inline call": 1000e-6 + 32 * 60e-6}

    def paired(contenders, references, *, repeats, calls):
        assert (repeats, calls) == (7, 2)
        assert set(contenders) == set(references) == set(walls)
        return {
            name: pairs.Pairs((pairs.Reading(walls[name], 0.0, 0.0),), (pairs.Reading(1000e-6, 0.0, 0.0),))
            for name in contenders
        }

    monkeypatch.setattr(pairs, "paired", paired)
    figures = overhead.measure("scale", Bench.of("scale", stages=4, chunks=8), list(walls), repeats=7, calls=2)
    per_cell = [figure["overhead_per_cell"]["wall_s"].median for figure in figures]
    assert per_cell == pytest.approx([12.5e-6, 62.5e-6, 60e-6])
    assert [(check.asked, check.ok) for check in overhead.checks_of(figures)][:2] == [
        ("<= 10", False),
        ("<= 60", False),
    ]
    assert overhead.row(figures[0])["wall per cell"] == "12.5 [12.5, 12.5]"


def test_the_benchmark_runs(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    short = "--stages 2 --chunks 2 --repeats 2 --calls 1 --kinds linear scale".split()
    overhead.main([*short, "--json", str(path), "--only", *RUNNABLE])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert [(f["kind"], f["contender"]) for f in content["figures"]] == [
        (kind, name) for kind in ("linear", "scale") for name in RUNNABLE
    ]
    assert len(content["checks"]) == 2 * len(set(RUNNABLE) & set(overhead.ASKED_US))
    assert "2 stages, 2 microbatches of 2 x 16" in capsys.readouterr().out
