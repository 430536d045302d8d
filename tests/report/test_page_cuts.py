"""Cuts that are moved on the page: its figures are those of a plan of them, exactly where its units tell all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from selenium.webdriver.common.keys import Keys

from autosplit import plan as plan_for
from autosplit.options import Options, Sample
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search.choose import PlanChoice, Search
from autosplit.planning.search.make import make_plan
from autosplit.planning.search.sweep import Space, Sweep
from autosplit.report.page import page_data
from autosplit.trace.ladder import trace
from autosplit.units import format_seconds
from tests.models.blocks import wide_blocks
from tests.report.browser import Opened
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


SHAPES = [("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 4, 2), ("zb_h1", 3, 1), ("zb_v", 4, 2), ("forward", 2, 1)]
WIDTH, ROWS, BLOCKS, CHUNKS = 64, 512, 8, 4


def recost(page: Opened, plan: Plan, stages: Sequence[int]) -> dict[str, Any]:
    """Return what the page, given another plan of its schedule, says of the cut with unit ``i`` in ``stages[i]``."""
    found: dict[str, Any] = page.chrome.execute_script(
        "const page = autosplitPage, found = page.constructor.recost(arguments[1], page.schedule, arguments[0]);"
        "return {...found, timeline: null, memory: null};",
        list(stages),
        page_data(plan),
    )
    return found


def peaks(plan: Plan) -> list[int]:
    by_lane = {stage.lane: stage.memory.peak_bytes for stage in plan.stages}
    return [by_lane[lane] for lane in range(len(by_lane))]


def unlike(plan: Plan) -> Plan:
    """Return the plan on devices that are slower the farther back they stand."""
    names = ("forward_s", "backward_s", "weight_s")
    stages = [
        stage.model_copy(update={name: (1 + 0.6 * stage.lane) * getattr(stage, name) for name in names})
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def assert_times(found: dict[str, Any], expected: Plan) -> None:
    for kind in ("forward", "backward", "weight"):
        own = [getattr(stage, f"{kind}_s") for stage in expected.stages]
        assert found["times"][kind] == pytest.approx(own, rel=1e-12)
    sent = [[own.producer, own.consumer, own.forward_s, own.backward_s] for own in expected.transfers]
    assert found["times"]["transfers"] == [pytest.approx(own, rel=1e-12) for own in sent]


@pytest.mark.parametrize(("schedule", "stages", "virtual"), SHAPES)
def test_a_cut_costs_what_a_plan_of_it_says(
    opened: Callable[..., Opened], schedule: str, stages: int, virtual: int
) -> None:
    units = make_units(4 * stages, stages=stages)
    plan = paper_plan(units, stages=stages, microbatches=5, schedule=schedule, virtual_stages=virtual)
    page, draw = opened(plan), random.Random(stages)
    unmoved = recost(page, plan, [unit.stage for unit in units])
    assert (unmoved["step"], unmoved["bottleneck"]) == (plan.step_s, plan.bottleneck_s)
    assert unmoved["bubble"] == pytest.approx(plan.bubble, abs=1e-12)
    assert unmoved["peaks"] == peaks(plan)
    assert_times(unmoved, plan)
    for curves in (plan.curves, ()):
        for _ in range(8):
            cuts = draw.sample(range(1, len(units)), stages - 1)
            moved = [sum(cut <= index for cut in cuts) for index in range(len(units))]
            expected = with_cuts(plan, moved)
            found = recost(page, plan.model_copy(update={"curves": curves}), moved)
            assert found["step"] == pytest.approx(expected.step_s, rel=1e-12)
            assert found["bubble"] == pytest.approx(expected.bubble, abs=1e-12)
            assert found["bottleneck"] == pytest.approx(expected.bottleneck_s, rel=1e-12)
            assert found["peaks"] == peaks(expected)
            assert_times(found, expected)
            assert_times(recost(page, unlike(plan), moved), unlike(expected))


def under(plan: Plan, recompute: str, *, kept: float = 0.0) -> Plan:
    """Return the plan with a way to recompute and the part of its activations that stages keep, without curves."""
    again = {"except_last": 1 - 1 / len(plan.microbatch_rows)}.get(recompute, 1.0)
    stages = [
        stage.model_copy(
            update={
                "recompute": recompute,
                "backward_s": stage.backward_s + again * stage.forward_s,
                "memory": stage.memory.model_copy(
                    update={
                        "activation_bytes": int(
                            kept * sum(unit.kept_bytes for unit in plan.units if unit.stage == stage.index)
                        )
                    }
                ),
            }
        )
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages), "curves": ()})


MOVED = [0, 0, 0, 1, 1, 1, 1, 1]
"""Of eight units on two stages, the last one of the first stage is moved to the second."""


@pytest.mark.parametrize("recompute", ["always", "except_last", "block"])
def test_what_is_done_again_moves_with_its_unit(opened: Callable[..., Opened], recompute: str) -> None:
    plain = paper_plan(make_units(8, stages=2), stages=2)
    found = recost(opened(plain), under(plain, recompute), MOVED)
    assert_times(found, under(with_cuts(plain, MOVED), recompute))


def test_a_stage_that_is_done_again_whole_keeps_what_enters_it(opened: Callable[..., Opened]) -> None:
    units = make_units(8, stages=2)
    plan = under(paper_plan(units, stages=2, schedule="gpipe"), "always")
    found = recost(opened(plan), plan, MOVED)
    moved = units[3].static_bytes + units[3].kept_bytes
    # Eight microbatches are in flight: behind the new cut other bytes are sent, and what is done again starts there.
    sent = units[2].sent_bytes - units[3].sent_bytes
    assert sent != 0
    assert found["peaks"] == [peaks(plan)[0] - moved, peaks(plan)[1] + moved + (8 - 1) * sent]


def test_replicas_of_a_stage_are_devices_of_their_own(opened: Callable[..., Opened]) -> None:
    sample = torch.empty(ROWS, WIDTH, device="meta")
    plan = plan_for(wide_blocks(BLOCKS, WIDTH), "3xL4-24GB", CHUNKS, sample=sample, replicas=[2, 1])
    plan = plan.model_copy(update={"step_s": plan.step_s - plan.update_s, "update_s": 0.0})
    found = recost(opened(plan), plan, [unit.stage for unit in plan.units])
    assert (found["step"], found["bottleneck"]) == (plan.step_s, plan.bottleneck_s)
    assert found["bubble"] == pytest.approx(plan.bubble, abs=1e-12)
    assert found["peaks"] == [plan.stages[stage].memory.peak_bytes for stage in (0, 0, 1)]


# -- plans of a real model -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schedule", "recompute", "near"),
    [
        ("1f1b", "block", 0.1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("1f1b", "never", 0.03), ("gpipe", "never", 0.1), ("gpipe", "always", 0.1))
        ),
        ("zb_h1", "never", 0.05),
    ],
)
def test_a_moved_cut_is_costed_nearly_as_a_plan_of_it(
    opened: Callable[..., Opened], schedule: str, recompute: str, near: float
) -> None:
    model = wide_blocks(BLOCKS, WIDTH, norm=True)
    traced = trace(model, Sample(torch.zeros(ROWS, WIDTH)))
    options = Options((torch.device("cpu"),) * 2, CHUNKS, measure=False)
    space = Space((CHUNKS,), ((schedule, 1),), (recompute,))
    plan = PlanChoice(Search(Sweep(RecordedModel(model, traced), options, space, rows=ROWS))).plan
    assert plan.curves
    page = opened(plan)
    for first in (2, 5):
        cut = {str(block): int(block >= first) for block in range(BLOCKS)}
        own = Options(options.devices, CHUNKS, measure=False, schedule=schedule, recompute=(recompute,), cut=cut)
        expected = make_plan(model, traced, own, sizes=plan.microbatch_rows)
        found = recost(page, plan, [cut[unit.name[0]] for unit in plan.units])
        assert found["step"] == pytest.approx(expected.step_s, rel=0.005)
        assert found["bubble"] == pytest.approx(expected.bubble, abs=0.005)
        assert found["peaks"] == pytest.approx(peaks(expected), rel=near)


@pytest.mark.parametrize(
    ("devices", "schedule", "virtual"),
    [(["A100-SXM4-80GB", "L4-24GB"], "interleaved", 2), (["H100-SXM5-80GB", "L4-24GB"], "gpipe", 1)],
)
def test_so_it_is_between_unlike_devices(
    opened: Callable[..., Opened], devices: list[str], schedule: str, virtual: int
) -> None:
    model = wide_blocks(BLOCKS, WIDTH, norm=True)
    asked = {"sample": torch.zeros(ROWS, WIDTH), "chunks": CHUNKS}
    plan = plan_for(model, devices, schedule=schedule, virtual_stages=virtual, recompute="never", **asked)
    own = [unit.stage for unit in plan.units]
    first = own.index(len(plan.stages) // 2)  # the cut in the middle lies before it
    moves = {plan.units[first].name[0]: own[first] - 1}
    expected = plan_for(model, devices, plan=plan.move(moves), **asked)
    moved = [moves.get(unit.name[0], unit.stage) for unit in plan.units]
    found = recost(opened(plan), plan, moved)
    assert found["step"] == pytest.approx(expected.step_s, rel=0.02)
    assert found["step"] != plan.step_s
    assert found["peaks"] == pytest.approx(peaks(expected), rel=0.08)
