"""Cuts that are moved on the page, by pointer and by keys: its figures are those of a plan of them."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from autosplit.units import format_seconds
from tests.report.paper_plans import make_units, paper_plan, with_cuts


def stages_of(page):
    return page.js("page.cutEditor.stages()")


def handle_place(page, cut):
    """The middle of a handle, in the pixels of the strip."""
    script = "const [x, y] = ['.handle:nth-child(' + arguments[0] + ')', '#strip'].map((selector) => "
    script += "document.querySelector(selector).getBoundingClientRect().x); return x - y + 12;"
    return page.chrome.execute_script(script, cut + 1)


def check(page, plan, moved):
    """The page's figures are those of the cut."""
    page.settle()
    assert stages_of(page) == moved
    expected = with_cuts(plan, moved)
    assert page.js("page.result.step") == pytest.approx(expected.step_s, rel=1e-12)
    assert page.text("#moved-step").startswith(format_seconds(expected.step_s))
    drawn = page.js("page.timelineChart.timeline.step")
    assert page.js("page.view") == {"from": 0, "to": drawn * 1.02}
    assert drawn + 0.002 == pytest.approx(expected.step_s)
    memory = page.js(
        "page.schedule.lanes.map(({count}, lane) => page.data.curves ? Math.max(...Array.from({length:"
        " count + 1}, (_, k) => page.memoryChart.parts(lane, k)"
        ".reduce((sum, size) => sum + size, 0))) : 0)"
    )
    assert memory == pytest.approx([stage.memory.peak_bytes for stage in expected.stages], abs=2)


def test_arrow_keys_move_a_cut_and_escape_puts_it_back(opened):
    plan = paper_plan()
    page = opened(plan)
    assert page.text("#unmoved") == "The cuts are the plan's."
    second = page.all(".handle")[1]
    assert second.get_attribute("aria-label") == "cut between stage 1 and stage 2"
    second.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    moved = [0] * 6 + [1] * 8 + [2] * 4 + [3] * 6
    check(page, plan, moved)
    assert page.text("#moves") == "layers.11 to layers.12 (2 units) → stage 1"
    assert page.text("#command") == "--plan plan.json --move layers.11=1 --move layers.12=1"
    assert second.get_attribute("aria-valuenow") == "14"
    assert "behind layers.12, before layers.13" in second.get_attribute("aria-valuetext")
    assert "+" in page.text("#moved-step")
    assert page.js("document.activeElement === arguments[0]", second)
    second.send_keys(Keys.END)
    assert stages_of(page) == [0] * 6 + [1] * 11 + [2] + [3] * 6
    second.send_keys(Keys.HOME)
    assert stages_of(page) == [0] * 6 + [1] + [2] * 11 + [3] * 6
    second.send_keys(Keys.ENTER)
    assert page.text("#details").startswith("cut between stage 1 and 2, behind layers.5, before layers.6")
    second.send_keys(Keys.ESCAPE)
    page.settle()
    assert stages_of(page) == [unit.stage for unit in plan.units]
    assert not page.find("#moved").is_displayed()
    assert page.js("page.result.step") == plan.step_s
    assert page.console() == []


def test_dragging_a_cut_costs_the_step_again_and_the_button_takes_it_back(opened):
    plan = paper_plan()
    page = opened(plan)
    shown = page.text("#peaks")
    edges = page.js("page.cutEditor.edges")
    width = page.find("#units").size["width"]
    place = handle_place(page, 0)
    target = width * edges[3] / edges[-1]
    page.pointer("#strip", (place, 40), ((place + target) / 2, 42), (target + 4, 44), press=True)
    moved = [0] * 3 + [1] * 9 + [2] * 6 + [3] * 6
    check(page, plan, moved)
    assert page.text("#moves") == "layers.2 to layers.4 (3 units) → stage 1"
    assert page.text("#peaks") != shown
    assert page.find("#comparison").is_displayed()
    assert "time of stage 1" in page.text("#comparison")
    page.find("#reset").click()
    page.settle()
    assert page.text("#peaks") == shown
    assert page.js("page.result.step") == plan.step_s


def test_moves_are_named_as_the_command_line_takes_them(opened):
    names = [
        "embed",
        "layers.0.norm",
        "layers.0.up",
        "layers.0 (2)",
        "layers.1.norm",
        "layers.1.up",
        "layers.10",
        "head",
    ]
    units = [unit.model_copy(update={"name": name}) for unit, name in zip(make_units(8, stages=2), names, strict=True)]
    page = opened(paper_plan(units, stages=2))
    page.find(".handle").send_keys(Keys.ARROW_LEFT)
    page.settle()
    assert page.text("#moves") == "layers.0 (2) → stage 1"
    assert not page.find("#command").is_displayed()
    page.find(".handle").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.settle()
    assert page.text("#command") == "--plan plan.json --move layers=1"
    page.find(".handle").send_keys(*[Keys.ARROW_RIGHT] * 5)
    page.settle()
    assert page.text("#command") == "--plan plan.json --move layers.1=0"
