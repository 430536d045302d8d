"""What devices hold, counted on the actions, against the published formulas and against every weight of a microbatch.

Formulas: Narayanan et al. 2021 (2.2.2), Korthikanti et al. 2022 (4.2.3) for interleaving; Qi et al. 2023 (2401.10241,
2.1 and 6) for ZB-H1, whose stage s of P holds (P - s) microbatches whole and s of the weights' part, and for ZB-V.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build
from autosplit.schedule.in_flight import Holding, in_flight_of

MANY = 24


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_devices_hold_the_published_number(devices: int, virtual: int, rounds: int) -> None:
    microbatches = rounds * devices
    schedule = build("interleaved", stages=devices * virtual, microbatches=microbatches, virtual_stages=virtual)
    assert [lane.most for lane in in_flight_of(schedule).lanes] == [
        min(microbatches * virtual, 2 * (devices - device - 1) + (virtual - 1) * devices + 1)
        for device in range(devices)
    ]


@pytest.mark.parametrize("devices", range(1, 9))
def test_other_schedules_hold_the_published_number(devices: int) -> None:
    def lanes(name: str, per_device: int) -> list[int]:
        schedule = build(name, stages=devices * per_device, microbatches=MANY, virtual_stages=per_device)
        return [lane.most for lane in in_flight_of(schedule).lanes]

    assert lanes("gpipe", 1) == [MANY] * devices
    assert lanes("1f1b", 1) == [devices - device for device in range(devices)]
    assert lanes("forward", 1) == [1] * devices
    assert lanes("looped_bfs", 3) == [3 * MANY] * devices
    assert lanes("zb_h1", 1) == [devices] * devices
    assert lanes("zb_v", 2) == [2 * devices] * devices  # of half a device's layers each


@pytest.mark.parametrize("devices", range(1, 9))
def test_zero_bubble_holds_whole_and_waiting_microbatches(devices: int) -> None:
    counted = in_flight_of(build("zb_h1", stages=devices, microbatches=MANY))
    for stage, lane in enumerate(counted.lanes):
        assert (Holding(full=devices - stage, waiting=stage),) in lane.peaks
        assert lane.peaks == (
            (Holding(full=devices - stage - 1, waiting=stage + 1),),
            (Holding(full=devices - stage, waiting=stage),),
        )
    assert counted.waiting == tuple(range(1, devices + 1))


def test_a_device_with_two_stages_is_counted_at_one_moment() -> None:
    counted = in_flight_of(build("interleaved", stages=4, microbatches=4, virtual_stages=2))
    assert counted.held == (4, 3, 2, 1)
    assert counted.waiting == (0, 0, 0, 0)
    first, second = counted.lanes
    assert (first.stages, first.most) == ((0, 2), 5)  # not 4 + 2
    assert first.peaks == ((Holding(3, 0), Holding(2, 0)), (Holding(4, 0), Holding(1, 0)))
    assert (second.stages, second.most) == ((1, 3), 3)


def heaviest(schedule: Schedule, lane: int, full: list[int], waiting: list[int]) -> int:
    """Replay a lane: a microbatch weighs `full` until its B or I ends, then `waiting` until its W ends."""
    held = most = 0
    for action in schedule.lanes[lane]:
        if action.kind == "F":
            held += full[action.stage]
        elif action.kind == "W":
            held -= waiting[action.stage]
        else:
            held += (waiting[action.stage] if action.kind == "I" else 0) - full[action.stage]
        most = max(most, held)
        if not schedule.has_backward:
            held -= full[action.stage]
    return most


weights = st.lists(st.integers(0, 9), min_size=8, max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(("gpipe", "1f1b", "forward", "interleaved", "looped_bfs", "zb_h1", "zb_v")),
    microbatches=st.integers(1, 14),
    full=weights,
    waiting=weights,
)
def test_the_heaviest_moment_is_a_peak(name: str, microbatches: int, full: list[int], waiting: list[int]) -> None:
    schedule = build(name, stages=8, microbatches=microbatches)
    for lane, holdings in enumerate(in_flight_of(schedule).lanes):
        weighed = (
            sum(
                full[stage] * held.full + waiting[stage] * held.waiting
                for stage, held in zip(holdings.stages, peak, strict=True)
            )
            for peak in holdings.peaks
        )
        assert max(weighed) == heaviest(schedule, lane, full, waiting)
