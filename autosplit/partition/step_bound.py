"""What no step can be shorter than, whatever the cut: paths through the schedule's actions that every cut has.

Any path through the actions of a schedule, along lanes and from stage to stage, bounds a step from below. These go once
forward through all stages and once back, and stay a while on the lane of one stage ``i`` on the way there and of one
stage ``j`` on the way back:

    F0 of stages 0..i, what i does until Fm, Fm of i+1..last, Bk of last..j, what j does until its last B, that B to 0

where Bk is the first backward of the last stage after its Fm. So every path of a family (one ``m``) takes

    sum of F + B + transfers  +  before(i): i's other actions until Fm  +  after(j): j's other actions after Bk

and the step takes the longest: ``sum + max over i of before(i) + max over j of after(j)``. Under GPipe with m the
last microbatch that is ``(M-1) max F + (M-1) max B + sum``. Transfers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autosplit.partition.fast_simulate import Ints
from autosplit.partition.problem import Device, Problem
from autosplit.schedule.action import Action, Kind, Schedule

_ROUNDING = 1 - 4e-10


@dataclass(frozen=True)
class Family:
    """How often each stage's F, B or I, and W lie on a path besides once each: on the way there, and back.

    ``tail`` counts what stage 0 does after its last B or I.
    """

    before: Ints
    after: Ints
    tail: Ints


def families(schedule: Schedule) -> list[Family]:
    """Return the families of a few microbatches ``m``, those of the ends and some between."""
    microbatches, stages = schedule.microbatches, schedule.stages
    lanes = _Lanes(schedule)
    some = {0, microbatches - 1, min(stages, microbatches) - 1, max(0, microbatches - stages)}
    some |= {microbatches * part // 8 for part in range(8)}
    return [lanes.family(microbatch) for microbatch in sorted(some)]


class _Lanes:
    """The actions of each stage in their order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.own: list[list[Action]] = [[] for _ in range(schedule.stages)]
        for action in schedule:
            self.own[action.stage].append(action)
        self.places = [{action: place for place, action in enumerate(actions)} for actions in self.own]

    def family(self, microbatch: int) -> Family:
        """Return the family of paths that leave with microbatch ``microbatch``."""
        last, final = self.schedule.stages - 1, self.schedule.microbatches - 1
        before = np.array(
            [
                _counts(actions[self._place(stage, "F", 0) + 1 : self._place(stage, "F", microbatch) + 1])
                for stage, actions in enumerate(self.own)
            ]
        )
        back = self._next_backward(last, self._place(last, "F", microbatch))
        if back is None:
            return Family(before, np.zeros_like(before), np.zeros_like(before[0]))
        ends = [self._gradient(stage, final) + 1 for stage in range(last + 1)]
        after = np.array(
            [_counts(actions[self._gradient(stage, back) + 1 : ends[stage]]) for stage, actions in enumerate(self.own)]
        )
        return Family(before, after, np.array(_counts(self.own[0][ends[0] :])))

    def _next_backward(self, stage: int, place: int) -> int | None:
        """Return the microbatch of the stage's first backward behind a place."""
        return next((action.microbatch for action in self.own[stage][place + 1 :] if action.kind in "BI"), None)

    def _place(self, stage: int, kind: Kind, microbatch: int) -> int:
        return self.places[stage][Action(stage, kind, microbatch)]

    def _gradient(self, stage: int, microbatch: int) -> int:
        return self.places[stage][self.schedule.input_gradient(stage, microbatch)]


def _counts(actions: list[Action]) -> list[int]:
    kinds = [action.kind for action in actions]
    return [kinds.count("F"), kinds.count("B") + kinds.count("I"), kinds.count("W")]


def simple_bound(problem: Problem, *, stages: int, longest_s: float = 0.0) -> float:
    """Return what no cut into so many stages can be below, whatever its ideals and the order of its devices.

    ``longest_s``: in every cut the works of some device take so long, per microbatch.

    As far as times go, the works could be spread at will: each family's longest stay is no shorter than what its least
    counts give when every stage has its fair share.
    """
    schedule = problem.schedule_of(stages)
    kinds = {action.kind for action in schedule}
    forward_s, backward_s, weight_s = (
        sum(getattr(work, name) for work in problem.works) for name in ("forward_s", "backward_s", "weight_s")
    )
    split_s = weight_s if "W" in kinds else 0.0
    sums = np.array([forward_s, backward_s - split_s if schedule.has_backward else 0.0, split_s])
    devices = problem.devices or (Device(),) * stages
    speeds = sorted((device.replicas / device.slowdown for device in devices), reverse=True)
    each = max(schedule.stage_lane.count(lane) for lane in range(len(schedule.lanes)))
    lanes = speeds[: len(schedule.lanes)]
    shared = problem.microbatches * sums.sum() / sum(lanes)
    alone = [
        sums[:2].sum() / speeds[0] + (family.before.min(axis=0) + family.after.min(axis=0)) @ sums / (each * sum(lanes))
        for family in families(schedule)
    ]
    each_s = problem.microbatches * longest_s
    if each == 1 and not split_s:
        stays = ((family.before + family.after)[:, : 1 + schedule.has_backward].min() for family in families(schedule))
        each_s = max(each_s, sums.sum() / speeds[0] + longest_s * max(stays))
    return float(max(shared, each_s, *alone)) * _ROUNDING
