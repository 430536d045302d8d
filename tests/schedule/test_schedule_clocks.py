"""The clock ticks of a schedule's cells, against ticking lane by lane, legal schedules or not."""

from __future__ import annotations

import random

import pytest

from autosplit.schedule.action import Action, Cell, Schedule
from autosplit.schedule.catalog import SCHEDULES, build


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
