"""Cuts moved by hand: an unmoved one costs what the plan says, a moved one what a plan made of those units says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.page_recost import recost
from tests.report.paper_plans import make_units, paper_plan

SHAPES = [("1f1b", 4, 1), ("gpipe", 3, 1), ("forward", 2, 1), ("interleaved", 4, 2), ("zb_h1", 3, 1), ("zb_v", 4, 2)]


@pytest.mark.parametrize(("schedule", "stages", "virtual"), SHAPES)
def test_an_unmoved_cut_costs_exactly_what_the_plan_says(schedule, stages, virtual):
    plan = paper_plan(stages=stages, schedule=schedule, virtual_stages=virtual)
    found = recost(plan, [unit.stage for unit in plan.units])
    assert found.step_s == plan.step_s
    assert found.bubble == plan.bubble
    assert found.bottleneck_s == plan.bottleneck_s
    assert found.forward_s == tuple(stage.forward_s for stage in plan.stages)
    assert found.backward_s == tuple(stage.backward_s for stage in plan.stages)
    assert [found.peak_bytes[stage.lane] for stage in plan.stages] == [s.memory.peak_bytes for s in plan.stages]


def spread(cuts, *, count):
    """Return the stage of each of ``count`` units when stages end before these units."""
    return [sum(cut <= index for cut in cuts) for index in range(count)]


@pytest.mark.parametrize(("schedule", "stages", "virtual"), SHAPES)
@pytest.mark.parametrize("curves", [True, False])
@settings(max_examples=6)
@given(data=st.data())
def test_a_moved_cut_costs_what_a_plan_of_it_says(schedule, stages, virtual, curves, data):
    units = make_units(3 * stages, stages=stages)
    plan = paper_plan(units, stages=stages, microbatches=5, schedule=schedule, virtual_stages=virtual)
    if not curves:
        plan = plan.model_copy(update={"curves": ()})
    places = st.integers(1, len(units) - 1)
    cuts = data.draw(st.lists(places, min_size=stages - 1, max_size=stages - 1, unique=True).map(sorted))
    moved = spread(cuts, count=len(units))
    expected = paper_plan(
        [unit.model_copy(update={"stage": stage}) for unit, stage in zip(units, moved, strict=True)],
        stages=stages,
        microbatches=5,
        schedule=schedule,
        virtual_stages=virtual,
    )
    found = recost(plan, moved)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.bubble == pytest.approx(expected.bubble, abs=1e-12)
    assert found.bottleneck_s == pytest.approx(expected.bottleneck_s, rel=1e-12)
    peaks = {stage.lane: stage.memory.peak_bytes for stage in expected.stages}
    assert dict(enumerate(found.peak_bytes)) == peaks


def test_what_is_done_again_moves_with_its_unit():
    units = make_units(8, stages=2)
    plain = paper_plan(units, stages=2)
    again = [
        stage.model_copy(update={"recompute": "always", "backward_s": stage.backward_s + stage.forward_s})
        for stage in plain.stages
    ]
    plan = plain.model_copy(update={"stages": tuple(again), "curves": ()})
    found = recost(plan, [0, 0, 0, 1, 1, 1, 1, 1])
    assert found.backward_s[0] == pytest.approx(sum(u.forward_s + u.backward_s for u in units[:3]), rel=1e-12)


def under(plan, recompute, *, activation_bytes):
    """The plan with a way to recompute and what its stages keep, without curves."""
    stages = [
        stage.model_copy(
            update={
                "recompute": recompute,
                "memory": stage.memory.model_copy(update={"activation_bytes": activation_bytes[stage.index]}),
            }
        )
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages), "curves": ()})


def test_a_stage_that_is_done_again_whole_keeps_what_enters_it():
    units = make_units(8, stages=2)
    plan = under(paper_plan(units, stages=2, schedule="gpipe"), "always", activation_bytes=[0, 0])
    found = recost(plan, [0, 0, 0, 1, 1, 1, 1, 1])
    moved = units[3].static_bytes + units[3].kept_bytes
    assert found.peak_bytes[0] == plan.stages[0].memory.peak_bytes - moved
    # Eight microbatches are in flight: behind the new cut other bytes are sent, and what is done again starts there.
    sent = units[2].sent_bytes - units[3].sent_bytes
    assert sent != 0
    assert found.peak_bytes[1] == plan.stages[1].memory.peak_bytes + moved + (8 - 1) * sent


def test_blocks_keep_the_part_that_the_plan_kept():
    units = make_units(8, stages=2)
    plain = paper_plan(units, stages=2, microbatches=1)
    kept = [sum(unit.kept_bytes for unit in units if unit.stage == stage) for stage in (0, 1)]
    plan = under(plain, "block", activation_bytes=[size // 4 for size in kept])
    found = recost(plan, [0, 0, 0, 1, 1, 1, 1, 1])
    peaks = [stage.memory.peak_bytes for stage in plan.stages]
    moved = units[3].static_bytes + units[3].kept_bytes / 4
    assert found.peak_bytes[0] == pytest.approx(peaks[0] - moved, abs=90 * 2**20)
    assert found.peak_bytes[1] == pytest.approx(peaks[1] + moved, abs=90 * 2**20)
