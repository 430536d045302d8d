"""Action for action against ``torch.distributed.pipelining``'s own schedules.

Its schedule classes work out every device's actions when they are made, and read of the stages that they are given
only the few numbers below; so they need no process group. What they read is not documented: tried on torch 2.13.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.validate import validate

TORCH: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
}
Lanes = tuple[tuple[str, ...], ...]


def torch_schedule(name: str, devices: int, microbatches: int, virtual: int) -> Any:
    """Return torch's own schedule."""
    facts = {"num_stages": devices * virtual, "group_size": devices, "group_rank": 0, "submod": None, "is_last": False}
    stages = [SimpleNamespace(**facts, stage_index=stage, is_first=stage == 0) for stage in range(virtual)]
    return TORCH[name](stages, microbatches)


def theirs(name: str, devices: int, microbatches: int, virtual: int) -> tuple[Lanes, tuple[int, ...]]:
    """Return torch's actions and its placement of the stages."""
    schedule, count = torch_schedule(name, devices, microbatches, virtual), devices * virtual
    order = schedule.pipeline_order
    lanes = tuple(tuple(str(action) for action in order[rank] if action is not None) for rank in range(devices))
    placement = schedule.stage_index_to_group_rank
    return lanes, tuple(placement[stage] for stage in range(count))


def ours(name: str, devices: int, microbatches: int, virtual: int) -> tuple[Lanes, tuple[int, ...]]:
    schedule = validate(build(name, stages=devices * virtual, microbatches=microbatches, virtual_stages=virtual))
    return tuple(tuple(map(str, lane)) for lane in schedule.lanes), schedule.stage_lane


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)])
def test_the_same_actions(name: str, virtual: int, devices: int) -> None:
    compared = 0
    for microbatches in range(1, 3 * devices + 1):
        rounds = max(1, microbatches // devices)
        if microbatches % rounds and name != "zb_v":
            continue
        assert ours(name, devices, microbatches, virtual) == theirs(name, devices, microbatches, virtual)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("virtual", [2, 3])
def test_breadth_first_backwards_ascend_here_and_descend_there(devices: int, virtual: int) -> None:
    microbatches = 5
    mine, placement = ours("looped_bfs", devices, microbatches, virtual)
    torchs, torch_placement = theirs("looped_bfs", devices, microbatches, virtual)
    assert placement == torch_placement
    assert mine != torchs

    def mirrored(text: str) -> str:
        action = Action.parse(text)
        last = microbatches - 1
        return str(action if action.kind == "F" else Action(action.stage, "B", last - action.microbatch))

    assert mine == tuple(tuple(map(mirrored, lane)) for lane in torchs)


@pytest.mark.parametrize("name", ["interleaved", "zb_h1"])
def test_microbatches_that_torch_refuses(name: str) -> None:
    virtual = 2 if name == "interleaved" else 1
    with pytest.raises(ValueError, match=r"multiple of the number of rounds \(2\), but got 11"):
        theirs(name, 4, 11, virtual)
    lanes, _ = ours(name, 4, 11, virtual)
    assert sum(map(len, lanes)) == 4 * 11 * (4 if name == "interleaved" else 3)
