"""Schedules of devices that hold several stages in a loop: interleaved 1F1B, and breadth-first."""

from __future__ import annotations

from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.lane_writer import LaneWriter


def interleaved(stages: int, microbatches: int, *, virtual_stages: int) -> Schedule:
    """Return interleaved 1F1B: 1F1B on devices that hold ``virtual_stages`` stages each (Narayanan et al. 2021, 2.2).

    The microbatches go through a device's stages in groups of at least as many as there are devices: every stage's
    forward of a group, then the next group's; backwards likewise, last stage first. The paper's groups are exactly as
    large as the pipeline is deep, and it asks for a multiple of that. Here any number of microbatches goes: there are
    ``microbatches // devices`` groups of as equal a size as can be, larger ones first, and the bubble stays the paper's
    from ``microbatches = devices`` on. Where the groups come out equal this is torch's ``ScheduleInterleaved1F1B``,
    action for action; torch refuses the rest.
    """
    devices = stages // virtual_stages
    lanes = (
        _lane(device, devices=devices, microbatches=microbatches, virtual_stages=virtual_stages)
        for device in range(devices)
    )
    return Schedule("interleaved", tuple(lanes), _looped(stages, devices=devices))


def _lane(device: int, *, devices: int, microbatches: int, virtual_stages: int) -> tuple[Action, ...]:
    """Return one device's lane of interleaved 1F1B.

    The device runs ahead by ``(virtual_stages - 1) * group + 2 * (devices - 1 - device)`` forwards: its last stage's
    first forward comes after a group through each of the others, and two more for each device behind it.
    """
    groups = _groups(microbatches, devices=devices)
    forward = [device + turn * devices for size in groups for turn in range(virtual_stages) for _ in range(size)]
    backward = [
        device + turn * devices for size in groups for turn in reversed(range(virtual_stages)) for _ in range(size)
    ]
    warm_up = min(len(forward), (virtual_stages - 1) * max(groups, default=0) + 2 * (devices - 1 - device))
    writer = LaneWriter(microbatches)
    for stage in forward[:warm_up]:
        writer.add(stage, "F")
    for ahead, stage in zip(forward[warm_up:], backward, strict=False):
        writer.add(ahead, "F")
        writer.add(stage, "B")
    for stage in backward[len(forward) - warm_up :]:
        writer.add(stage, "B")
    return writer.lane()


def _groups(microbatches: int, *, devices: int) -> list[int]:
    """Split microbatches into groups of at least ``devices`` each, equal or one apart, larger ones first."""
    count = max(1, microbatches // devices)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)


def looped_bfs(stages: int, microbatches: int, *, virtual_stages: int) -> Schedule:
    """Return the looped breadth-first schedule: GPipe on devices that hold several stages (Lamy-Poirier 2023, 3).

    A device runs every microbatch through one stage before it goes on to its next, forward and backward, so a stage's
    weights are gathered and its gradients reduced once. Backwards ascend by microbatch, as under every schedule;
    torch's ``ScheduleLoopedBFS``, otherwise the same, lets them descend.
    """
    devices = stages // virtual_stages
    lanes = []
    for device in range(devices):
        held = range(device, stages, devices)
        lanes.append(
            (
                *(Action(stage, "F", microbatch) for stage in held for microbatch in range(microbatches)),
                *(Action(stage, "B", microbatch) for stage in reversed(held) for microbatch in range(microbatches)),
            )
        )
    return Schedule("looped_bfs", tuple(lanes), _looped(stages, devices=devices))


def _looped(stages: int, *, devices: int) -> tuple[int, ...]:
    """Return the lane of each stage when the stages go round the devices.

    ```
        device 0   0  4        4 devices, 2 virtual stages
        device 1   1  5
        device 2   2  6
        device 3   3  7
    ```
    """
    return tuple(stage % devices for stage in range(stages))
