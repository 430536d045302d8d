"""What the report says of verdicts, changes, other plans and recorded steps; as text and as markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autosplit.planning.explain.verdicts import binding, device_verdicts
from autosplit.planning.plan.fields import Change
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative
from autosplit.planning.plan.stage_memory import StageMemory, judged
from autosplit.planning.timeline import Bar, StepTimeline, predicted
from autosplit.report.sections import render
from tests.report.plans import GIB, make_plan, make_stage

H100 = "H100-SXM5-80GB"


def memory(states_gib: float, activation_gib: float, transient_gib: float, **fields: Any) -> StageMemory:
    states = int(states_gib * GIB)
    activations, transient = int(activation_gib * GIB), int(transient_gib * GIB)
    return StageMemory(
        parameter_bytes=states // 4,
        buffer_bytes=0,
        gradient_bytes=states // 4,
        optimizer_bytes=states - 2 * (states // 4),
        activation_bytes=activations,
        transient_bytes=transient,
        peak_bytes=states + activations + transient,
        **{"capacity_bytes": 80 * GIB} | fields,
    )


def alternative(**fields: Any) -> Alternative:
    values = {
        "chunks": 4,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "recompute": ("never",),
        "step_s": 0.187,
        "peak_bytes": 91 * GIB,
        "verdict": "no",
        "replayed": True,
    }
    return Alternative(**(values | fields))


def refused_plan(**fields: Any) -> Plan:
    """Three devices: one fits, one may, one cannot by its states alone."""
    memories = (
        memory(40, 20, 4, low_bytes=62 * GIB, high_bytes=70 * GIB),
        memory(20, 55, 4, low_bytes=77 * GIB, high_bytes=84 * GIB),
        memory(88, 2, 1, low_bytes=90 * GIB, high_bytes=94 * GIB),
    )
    stages = tuple(
        make_stage(index).model_copy(update={"device": H100, "memory": one}) for index, one in enumerate(memories)
    )
    changes = (
        Change(
            kind="device",
            text="3xH200-SXM-141GB: 91.0 GiB of 139 GiB, the step is as long",
            arguments={"devices": "3xH200-SXM-141GB"},
            step_s=0.187,
            peak_bytes=91 * GIB,
            verdict="fits",
        ),
        Change(
            kind="devices",
            text="4 devices: 70.2 GiB, the step is 18% shorter, 33% more devices",
            arguments={"devices": f"4x{H100}"},
            step_s=0.15,
            peak_bytes=70 * GIB,
            verdict="fits",
        ),
    )
    frontier = (
        alternative(),
        alternative(chunks=8, schedule="interleaved", virtual_stages=2, peak_bytes=88 * GIB, replayed=False),
        alternative(chunks=16, recompute=("block", "block", "never"), step_s=0.21, peak_bytes=85 * GIB),
    )
    values = {
        "devices": (H100,) * 3,
        "stages": stages,
        "boundaries": (),
        "verdict": "no",
        "fits": False,
        "measured": False,
        "changes": changes,
        "frontier": frontier,
        "reasons": ("recompute on stages 0-1 costs 11% and saves 34.0 GiB",),
    }
    return make_plan(**(values | fields))


@pytest.mark.parametrize("width", [80, 120])
def test_report_of_a_plan_that_does_not_fit(width: int, golden: Callable[[str, str], None]) -> None:
    golden(f"refused_{width}.txt", render(refused_plan(), width=width) + "\n")


def test_markdown_of_a_plan_that_does_not_fit(golden: Callable[[str, str], None]) -> None:
    golden("refused.md", render(refused_plan(), "markdown") + "\n")


def test_the_binding_device_is_the_fullest_and_names_its_term() -> None:
    found = binding(refused_plan())
    assert found is not None
    assert (found.lane, found.term, found.verdict) == (2, "states", "no")
    assert [one.verdict for one in device_verdicts(refused_plan())] == ["fits", "borderline", "no"]
    assert [one.term for one in device_verdicts(refused_plan())] == ["states", "activations", "states"]
    assert binding(make_plan()) is None


def test_states_bind_where_they_alone_are_too_many_even_if_activations_are_more() -> None:
    stages = (make_stage(0).model_copy(update={"memory": memory(81, 90, 0)}),)
    found = binding(make_plan(stages=stages, devices=(H100,), boundaries=()))
    assert found is not None
    assert (found.term, found.term_bytes) == ("states", 81 * GIB)


@pytest.mark.parametrize(
    ("peak", "low", "high", "verdict"),
    [
        (100, None, None, "fits"),
        (105, None, None, "borderline"),
        (106, None, None, "no"),
        (90, 85, 100, "fits"),
        (90, 85, 101, "borderline"),
        (102, 100, 110, "borderline"),
        (102, 101, 110, "no"),
    ],
)
def test_a_verdict_is_borderline_where_the_capacity_lies_in_the_range(
    peak: int, low: int | None, high: int | None, verdict: str
) -> None:
    assert judged(peak, 100, low=low, high=high) == verdict
    assert judged(peak, None, low=low, high=high) is None


def test_stages_of_one_device_are_judged_together() -> None:
    stages = tuple(
        make_stage(stage, lane=lane, capacity_bytes=12 * GIB, peak_bytes=(9 + lane) * GIB)
        for stage, lane in enumerate((0, 1, 1, 0))
    )
    rows = device_verdicts(make_plan(stages=stages, schedule="zb_v", virtual_stages=2))
    assert [row.stages for row in rows] == [(0, 3), (1, 2)]
    assert [row.peak_bytes for row in rows] == [9 * GIB, 10 * GIB]
    assert rows[0].activation_bytes == 6 * GIB


def test_a_recorded_step_stands_beside_the_predicted_one() -> None:
    plan = make_plan()
    foreseen = predicted(plan)
    bars = tuple(Bar(b.lane, b.stage, b.kind, b.microbatch, 2 * b.start_s, 2 * b.end_s) for b in foreseen.bars)
    text = render(plan, measured=StepTimeline(bars, (), 2 * foreseen.step_s, measured=True))
    assert "Predicted beside measured" in text
    assert "2.00 times the prediction" in text
    row = next(line for line in text.split("Predicted beside measured")[1].splitlines() if line.startswith("0: cpu"))
    assert row.split()[2:8] == ["149", "ms", "298", "ms", "20.0%", "20.0%"]
    assert "## Predicted beside measured" in render(
        plan, "markdown", measured=StepTimeline(bars, (), 2 * foreseen.step_s, measured=True)
    )


def test_names_of_strangers_are_neither_escapes_nor_markup() -> None:
    nasty = "\x1b[2Jh|0\n<script>alert(1)</script>*_`"
    plan = make_plan(
        stages=(make_stage(0, modules=(nasty,)), make_stage(1)), notes=(f"note of {nasty}",), devices=("cpu", "cpu")
    )
    text, markdown = render(plan), render(plan, "markdown")
    assert "\x1b" not in text + markdown
    assert "<script>" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row.startswith("| stage | device"))
    nasty_row = next(row for row in rows if "script" in row)
    assert nasty_row.replace("\\|", "").count("|") == header.count("|")
