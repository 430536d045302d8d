"""The page in a browser: its bars are the plan's, and a pointer and keys find them."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from autosplit.planning.timeline import predicted
from autosplit.units import format_seconds
from tests.pairwise import in_turn
from tests.report.paper_plans import make_units, paper_plan, searched

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
