"""The page in a browser: its bars are the plan's and the recorded step's, and a pointer and keys find them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from selenium.webdriver.common.keys import Keys

from autosplit.planning.timeline import HeldBytes, StepTimeline, predicted
from autosplit.units import format_bytes, format_seconds
from tests.pairwise import in_turn
from tests.report.paper_plans import GIB, make_units, paper_plan, searched

SHAPES = [
    ("1f1b", 4, 8, 1),
    ("gpipe", 3, 5, 1),
    ("forward", 2, 3, 1),
    ("interleaved", 4, 4, 2),
    ("zb_h1", 3, 6, 1),
    ("zb_v", 4, 5, 2),
]
KINDS = "FBIW"


def test_it_loads_without_a_word_and_asks_for_nothing(opened):
    page = opened(searched(paper_plan(stages=8, microbatches=64)))
    assert page.js("page.readyMs") > 0
    assert page.console() == []
    assert [url for url in page.requests() if not url.startswith(("file:", "data:"))] == []
    assert page.chrome.title.startswith("LlamaForCausalLM: 8 devices, 1f1b")


@in_turn(share=(0, 2), shape=SHAPES)
def test_the_bars_are_the_plan_s(opened, shape):
    schedule, stages, microbatches, virtual = shape
    units = make_units(3 * stages, stages=stages)
    plan = paper_plan(units, stages=stages, microbatches=microbatches, schedule=schedule, virtual_stages=virtual)
    page = opened(plan)
    drawn = page.js(
        "page.schedule.lanes.flatMap((lane, index) => Array.from(lane.stage, (stage, k) => [index, stage, lane.kind[k],"
        " lane.mb[k], page.result.timeline.lanes[index].start[k], page.result.timeline.lanes[index].end[k]]))"
    )
    expected = predicted(plan)
    bars = [[b.lane, b.stage, KINDS.index(b.kind), b.microbatch, b.start_s, b.end_s] for b in expected.bars]
    assert sorted(drawn) == sorted(bars)
    sent = page.chrome.execute_script(
        "const found = []; autosplitPage.eachTransfer((...one) => found.push(one)); return found;"
    )
    travels = [[s.source, s.target, s.microbatch, s.backward, s.start_s, s.end_s] for s in expected.sent]
    assert sorted(sent) == sorted(travels)
    assert page.js("page.result.step") == plan.step_s
    assert page.js("page.result.bubble") == pytest.approx(plan.bubble, abs=1e-12)
    assert page.console() == []


def test_bars_have_the_colours_of_the_legend_and_the_places_of_their_times(opened):
    page = opened(paper_plan(schedule="zb_h1", microbatches=4, units=make_units(12, stages=4)))
    view = page.js("page.view")
    left, plot = page.js("[page.timelineChart.left, page.timelineChart.plot]")
    seen = page.js(
        "page.schedule.lanes.flatMap((lane, index) => Array.from(lane.kind, (kind, k) => {"
        " const box = page.timelineChart.rectangle(index, k), own = page.result.timeline.lanes[index];"
        " const pen = document.querySelector('#timeline').getContext('2d');"
        " const pixel = pen.getImageData(Math.round(box.x + 3), Math.round(box.y + 2), 1, 1).data;"
        " return [page.colours.kinds[kind], [...pixel].slice(0, 3), box, own.start[k], own.end[k]]; }))"
    )
    assert len(seen) == 4 * 4 * 3
    for colour, pixel, box, start, end in seen:
        assert box["x"] == pytest.approx(left + plot * start / view["to"])
        assert box["width"] == pytest.approx(plot * (end - start) / view["to"])
        assert "#" + bytes(pixel).hex() == colour
    legend = [item.text for item in page.all(".tools .legend li")]
    assert legend == ["forward", "input gradient", "weight gradients", "idle"]


def test_hovering_shows_the_figures(opened):
    plan = paper_plan()
    page = opened(plan)
    bar = next(b for b in predicted(plan).bars if (b.lane, b.kind, b.microbatch) == (1, "B", 2))
    action = page.js("page.schedule.lanes[1].mb.findIndex((mb, k) => mb === 2 && page.schedule.lanes[1].kind[k] === 1)")
    page.pointer("#timeline", page.centre(1, action))
    tip = page.text("#tip")
    assert tip.startswith("stage 1, backward, microbatch 2 on cuda:1")
    assert f"takes {format_seconds(bar.end_s - bar.start_s)}" in tip
    assert f"from {format_seconds(bar.start_s)} to {format_seconds(bar.end_s)}" in tip
    assert "gradients reach stage 0 after" in tip
    assert "gradients of stage 2 came at" in tip
    page.pointer("#timeline", (page.js("page.timelineChart.left") + 4, page.centre(3, 0)[1]))
    assert page.text("#tip").startswith("Bubble on cuda:3")
    page.pointer("h1", (1, 1))
    assert not page.find("#tip").is_displayed()


def test_many_microbatches_begin_in_the_steady_state(opened):
    page = opened(paper_plan(stages=8, microbatches=64))
    view, step = page.js("page.view"), page.js("page.result.timeline.step")
    assert 0 < view["from"] < step / 2 < view["to"] < step
    assert page.find("#steady-note").is_displayed()
    assert page.js("page.memoryChart.view") == page.js("page.wholeView()")
    page.find("#zoom-whole").click()
    assert page.js("page.view") == page.js("page.wholeView()")
    assert not page.find("#steady-note").is_displayed()


def test_arrow_keys_go_from_bar_to_bar(opened):
    page = opened(paper_plan())

    def said():
        return page.text("#details").split(" · ")[0]

    page.keys("#timeline", Keys.ARROW_RIGHT)
    assert said() == "stage 0, forward, microbatch 0 on cuda:0"
    page.keys("#timeline", Keys.ARROW_RIGHT)
    assert said() == "stage 0, forward, microbatch 1 on cuda:0"
    page.keys("#timeline", Keys.END)
    assert said() == "stage 0, backward, microbatch 7 on cuda:0"
    page.keys("#timeline", Keys.ARROW_DOWN)
    assert said() == "stage 1, backward, microbatch 7 on cuda:1"
    page.keys("#timeline", Keys.ARROW_UP, Keys.HOME, Keys.ARROW_LEFT)
    assert said() == "stage 0, forward, microbatch 0 on cuda:0"
    whole = page.js("page.view")
    page.keys("#timeline", Keys.ENTER)
    near = page.js("page.view")
    assert near["to"] - near["from"] < 0.5 * whole["to"]
    assert page.find("#zoom-whole").is_enabled()
    page.keys("#timeline", *[Keys.ARROW_RIGHT] * 12)
    near, chosen = page.js("[page.view, page.timelineChart.rectangle(0, 12)]")
    assert near["from"] > 0
    assert 0 < chosen["x"] < page.js("page.timelineChart.width")
    page.keys("#timeline", Keys.ESCAPE)
    assert page.js("page.view") == whole
    page.keys("#timeline", Keys.ESCAPE)
    assert page.text("#details") == ""


def test_a_pointer_chooses_zooms_and_drags_the_view(opened):
    page = opened(paper_plan())
    page.pointer("#timeline", page.centre(2, 5), press=True)
    assert page.js("page.selected") == {"lane": 2, "action": 5}
    page.find("#zoom-in").click()
    before = page.js("page.view")
    assert before["to"] - before["from"] == pytest.approx(page.js("page.wholeView().to") / 1.5)
    x, y = page.centre(2, 5)
    page.pointer("#timeline", (x, y), (x + 60, y), (x + 120, y), press=True)
    after = page.js("page.view")
    assert after["from"] < before["from"]
    assert page.js("page.selected") == {"lane": 2, "action": 5}
    page.find("#zoom-whole").click()
    assert page.js("page.view.from") == 0


@pytest.mark.parametrize("width", [1440, 480, 320])
def test_nothing_is_wider_than_the_window(opened, width):
    page = opened(searched(paper_plan(stages=8, microbatches=16)), width=width)
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("page.timelineChart.width") <= width
    if width <= 480:
        clipped = (
            "[...document.querySelectorAll('.scroll')].filter((own) => own.scrollWidth > own.clientWidth + 1).length"
        )
        assert page.js(clipped) == 0
    page.resize(900, 900)
    page.settle()
    assert page.js("page.timelineChart.width") > 700


def test_a_plan_without_capacities_is_not_judged(opened):
    plan = paper_plan(fits=None, verdict="borderline")
    stages = tuple(
        stage.model_copy(
            update={
                "memory": stage.memory.model_copy(
                    update={"capacity_bytes": None, "low_bytes": None, "high_bytes": None}
                )
            }
        )
        for stage in plan.stages
    )
    page = opened(plan.model_copy(update={"stages": stages}))
    assert page.text("header .verdict") == "not judged"
    assert page.text("#peaks").count("not judged") == 4
    assert page.console() == []


def test_names_do_not_become_elements(opened):
    name = '<img src=x onerror="document.title=1">'
    units = [unit.model_copy(update={"name": f"{name}{unit.name}"}) for unit in make_units(8, stages=2)]
    page = opened(paper_plan(units, stages=2, devices=(name, name)))
    page.keys("#timeline", Keys.ARROW_RIGHT)
    page.find(".handle").send_keys(Keys.ARROW_LEFT)
    page.settle()
    assert name in page.text("#moves")
    assert page.all("main img") == []
    assert page.console() == []


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
