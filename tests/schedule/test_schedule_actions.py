"""Actions as text, schedules as literal tuples and grids, the clock of their cells, and their legality."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Cell, Kind, Schedule, describe
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.orders import forward_only, gpipe, one_f_one_b
from autosplit.schedule.validate import validate

SIZES = [(devices, microbatches) for devices in range(1, 6) for microbatches in (1, 2, 3, 5, 6, 9)]
PER_DEVICE = {name: 2 if name in ("interleaved", "looped_bfs", "zb_v") else 1 for name in SCHEDULES}


def lanes(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(map(str, lane)) for lane in schedule.lanes)


def parse(*rows: str, stage_lane: tuple[int, ...] = ()) -> Schedule:
    return Schedule("custom", tuple(tuple(map(Action.parse, row.split())) for row in rows), stage_lane)


@given(stage=st.integers(0, 10**6), kind=st.sampled_from(("F", "B", "I", "W")), microbatch=st.integers(0, 10**6))
def test_action_text_round_trips(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert str(action) == f"{stage}{kind}{microbatch}"


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "2F0 3F0", "2f0", "2FB0", "2UNSHARD", "2SEND_F0", "٢F0"]
)
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action; write stage, F, B, I or W, and microbatch, such as '2F0'"):
        Action.parse(text)


def test_an_action_in_words() -> None:
    assert [describe(Action.parse(text)) for text in ("2F5", "2B5", "2I5", "2W5")] == [
        "stage 2, forward, microbatch 5",
        "stage 2, backward, microbatch 5",
        "stage 2, input gradient, microbatch 5",
        "stage 2, weight gradients, microbatch 5",
    ]


def test_a_backward_waits_for_whatever_makes_the_gradient_of_the_next_input() -> None:
    schedule = parse("0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1I0 1W0 1B1")
    needs = {str(action): " ".join(map(str, schedule.needs(action))) for lane in schedule.lanes for action in lane}
    assert needs == {
        "0F0": "",
        "0F1": "",
        "0B0": "0F0 1I0",
        "0I1": "0F1 1B1",
        "0W1": "0I1",
        "1F0": "0F0",
        "1F1": "0F1",
        "1I0": "1F0",
        "1W0": "1I0",
        "1B1": "1F1",
    }
    assert validate(schedule) is schedule


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (gpipe(2, 3), ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")),
        (one_f_one_b(2, 3), ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")),
        (one_f_one_b(3, 1), ("0F0 0B0", "1F0 1B0", "2F0 2B0")),
        (forward_only(2, 2), ("0F0 0F1", "1F0 1F1")),
    ],
)
def test_schedules_are_these(schedule: Schedule, rows: tuple[str, ...]) -> None:
    assert lanes(schedule) == rows


def test_grid_is_a_clock() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "lane 0 | 0F0 0F1 .   0B0 0F2 0B1 .   0B2\n"
        "lane 1 | .   1F0 1B0 1F1 1B1 1F2 1B2"
    )  # fmt: skip


def test_issue_order_is_this() -> None:
    order = " ".join(map(str, one_f_one_b(2, 2).issue_order))
    assert order == "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_every_schedule_is_legal(name: str, devices: int, microbatches: int) -> None:
    stages = devices * PER_DEVICE[name]
    schedule = build(name, stages=stages, microbatches=microbatches)
    assert validate(schedule) is schedule
    assert (schedule.stages, len(schedule.lanes), schedule.microbatches) == (stages, devices, microbatches)
    assert schedule.name == name
    issued = schedule.issue_order
    done: set[Action] = set()
    for action in issued:
        assert done.issuperset(schedule.needs(action))
        done.add(action)
    per_microbatch = {"forward": 1, "zb_h1": 3, "zb_v": 3}.get(name, 2)
    assert len(done) == len(issued) == stages * microbatches * per_microbatch
    for place, lane in enumerate(schedule.lanes):
        assert tuple(action for action in issued if schedule.lane_of(action.stage, action.microbatch) == place) == lane
    for stage in range(stages):
        summed = [action.microbatch for action in issued if action.stage == stage and action.kind in "BW"]
        assert summed == sorted(summed)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_microbatches_in_flight_are_the_published_number(name: str, devices: int, microbatches: int) -> None:
    """Narayanan et al. 2021 (2.2); ZB-H1 as 1F1B's first stage and ZB-V: Qi et al. 2023 (2401.10241, 2.1 and 6)."""
    stages = devices * PER_DEVICE[name]
    most = {
        "gpipe": [microbatches] * stages,
        "looped_bfs": [microbatches] * stages,
        "1f1b": range(stages, 0, -1),
        "zb_h1": [stages] * stages,
        "zb_v": range(stages, 0, -1),
        "forward": [1] * stages,
    }
    if name in most:
        held = build(name, stages=stages, microbatches=microbatches).in_flight
        assert held == tuple(min(count, microbatches) for count in most[name])


def test_a_stage_of_two_on_a_device_is_counted_by_itself() -> None:
    schedule = build("interleaved", stages=4, microbatches=4, virtual_stages=2)
    assert schedule.in_flight == (4, 3, 2, 1)
    assert [schedule.stages_on(lane) for lane in range(2)] == [(0, 2), (1, 3)]


def test_an_unknown_schedule_is_answered_with_the_known_ones() -> None:
    known = ", ".join(map(repr, SCHEDULES))
    with pytest.raises(ScheduleError, match=f"no schedule 'zigzag'; choose one of {known}$"):
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
    "no such stage": (parse("0F0 3F0"), "3F0 is of no stage; name one of the 1 stages, 0 on", ">3F0<"),
    "no such lane": (
        parse("0F0", "1F0", stage_lane=(0, 1, 2)),
        "stage 2 is placed in lane 2; place it in one of the 2 lanes, 0 on",
        "lane 1 | .   1F0",
    ),
    "lane of another device": (
        parse("0F0 2F0 3F0", "1F0", stage_lane=(0, 1, 1, 0)),
        "2F0 is in lane 0; move it to lane 1",
        ">2F0<",
    ),
    "input gradient first": (parse("0I0 0F0 0W0"), "0I0 comes before 0F0; put the forward first", ">0I0<"),
    "weights first": (parse("0F0 0W0 0I0"), "0W0 comes before 0I0; put the input's gradient first", ">0W0<"),
    "weights of a whole backward": (parse("0F0 0B0 0W0"), "0W0 comes before 0I0", ">0W0<"),
    "two backwards": (
        parse("0F0 0I0 0W0 0B0"),
        "0I0 and 0B0 are two backwards of one microbatch; keep B, or I and W",
        ">0I0< 0W0   >0B0<",
    ),
    "missing input gradient": (parse("0F0 0F1 0I0 0W0"), "0I1 is missing", ">0I1<"),
    "missing weights": (parse("0F0 0F1 0I0 0I1 0W1"), "0W0 is missing", ">0W0<"),
    "descending weights": (parse("0F0 0F1 0I0 0I1 0W1 0W0"), "0W0 comes after 0W1", "0W1   >0W0<"),
    "weights after a later backward": (parse("0F0 0F1 0I0 0B1 0W0"), "0W0 comes after 0B1", "0B1   >0W0<"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_schedule_is_shown_with_its_cell_marked(case: str) -> None:
    schedule, fact, marked = ILLEGAL[case]
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert fact in str(error.value)
    assert marked in str(error.value)
    assert str(error.value).count(">") == marked.count(">")


def test_input_gradients_may_come_in_any_order() -> None:
    assert validate(parse("0F0 0F1 0I1 0I0 0W0 0W1")).microbatches == 2


def test_a_deadlock_has_no_issue_order() -> None:
    with pytest.raises(ScheduleError, match="6 actions of schedule 'custom' can never start"):
        _ = parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").issue_order


def ticked(schedule: Schedule) -> dict[Cell, int]:
    """Return the tick of each cell, tick after tick: every lane whose next action may start does it."""
    ticks: dict[Cell, int] = {}
    done: set[Action] = set()
    position, clock = [0] * len(schedule.lanes), 0
    while True:
        starting = [
            Cell(lane, position[lane])
            for lane, actions in enumerate(schedule.lanes)
            if position[lane] < len(actions) and done.issuperset(schedule.needs(actions[position[lane]]))
        ]
        if not starting:
            return ticks
        for cell in starting:
            ticks[cell] = clock
            done.add(schedule.lanes[cell.lane][cell.position])
            position[cell.lane] += 1
        clock += 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3, 5])
def test_clocks_are_those_of_ticking_in_order_of_tick_and_lane(name: str, microbatches: int) -> None:
    schedule = build(name, stages=6, microbatches=microbatches)
    assert list(schedule.clocks.items()) == list(ticked(schedule).items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_cells_that_can_never_start_are_missing(name: str) -> None:
    chance, whole = random.Random(0), build(name, stages=4, microbatches=4)
    missing = 0
    for _ in range(20):
        lanes = [list(lane) for lane in whole.lanes]
        for lane in lanes:
            place = chance.randrange(len(lane) - 1)
            lane[place], lane[place + 1] = lane[place + 1], lane[place]
            if chance.random() < 0.3:
                lane.pop(chance.randrange(len(lane)))
        schedule = Schedule(name, tuple(map(tuple, lanes)), whole.stage_lane)
        assert list(schedule.clocks.items()) == list(ticked(schedule).items())
        missing += len(schedule.clocks) < sum(map(len, lanes))
    assert missing


GRIDS = {
    # 5 microbatches go in groups of 3 and 2
    ("interleaved", 2, 5, 2): """\
lane 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 .   0B2 .   2B3 2B4 0B3 0B4
lane 1 | .   1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4""",
    ("looped_bfs", 3, 2, 2): """\
lane 0 | 0F0 0F1 .   3F0 3F1 .   .   .   .   3B0 3B1 .   0B0 0B1
lane 1 | .   1F0 1F1 .   4F0 4F1 .   .   4B0 4B1 .   1B0 1B1
lane 2 | .   .   2F0 2F1 .   5F0 5F1 5B0 5B1 .   2B0 2B1""",
    ("zb_h1", 4, 4, 1): """\
lane 0 | 0F0 0F1 0F2 0F3 .   .   .   0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
lane 1 | .   1F0 1F1 1F2 .   .   1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
lane 2 | .   .   2F0 2F1 .   2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
lane 3 | .   .   .   3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3""",
    ("zb_v", 3, 2, 2): """\
lane 0 | 0F0 0F1 .   .   .   5F0 5I0 5W0 5F1 5I1 5W1 .   .   0I0 0W0 .   0I1 0W1
lane 1 | .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   4I1 4W1 1I0 1W0 .   1I1 1W1
lane 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1""",
}


def made(name: str, devices: int, microbatches: int, virtual: int) -> Schedule:
    return build(name, stages=devices * virtual, microbatches=microbatches, virtual_stages=virtual)


@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_the_grid_is_this(case: tuple[str, int, int, int]) -> None:
    assert str(made(*case)) == GRIDS[case]


def test_placements_are_these() -> None:
    assert made("interleaved", 3, 4, 2).stage_lane == made("looped_bfs", 3, 4, 2).stage_lane == (0, 1, 2, 0, 1, 2)
    assert made("zb_v", 3, 4, 2).stage_lane == (0, 1, 2, 2, 1, 0)
    assert made("zb_h1", 3, 4, 1).stage_lane == (0, 1, 2)


@settings(deadline=None)
@given(
    name=st.sampled_from(("interleaved", "looped_bfs", "zb_h1", "zb_v")),
    devices=st.integers(1, 9),
    virtual=st.integers(2, 5),
    microbatches=st.integers(1, 40),
)
def test_legal_at_every_size(name: str, devices: int, virtual: int, microbatches: int) -> None:
    per_device = {"zb_h1": 1, "zb_v": 2}.get(name, virtual)
    schedule = made(name, devices, microbatches, per_device)
    assert validate(schedule) is schedule
    assert len(schedule.lanes) == devices
    stages = devices * per_device
    for stage in range(stages):
        forwards = [action.microbatch for action in schedule if (action.stage, action.kind) == (stage, "F")]
        assert forwards == list(range(microbatches))


def test_one_virtual_stage_stands_for_what_the_schedule_takes() -> None:
    for name, entry in SCHEDULES.items():
        own = entry.virtual_stages or 2
        assert build(name, stages=4, microbatches=3) == build(name, stages=4, microbatches=3, virtual_stages=own)
        assert len(build(name, stages=4, microbatches=3).lanes) == 4 // own


@pytest.mark.parametrize(
    ("name", "virtual", "message"),
    [
        ("1f1b", 2, "1f1b puts 1 stage on a device, not 2; leave virtual_stages out, or choose interleaved or looped"),
        ("zb_h1", 3, "zb_h1 puts 1 stage on a device, not 3; .* choose interleaved or looped_bfs$"),
        ("zb_v", 3, "zb_v puts 2 stages on a device, not 3; .* choose interleaved or looped_bfs$"),
        ("interleaved", 0, "interleaved puts 2 or more stages on a device, not 0; leave virtual_stages out$"),
        ("interleaved", 4, "6 is no multiple of 4; cut the model into 4 or 8 stages$"),
    ],
)
def test_stages_that_do_not_go_with_the_schedule(name: str, virtual: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, stages=6, microbatches=3, virtual_stages=virtual)


def test_too_few_stages_for_one_device() -> None:
    with pytest.raises(
        ScheduleError, match="zb_v puts 2 stages on every device, and 1 is no multiple of 2; cut the model into 2"
    ):
        build("zb_v", stages=1, microbatches=3)
