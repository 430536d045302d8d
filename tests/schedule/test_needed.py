"""A schedule without what makes no gradients: which actions are left, and that they run as those of the whole do."""

from __future__ import annotations

import pytest

from autosplit.schedule.action import gradients_of
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.files import from_rows
from autosplit.schedule.order import lane_lists, step_order
from autosplit.schedule.simulate import simulate

STAGES, MICROBATCHES = 4, 5


def test_stages_before_the_first_gradient_have_forwards_and_those_without_weights_no_w() -> None:
    gradients = gradients_of(3, flows=(1, 2), trained=(2,))
    assert gradients == ("none", "inputs", "all")
    left = build("zb_h1", stages=3, microbatches=2).needed(gradients)
    assert [" ".join(map(str, lane)) for lane in left.lanes] == [
        "0F0 0F1",
        "1F0 1F1 1B0 1B1",
        "2F0 2I0 2F1 2I1 2W0 2W1",
    ]
    assert left.in_flight == (1, 2, 2)
    assert gradients_of(3, flows=(), trained=()) == ("none", "none", "inputs")


def test_marks_stay_behind_what_is_left() -> None:
    rows = [["0F0", "0B0", "0REDUCE_GRAD", "0F1", "0B1"], ["1UNSHARD", "1F0", "1B0", "1F1", "1B1", "1RESHARD"]]
    left = from_rows(rows, name="file").needed(("none", "all"))
    assert left.texts == (("0F0", "0REDUCE_GRAD", "0F1"), tuple(rows[1]))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward"])
@pytest.mark.parametrize("first", range(STAGES))
def test_what_is_left_ends_no_later_and_sends_no_gradients_to_frozen_stages(name: str, first: int) -> None:
    whole = build(name, stages=STAGES, microbatches=MICROBATCHES)
    left = whole.needed(gradients_of(STAGES, flows=range(first, STAGES), trained=(first, STAGES - 1)))
    kinds = {(action.stage, action.kind) for action in left}
    assert left.differentiated == set(range(first, STAGES))
    assert all(kind == "F" for stage, kind in kinds if stage < first)
    assert {stage for stage, kind in kinds if kind == "W"} <= {first, STAGES - 1}
    weight_s = [1.0 * (stage in (first, STAGES - 1)) for stage in range(STAGES)]
    times = {"input_gradient_s": [2.0 * (stage >= first) for stage in range(STAGES)], "weight_gradient_s": weight_s}
    times["backward_s"] = [sum(each) for each in zip(*times.values(), strict=True)]
    ends = [simulate(each, forward_s=[1.0] * STAGES, **times).step_s for each in (whole, left)]
    assert ends[1] <= ends[0]
    assert len(left.issue_order) == sum(map(len, left.lanes))
    sources = [set(range(stage)) for stage in range(STAGES)]
    texts = [str(entry) for lane in lane_lists(left, sources) for entry in lane]
    assert not [text for text in texts if "_B" in text and int(text[0]) < first]
    assert {str(issued.entry) for issued in step_order(left, sources)} == set(texts)
