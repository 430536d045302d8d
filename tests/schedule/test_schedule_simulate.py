"""The simulator against closed forms and against times that a hand can check."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.gpipe import gpipe
from autosplit.schedule.simulate import TransferTime, simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 9])
def test_equal_stages_have_the_closed_form_bubble(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches)
    timeline = simulate(schedule, forward_s=[1.0] * stages, backward_s=[2.0] * stages)
    assert timeline.step_s == pytest.approx(3.0 * (microbatches + stages - 1))
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_transfers_delay_their_consumer_and_take_no_lane_time() -> None:
    timeline = simulate(
        gpipe(2, 2),
        forward_s=[1.0, 1.0],
        backward_s=[2.0, 2.0],
        transfers=(TransferTime(0, 1, forward_s=0.5, backward_s=0.25),),
    )
    starts = {str(span.action): (span.start_s, span.end_s) for span in timeline.spans}
    assert starts == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),
        "1F0": (1.5, 2.5),
        "1F1": (2.5, 3.5),
        "1B0": (3.5, 5.5),
        "0B0": (5.75, 7.75),
        "1B1": (5.5, 7.5),
        "0B1": (7.75, 9.75),
    }
    assert timeline.step_s == 9.75
    assert timeline.bubble == pytest.approx(1 - 12 / 19.5)


def test_a_skip_may_arrive_after_the_neighbour() -> None:
    skip = TransferTime(0, 2, forward_s=10.0, backward_s=20.0)
    timeline = simulate(gpipe(3, 1), forward_s=[1.0] * 3, backward_s=[1.0] * 3, transfers=(skip,))
    spans = {str(span.action): span for span in timeline.spans}
    assert spans["2F0"].start_s == 11.0
    assert spans["0B0"].start_s == spans["2B0"].end_s + 20.0 == timeline.step_s - 1.0


def test_a_forward_only_step() -> None:
    timeline = simulate(build("forward", stages=3, microbatches=4), forward_s=[1.0, 2.0, 1.0], backward_s=[0.0] * 3)
    assert timeline.step_s == 1.0 + 4 * 2.0 + 1.0


def test_no_time_at_all_is_no_bubble() -> None:
    assert simulate(gpipe(2, 2), forward_s=[0.0] * 2, backward_s=[0.0] * 2).bubble == 0.0


def test_a_transfer_goes_forward() -> None:
    with pytest.raises(ValueError, match="later stage, not from 1 to 1"):
        simulate(gpipe(2, 1), forward_s=[1.0] * 2, backward_s=[1.0] * 2, transfers=(TransferTime(1, 1, 0.0, 0.0),))


times = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@settings(deadline=None, max_examples=50)
@given(name=st.sampled_from(("gpipe", "1f1b")), forward_s=times, backward_s=times, delay=st.integers(0, 9))
def test_spans_keep_lanes_and_needs(name: str, forward_s: list[int], backward_s: list[int], delay: int) -> None:
    schedule = build(name, stages=4, microbatches=5)
    transfers = tuple(TransferTime(stage, stage + 1, delay, delay) for stage in range(3))
    timeline = simulate(schedule, forward_s=forward_s, backward_s=backward_s, transfers=transfers)
    spans = {span.action: span for span in timeline.spans}
    for lane in schedule.lanes:
        for before, after in itertools.pairwise(lane):
            assert spans[before].end_s <= spans[after].start_s
    for action, span in spans.items():
        for need in schedule.needs(action):
            assert spans[need].end_s + (delay if need.stage != action.stage else 0) <= span.start_s
    assert timeline.step_s == max(span.end_s for span in timeline.spans)
    assert spans[Action(0, "F", 0)].start_s == 0.0
