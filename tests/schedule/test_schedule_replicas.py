"""1F1B whose stages have replicas: the order of every lane, what it holds, and what a second replica is worth."""

from __future__ import annotations

import math

import pytest

from autosplit.errors import ScheduleError
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import simulate
from autosplit.schedule.validate import validate

LAYOUTS = [
    (1,),
    (3,),
    (1, 1),
    (2, 1),
    (1, 2),
    (2, 2),
    (3, 1),
    (1, 3),
    (3, 2),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (4, 2, 3),
]


def test_replicas_take_microbatches_in_turn_forward_and_backward():
    assert str(build("1f1b", stages=2, microbatches=5, replicas=(2, 1))).splitlines() == [
        "lane 0 | 0F0 0F2 .   0B0 0F4 .   .   0B2 .   .   .   0B4",
        "lane 1 | 0F1 0F3 .   .   .   0B1 .   .   .   0B3",
        "lane 2 | .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4",
    ]


@pytest.mark.parametrize("replicas", LAYOUTS)
@pytest.mark.parametrize("microbatches", [4, 5, 12])
def test_every_layout_is_legal_and_holds_what_its_rule_says(replicas, microbatches):
    schedule = validate(build("1f1b", stages=len(replicas), microbatches=microbatches, replicas=replicas))
    assert (len(schedule.lanes), schedule.stages) == (sum(replicas), len(replicas))
    behind = 0
    for stage, count in reversed(list(enumerate(replicas))):
        lanes = list(schedule.lanes_of(stage))
        assert [schedule.stages_on(lane) for lane in lanes] == [(stage,)] * count
        for microbatch in range(microbatches):
            assert schedule.lane_of(stage, microbatch) == lanes[microbatch % count]
        held = 1 + math.ceil(behind / count)
        assert schedule.in_flight[stage] == min(held, math.ceil(microbatches / count))
        behind = held * count


def test_one_replica_each_is_1f1b():
    plain = build("1f1b", stages=3, microbatches=7)
    dealt = build("1f1b", stages=3, microbatches=7, replicas=(1, 1, 1))
    assert (dealt.lanes, dealt.stage_lane, dealt.in_flight) == (plain.lanes, plain.stage_lane, plain.in_flight)


@pytest.mark.parametrize("replicas", LAYOUTS)
@pytest.mark.parametrize("back", [1.0, 2.0])
def test_stages_as_slow_as_they_are_many_have_no_bubble_but_at_the_ends(replicas, back):
    schedule = build("1f1b", stages=len(replicas), microbatches=240, replicas=replicas)
    step_s = simulate(schedule, forward_s=replicas, backward_s=[back * own for own in replicas]).step_s
    assert step_s < 1.05 * 240 * (1 + back)


def test_two_replicas_of_a_stage_that_is_twice_as_slow():
    times = {"forward_s": [1.0, 2.0, 1.0], "backward_s": [2.0, 4.0, 2.0]}
    slow = simulate(build("1f1b", stages=3, microbatches=64), **times).step_s
    assert slow / simulate(build("1f1b", stages=3, microbatches=64, replicas=(1, 2, 1)), **times).step_s > 1.9


def test_what_cannot_be_dealt_out():
    with pytest.raises(ScheduleError, match=r"replicas=\[3, 1\] under gpipe: .* in turn under 1f1b"):
        build("gpipe", stages=2, microbatches=8, replicas=(3, 1))


def test_with_fewer_microbatches_than_replicas_some_have_none():
    schedule = validate(build("1f1b", stages=2, microbatches=2, replicas=(3, 1)))
    assert [len(lane) for lane in schedule.lanes] == [2, 2, 0, 4]
