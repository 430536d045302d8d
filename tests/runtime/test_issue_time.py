"""How long the host issues a step: measured where lanes are asynchronous, and said in the report."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.sections import render
from autosplit.runtime.step.cells import Cells
from tests.runtime.lane_models import PLACES, ROWS, WIDTH, Chain
from tests.runtime.recorded_pipe import RecordedPipe

SLOW_S = 0.01


def profiled(place: str, schedule: str = "1f1b") -> tuple[Plan, StepTimeline]:
    """Return a plan, and a recorded step whose every forward the host issues slowly."""
    run = RecordedPipe(Chain(), *PLACES[place], schedule=schedule)
    forward = Cells.forward

    def slow(cells: Cells, stage: int, microbatch: int) -> object:
        time.sleep(SLOW_S)
        return forward(cells, stage, microbatch)

    with mock.patch.object(Cells, "forward", slow), run.recording():
        value, target = run.put(torch.randn(ROWS, WIDTH)), run.put(torch.randn(ROWS, WIDTH))
        found = run.pipe.profile_step(value, target=target, loss_fn=nn.MSELoss())
    assert run.pipe.plan is not None
    return run.pipe.plan, found


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_hosts_time_is_measured_and_binds(schedule: str) -> None:
    plan, found = profiled("two cards", schedule)
    assert all(bar.issue_s is not None for bar in found.bars)
    assert all(bar.issue_s >= SLOW_S for bar in found.bars if bar.kind == "F" and bar.issue_s is not None)
    issued_s = sum(bar.issue_s for bar in found.bars if bar.issue_s is not None)
    assert "host-bound" in render(plan, width=120, measured=replace(found, step_s=SLOW_S * 2 * 3))
    idle = render(plan, width=120, measured=replace(found, step_s=10 * issued_s))
    assert "measured to issue the step" in idle
    assert "host-bound" not in idle


def test_a_cpu_lane_is_its_own_host() -> None:
    plan, found = profiled("CPU and cards")
    devices = {stage.index: PLACES["CPU and cards"][0][stage.lane] for stage in plan.stages}
    assert {devices[bar.stage] == "cpu" for bar in found.bars if bar.issue_s is None} == {True}
    assert {devices[bar.stage] == "cpu" for bar in found.bars if bar.issue_s is not None} == {False}
    nobody = replace(found, bars=tuple(replace(bar, issue_s=None) for bar in found.bars))
    assert "to issue the step" not in render(plan, width=120, measured=nobody)
