"""A cut moved by hand on a plan of a real model, beside a new plan of that cut, which counts it from the nodes."""

from __future__ import annotations

import pytest
import torch

from autosplit import plan as plan_for
from autosplit.options import Options, Sample
from autosplit.planning.search.choose import Space, choose_plan
from autosplit.planning.search.make import make_plan
from autosplit.trace.ladder import trace
from tests.models.blocks import wide_blocks
from tests.planning.page_recost import recost

WIDTH, ROWS, BLOCKS, CHUNKS = 64, 512, 8, 4


@pytest.fixture(scope="module")
def model():
    return wide_blocks(BLOCKS, WIDTH, norm=True)


@pytest.fixture(scope="module")
def found(model):
    return trace(model, Sample(torch.zeros(ROWS, WIDTH)))


@pytest.mark.parametrize(
    ("schedule", "recompute", "near"),
    [
        ("1f1b", "never", 0.03),
        ("1f1b", "block", 0.1),
        ("gpipe", "never", 0.1),
        ("gpipe", "always", 0.1),
        ("zb_h1", "never", 0.05),
    ],
)
def test_a_moved_cut_is_costed_nearly_as_a_plan_of_it(model, found, schedule, recompute, near):
    options = Options((torch.device("cpu"),) * 2, CHUNKS, measure=False)
    plan = choose_plan(model, found, options, Space((CHUNKS,), ((schedule, 1),), (recompute,)))
    assert plan.curves
    for first in (2, 5):
        cut = {str(block): int(block >= first) for block in range(BLOCKS)}
        own = Options(options.devices, CHUNKS, measure=False, schedule=schedule, recompute=(recompute,), cut=cut)
        expected = make_plan(model, found, own, sizes=plan.microbatch_rows)
        moved = recost(plan, [cut[unit.name[0]] for unit in plan.units])
        assert moved.step_s == pytest.approx(expected.step_s, rel=0.005)
        assert moved.bubble == pytest.approx(expected.bubble, abs=0.005)
        peaks = [stage.memory.peak_bytes for stage in expected.stages]
        assert list(moved.peak_bytes) == pytest.approx(peaks, rel=near)


@pytest.mark.parametrize(
    ("devices", "schedule", "virtual"),
    [(["A100-SXM4-80GB", "L4-24GB"], "interleaved", 2), (["H100-SXM5-80GB", "L4-24GB"], "gpipe", 1)],
)
def test_so_it_is_between_unlike_devices(model, devices, schedule, virtual):
    asked = {"sample": torch.zeros(ROWS, WIDTH), "chunks": CHUNKS}
    plan = plan_for(model, devices, schedule=schedule, virtual_stages=virtual, recompute="never", **asked)
    stages = len(plan.stages)
    own = [unit.stage for unit in plan.units]
    names = [unit.name[0] for unit in plan.units]
    first = own.index(stages // 2)  # the cut in the middle lies before it
    moves = {names[first]: own[first] - 1}
    expected = plan_for(model, devices, plan=plan.move(moves), **asked)
    moved = recost(plan, [moves.get(name, stage) for name, stage in zip(names, own, strict=True)])
    assert moved.step_s == pytest.approx(expected.step_s, rel=0.02)
    assert moved.step_s != plan.step_s
    peaks = {stage.lane: stage.memory.peak_bytes for stage in expected.stages}
    assert dict(enumerate(moved.peak_bytes)) == pytest.approx(peaks, rel=0.08)
