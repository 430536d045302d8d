"""Zero bubble: the backward in two parts, the input's gradient at once, the weights' where there is nothing else to do.

Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241).
"""

from __future__ import annotations

from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.lane_writer import LaneWriter


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B whose weight gradients come later, at no more memory than 1F1B's (2401.10241, 2.1).

    Stage ``s`` leaves ``s`` microbatches' weight gradients for the end, where 1F1B waits; so every stage holds as many
    microbatches as 1F1B's first. torch's ``ScheduleInterleavedZeroBubble`` with one stage per device is the same.
    """
    return Schedule("zb_h1", tuple(_h1_lane(stage, stages=stages, count=microbatches) for stage in range(stages)))


def _h1_lane(stage: int, *, stages: int, count: int) -> tuple[Action, ...]:
    writer = LaneWriter(count)
    for _ in range(stages - 1 - stage):
        writer.add(stage, "F")
    for turn in range(count):
        writer.add(stage, "FI" if turn < stage else "FIW")
    for _ in range(stage):
        writer.add(stage, "W")
    return writer.lane()


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Return ZB-V: two stages per device, placed as a V, no bubble when F, I and W take equally long (2401.10241, 6).

    The paper plans for ``2 * devices - 1`` microbatches or more; with fewer the same order runs without the missing
    ones. As torch's ``ScheduleZBVZeroBubble``, action for action; I and W stay apart also where they follow each other.

    ```
        device 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ...   2 devices: stages 0 and 3, and 1 and 2
        device 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 ...
    ```
    """
    devices = stages // 2
    lanes = (_v_lane(device, devices=devices, microbatches=microbatches) for device in range(devices))
    return Schedule("zb_v", tuple(lanes), _v_shaped(devices))


def _v_lane(device: int, *, devices: int, microbatches: int) -> tuple[Action, ...]:
    down, up = device, 2 * devices - 1 - device
    count = max(microbatches, 2 * devices - 1)
    writer = LaneWriter(microbatches)
    phases = (
        (2 * (devices - device) - 1, ((down, "F"),)),
        (device, ((up, "F"), (down, "F"))),
        (devices - device, ((up, "FIW"),)),
        (count - devices, ((down, "FIW"), (up, "FIW"))),
        (device, ((down, "I"), (up, "I"))),
        (devices - device, ((down, "IW"),)),
        (device, ((up, "W"),)),
        (device, ((down, "W"),)),
    )
    for times, pattern in phases:
        for _ in range(times):
            for stage, kinds in pattern:
                writer.add(stage, kinds)
    return writer.lane()


def _v_shaped(devices: int) -> tuple[int, ...]:
    """Return the lane of each of ``2 * devices`` stages when they go down the devices and up again.

    ```
        device 0   0  7        4 devices: the last stage is on the first device, which so starts the backward
        device 1   1  6
        device 2   2  5
        device 3   3  4
    ```
    """
    return (*range(devices), *reversed(range(devices)))
