from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from benchmarks import time as benchmark
from benchmarks.families import Family
from benchmarks.family_transformers import Chain
from benchmarks.time import Alone, Line, Stage, checks, stages_of, works_of
from cost_models import Calibrated, Stamp, device


def family() -> Family:
    return Family(
        name="tiny",
        kind="dense",
        rows=3,
        make=lambda: Chain(*[nn.Linear(4, 4, bias=False) for _ in range(5)], nn.Linear(4, 400)),
        batch=lambda rows: (torch.randn(rows, 4),),
        target=lambda rows: torch.zeros(rows, dtype=torch.long),
        loss=nn.functional.cross_entropy,
    )


def test_the_stages_make_up_the_model():
    stages = stages_of(family(), precision="fp32")
    assert [stage.number for stage in stages] == [0, 1, 2, 3]
    assert sum(len(stage.module.parts) for stage in stages) == 6
    assert stages[3].module(*stages[3].inputs)[0].shape == ()
    for before, after in itertools.pairwise(stages):
        torch.testing.assert_close(before.module(*before.inputs), after.inputs)


def test_the_cut_is_the_best_of_all_cuts():
    weights = [5.0, 1.0, 1.0, 7.0, 2.0, 2.0, 3.0]
    found = benchmark._balanced(weights, 4)

    def heaviest(cuts: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    assert heaviest(tuple(found)) == min(map(heaviest, itertools.combinations(range(1, 7), 3))) == 7.0


def test_the_operations_are_those_of_forward_and_backward():
    stage = Alone("any", 0, Stage([nn.Linear(4, 8, bias=False)], None), (torch.randn(3, 4),), "fp32")
    flops = [work.flops for work in works_of(stage) if work.kind == "matmul"]
    assert flops == [2 * 3 * 4 * 8] * 3
    assert stage.module.parts[0].weight.grad is None
    low = Alone("any", 0, stage.module, stage.inputs, "bf16")
    assert {work.dtype for work in works_of(low) if work.kind == "matmul"} == {"bf16"}


def test_both_numbers_are_checked():
    lines = [Line("any", "fp32", 0, predicted, 1.0) for predicted in (1.1, 0.9, 1.4)]
    median, worst = checks(lines)
    assert (median.ok, worst.ok) == (True, False)
    assert (median.measured, worst.measured) == pytest.approx((0.1, 0.4))


def test_the_command_prints_a_table_and_writes_the_figures(monkeypatch, tmp_path, capsys):
    model = Calibrated.fit([], device=device("cpu-lane"), stamp=Stamp(device="cpu-lane", date="2026-01-01"))
    model.save(tmp_path / "lane.json")
    monkeypatch.setattr(benchmark, "families", lambda: {"tiny": family()})
    before = torch.get_num_threads()
    try:
        benchmark.main(
            ["--rounds", "1", "--calibration", str(tmp_path / "lane.json"), "--json", str(tmp_path / "out.json")]
        )
    finally:
        torch.set_num_threads(before)
    assert "tiny" in capsys.readouterr().out
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["figures"]) == 4
    assert all(figure["predicted_s"] > 0 and figure["measured_s"] > 0 for figure in content["figures"])
