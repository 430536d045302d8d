"""A recorded step on the page: its own strip below the predicted one, its figures beside the plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from selenium.webdriver.common.keys import Keys

from autosplit.planning.timeline import HeldBytes, StepTimeline, predicted
from autosplit.units import format_bytes, format_seconds
from tests.report.paper_plans import GIB, paper_plan

SLOWER = 1.2


def recorded(plan, **fields):
    """A step in which all took a fifth longer than predicted, and a device held 20 GiB at most."""
    foreseen = predicted(plan)
    bars = tuple(
        replace(bar, start_s=SLOWER * bar.start_s, end_s=SLOWER * bar.end_s, held_bytes=(10 + k % 8) * GIB)
        for k, bar in enumerate(foreseen.bars)
    )
    values = {
        "bars": bars,
        "sent": (),
        "step_s": SLOWER * foreseen.step_s,
        "measured": True,
        "memory": (HeldBytes(8 * GIB, 12 * GIB),) * len(plan.devices),
        "rows": plan.microbatch_rows,
    }
    return StepTimeline(**(values | fields))


@pytest.mark.parametrize(("schedule", "stages", "virtual"), [("1f1b", 3, 1), ("interleaved", 4, 2)])
def test_the_strips_are_the_recorded_bars(opened, schedule, stages, virtual):
    plan = paper_plan(stages=stages, microbatches=4, schedule=schedule, virtual_stages=virtual)
    measured = recorded(plan)
    page = opened(plan, measured=measured)
    drawn = page.js(
        "page.schedule.lanes.flatMap((lane, index) => Array.from(lane.stage, (stage, k) => [index, stage,"
        " 'FBIW'[lane.kind[k]], lane.mb[k], page.recorded.lanes[index].start[k], page.recorded.lanes[index].end[k]]))"
    )
    bars = [[b.lane, b.stage, b.kind, b.microbatch, b.start_s, b.end_s] for b in measured.bars]
    for one, other in zip(sorted(drawn), sorted(bars), strict=True):
        assert one == [*other[:4], pytest.approx(other[4], abs=1e-9), pytest.approx(other[5], abs=1e-9)]
    assert page.js("page.view.to") == pytest.approx(1.02 * measured.step_s)
    upper, lower = page.js("[page.timelineChart.rectangle(1, 0), page.timelineChart.rectangle(1, 0, true)]")
    assert lower["x"] - page.js("page.timelineChart.left") == pytest.approx(
        SLOWER * (upper["x"] - page.js("page.timelineChart.left"))
    )
    assert lower["width"] == pytest.approx(SLOWER * upper["width"])
    assert lower["y"] >= upper["y"] + upper["height"]
    assert page.console() == []
    for box in (upper, lower):
        pixel = page.js(
            "[...document.querySelector('#timeline').getContext('2d').getImageData(arguments[0], arguments[1], 1, 1)"
            ".data].slice(0, 3)",
            round(box["x"] + 2),
            round(box["y"] + 2),
        )
        assert "#" + bytes(pixel).hex() in page.js("page.colours.kinds")


def test_both_are_told_for_the_bar_under_the_pointer_and_for_the_chosen_one(opened):
    plan = paper_plan()
    measured = recorded(plan)
    page = opened(plan, measured=measured)
    own = next(b for b in measured.bars if (b.lane, b.kind, b.microbatch) == (1, "B", 2))
    action = page.js("page.schedule.lanes[1].mb.findIndex((mb, k) => mb === 2 && page.schedule.lanes[1].kind[k] === 1)")
    box = page.js("page.timelineChart.rectangle(1, arguments[0], true)", action)
    page.pointer("#timeline", (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))
    tip = page.text("#tip")
    assert tip.startswith("stage 1, backward, microbatch 2 on cuda:1")
    assert f"measured: {format_seconds(own.end_s - own.start_s)} (+20.0%)" in tip
    assert f"its device held {format_bytes(own.held_bytes)}" in tip
    page.keys("#timeline", Keys.ARROW_RIGHT)
    assert "measured: " in page.text("#details")


def test_measured_peaks_stand_in_the_table(opened):
    plan = paper_plan()
    page = opened(plan, measured=recorded(plan))
    header = [cell.text for cell in page.all(".peaks th[scope=col]")]
    assert header == ["device", "verdict", "at its fullest moment", "peak", "measured", "range", "capacity"]
    assert page.text("#peaks").count("20.0 GiB") == 4
    assert len(page.all(".stack .seen")) == 4
    assert "measured 20.0 GiB" in page.text(".figures")
