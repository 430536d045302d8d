"""What devices hold, weighed on the actions, against the published formulas.

Formulas: Narayanan et al. 2021 (2.2.2), Korthikanti et al. 2022 (4.2.3) for interleaving; Qi et al. 2023 (2401.10241,
2.1 and 6) for ZB-H1, whose stage s of P holds (P - s) microbatches whole and s of the weights' part, and for ZB-V.
"""

from __future__ import annotations

import pytest

from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build

MANY = 24


def heaviest(schedule: Schedule, *, full: float = 1, waiting: float = 1) -> list[float]:
    """Return the most that each device holds: a microbatch weighs `full` until its B or I, `waiting` until its W."""
    found = []
    for lane in schedule.lanes:
        held = most = 0.0
        for action in lane:
            held += {"F": full, "B": -full, "I": waiting - full, "W": -waiting}[action.kind]
            most = max(most, held)
        found.append(most)
    return found


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_devices_hold_the_published_number(devices: int, virtual: int, rounds: int) -> None:
    microbatches = rounds * devices
    schedule = build("interleaved", stages=devices * virtual, microbatches=microbatches, virtual_stages=virtual)
    assert heaviest(schedule) == [
        min(microbatches * virtual, 2 * (devices - device - 1) + (virtual - 1) * devices + 1)
        for device in range(devices)
    ]


@pytest.mark.parametrize("devices", range(1, 9))
def test_other_schedules_hold_the_published_number(devices: int) -> None:
    def lanes(name: str, per_device: int) -> list[float]:
        return heaviest(build(name, stages=devices * per_device, microbatches=MANY, virtual_stages=per_device))

    assert lanes("gpipe", 1) == [MANY] * devices
    assert lanes("1f1b", 1) == [devices - device for device in range(devices)]
    assert lanes("looped_bfs", 3) == [3 * MANY] * devices
    assert lanes("zb_h1", 1) == [devices] * devices
    assert lanes("zb_v", 2) == [2 * devices] * devices  # of half a device's layers each


@pytest.mark.parametrize("devices", range(1, 9))
def test_zero_bubble_holds_whole_and_waiting_microbatches(devices: int) -> None:
    """Where what waits for W weighs half, the moment is the heaviest at which the fewest wait."""
    found = heaviest(build("zb_h1", stages=devices, microbatches=MANY), waiting=0.5)
    assert found == [devices - stage + 0.5 * stage for stage in range(devices)]


def test_a_stage_of_two_on_a_device_is_counted_by_itself() -> None:
    schedule = build("interleaved", stages=4, microbatches=4, virtual_stages=2)
    assert schedule.in_flight == (4, 3, 2, 1)
    assert heaviest(schedule) == [5, 3]  # not 4 + 2
    assert [schedule.stages_on(lane) for lane in range(2)] == [(0, 2), (1, 3)]
