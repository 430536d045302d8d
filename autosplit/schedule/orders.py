"""The orders of the schedules that autosplit knows; `catalog` names them.

Every one is a pattern of stages and kinds per device: ``(2, "FIW")`` is stage 2's next forward, input gradient and
weight gradients. A stage's actions of a kind take the microbatches in ascending order, so gradients add in one order
under every schedule. A stage whose microbatches of that kind are used up adds nothing: patterns may go past the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from autosplit.schedule.action import Action, Kind, Schedule

Cells = list[tuple[int, str]]


def _lane(microbatches: int, pattern: Iterable[tuple[int, str]]) -> tuple[Action, ...]:
    """Return one device's actions as a pattern lists them."""
    actions = []
    following: Counter[tuple[int, str]] = Counter()
    for stage, kinds in pattern:
        for kind in cast(Iterable[Kind], kinds):
            microbatch = following[stage, kind]
            if microbatch < microbatches:
                following[stage, kind] += 1
                actions.append(Action(stage, kind, microbatch))
    return tuple(actions)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards (Huang et al. 2019, section 2.3)."""
    count = microbatches
    lanes = (_lane(count, [(stage, "F")] * count + [(stage, "B")] * count) for stage in range(stages))
    return Schedule("gpipe", tuple(lanes))


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Return the schedule of an evaluation: every microbatch's forward, no backward."""
    return Schedule("forward", tuple(_lane(microbatches, [(stage, "F")] * microbatches) for stage in range(stages)))


def one_f_one_b(stages: int, microbatches: int, *, replicas: tuple[int, ...] = ()) -> Schedule:
    """Return 1F1B: some forwards to fill the pipeline, then a forward and a backward in turn (PipeDream-Flush, 2021).

    A stage holds at most ``stages - stage`` microbatches between forward and backward. Replicas of a stage take
    microbatches in turn (1F1B-RR, Narayanan et al. 2019, 3.2); each holds one, and its share of what the next stage
    holds. The paper's count, lanes from the stage on over its replicas, lets stages wait where it is rounded up behind
    them: with replicas (1, 2, 1) of stages as slow as they are many, a step took 1.5 times as long.
    """
    lanes, each = [], replicas or (1,) * stages
    for stage, (count, held) in enumerate(zip(each, held_per_replica(each), strict=True)):
        ahead: Cells = [(stage, "F")] * (held - 1)
        for numbers in (range(first, microbatches, count) for first in range(count)):
            actions = _lane(len(numbers), ahead + [(stage, "FB")] * len(numbers))
            lanes.append(tuple(action._replace(microbatch=numbers[action.microbatch]) for action in actions))
    return Schedule("1f1b", tuple(lanes), replicas=replicas)


def held_per_replica(replicas: Sequence[int]) -> list[int]:
    """Return how many microbatches a replica of each stage holds at most under 1F1B."""
    counts, behind = [], 0
    for count in reversed(replicas):
        counts.append(-(-behind // count) + 1)
        behind = counts[-1] * count
    return counts[::-1]


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
    lanes = (_interleaved(device, devices, microbatches, virtual_stages) for device in range(devices))
    return Schedule("interleaved", tuple(lanes), _looped(stages, devices=devices))


def _interleaved(device: int, devices: int, microbatches: int, virtual_stages: int) -> tuple[Action, ...]:
    """Return one device's lane of interleaved 1F1B.

    The device runs ahead by ``(virtual_stages - 1) * group + 2 * (devices - 1 - device)`` forwards: its last stage's
    first forward comes after a group through each of the others, and two more for each device behind it.
    """
    groups, turns = _groups(microbatches, devices=devices), range(virtual_stages)
    forward = [device + turn * devices for size in groups for turn in turns for _ in range(size)]
    backward = [device + turn * devices for size in groups for turn in reversed(turns) for _ in range(size)]
    warm_up = min(len(forward), (virtual_stages - 1) * max(groups, default=0) + 2 * (devices - 1 - device))
    pattern: Cells = [(stage, "F") for stage in forward[:warm_up]]
    for ahead, stage in zip(forward[warm_up:], backward, strict=False):
        pattern += [(ahead, "F"), (stage, "B")]
    return _lane(microbatches, [*pattern, *((stage, "B") for stage in backward[len(forward) - warm_up :])])


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
        held, each = range(device, stages, devices), range(microbatches)
        there: Cells = [(stage, "F") for stage in held for _ in each]
        back: Cells = [(stage, "B") for stage in reversed(held) for _ in each]
        lanes.append(_lane(microbatches, there + back))
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


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B whose weight gradients come later, at no more memory than 1F1B's (arXiv 2401.10241, 2.1).

    Stage ``s`` leaves ``s`` microbatches' weight gradients for the end, where 1F1B waits; so every stage holds as many
    microbatches as 1F1B's first. torch's ``ScheduleInterleavedZeroBubble`` with one stage per device is the same.
    """
    lanes = []
    for stage in range(stages):
        ahead, late = stages - 1 - stage, min(stage, microbatches)
        pattern: Cells = [(stage, "F")] * ahead + [(stage, "FI")] * late
        lanes.append(_lane(microbatches, pattern + [(stage, "FIW")] * (microbatches - late) + [(stage, "W")] * late))
    return Schedule("zb_h1", tuple(lanes))


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
    return Schedule("zb_v", tuple(lanes), (*range(devices), *reversed(range(devices))))


def _v_lane(device: int, *, devices: int, microbatches: int) -> tuple[Action, ...]:
    down, up = device, 2 * devices - 1 - device
    count = max(microbatches, 2 * devices - 1)
    phases: tuple[tuple[int, Cells], ...] = (
        (2 * (devices - device) - 1, [(down, "F")]),
        (device, [(up, "F"), (down, "F")]),
        (devices - device, [(up, "FIW")]),
        (count - devices, [(down, "FIW"), (up, "FIW")]),
        (device, [(down, "I"), (up, "I")]),
        (devices - device, [(down, "IW")]),
        (device, [(up, "W")]),
        (device, [(down, "W")]),
    )
    return _lane(microbatches, [cell for times, cells in phases for _ in range(times) for cell in cells])
