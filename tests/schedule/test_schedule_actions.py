"""Actions as text, schedules as literal tuples, and their legality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build, in_flight
from autosplit.schedule.gpipe import forward_only, gpipe
from autosplit.schedule.one_f_one_b import one_f_one_b
from autosplit.schedule.order import issue_order
from autosplit.schedule.validate import validate

SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 10)]


def lanes(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(map(str, lane)) for lane in schedule.lanes)


def parse(*rows: str) -> Schedule:
    return Schedule("custom", tuple(tuple(map(Action.parse, row.split())) for row in rows))


@given(stage=st.integers(0, 10**6), kind=st.sampled_from(("F", "B")), microbatch=st.integers(0, 10**6))
def test_action_text_round_trips(stage: int, kind: str, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert str(action) == f"{stage}{kind}{microbatch}"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0 3F0", "2f0", "٢F0"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action; write stage, F or B, and microbatch, such as '2F0'"):
        Action.parse(text)


def test_gpipe_is_this() -> None:
    assert lanes(gpipe(2, 3)) == ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")


def test_one_f_one_b_is_this() -> None:
    assert lanes(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_fewer_microbatches_than_stages() -> None:
    assert lanes(one_f_one_b(3, 1)) == ("0F0 0B0", "1F0 1B0", "2F0 2B0")


def test_forward_only_is_this() -> None:
    assert lanes(forward_only(2, 2)) == ("0F0 0F1", "1F0 1F1")


def test_grid_is_a_clock() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "lane 0 | 0F0 0F1 .   0B0 0F2 0B1 .   0B2\n"
        "lane 1 | .   1F0 1B0 1F1 1B1 1F2 1B2"
    )  # fmt: skip


def test_issue_order_is_this() -> None:
    order = " ".join(map(str, issue_order(one_f_one_b(2, 2))))
    assert order == "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_schedule_is_legal(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches)
    assert validate(schedule) is schedule
    assert (schedule.stages, schedule.microbatches, schedule.name) == (stages, microbatches, name)
    done: set[Action] = set()
    for action in issue_order(schedule):
        assert done.issuperset(schedule.needs(action))
        done.add(action)
    assert len(done) == stages * microbatches * (2 if schedule.has_backward else 1)
    for stage, lane in enumerate(schedule.lanes):
        backwards = [action.microbatch for action in lane if action.kind == "B"]
        assert backwards == sorted(backwards)
        assert tuple(action for action in issue_order(schedule) if action.stage == stage) == lane


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_in_flight_is_what_a_replay_counts(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches)
    for stage, lane in enumerate(schedule.lanes):
        held = most = 0
        for action in lane:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
            if not schedule.has_backward:
                held -= 1
        assert in_flight(name, stage=stage, stages=stages, microbatches=microbatches) == most


def test_an_unknown_schedule_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match="no schedule 'zigzag'; choose one of 'gpipe', '1f1b', 'forward'"):
        build("zigzag", stages=2, microbatches=2)


ILLEGAL = {
    "missing": (parse("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"), "0B1 is missing", "0B0   >0B1<"),
    "missing forward": (parse("0F0 0F1", "1F0"), "1F1 is missing", "1F0   >1F1<"),
    "duplicate": (parse("0F0 0F0 0B0"), "0F0 is in lane 0 twice", ">0F0< >0F0<"),
    "backward first": (parse("0B0 0F0"), "0B0 comes before 0F0", ">0B0<"),
    "other lane": (parse("0F0 1B0 0B0", "1F0"), "1B0 is in lane 0; move it to lane 1", ">1B0<"),
    "descending": (parse("0F0 0F1 0B1 0B0"), "0B0 comes after 0B1", "0B1   >0B0<"),
    "deadlock": (
        parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "deadlock: 0B0 waits for 1B0, 1F1 waits for 0F1",
        "lane 0 | 0F0   >0B0< 0F1   0B1\nlane 1 | .     1F0   >1F1< 1B0   1B1",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_schedule_is_shown_with_its_cell_marked(case: str) -> None:
    schedule, fact, marked = ILLEGAL[case]
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert fact in str(error.value)
    assert marked in str(error.value)
    assert str(error.value).count(">") == marked.count(">")


def test_a_deadlock_has_no_issue_order() -> None:
    with pytest.raises(ScheduleError, match="6 actions of schedule 'custom' can never start"):
        issue_order(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
