"""Schedules of devices with several stages, and those that split the backward: as grids, and legal at every size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.validate import validate

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
