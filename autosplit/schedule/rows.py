"""A schedule's actions as rows of numbers in clock order: what simulators loop over.

Each action has a number of its own, by stage, kind and microbatch. Looking up in lists by that takes a tenth of what
looking up tuples takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}

Lanes = Sequence[Sequence[tuple[int, str, int]]]
"""The actions of each lane: stage, kind and microbatch."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The actions that can start, by clock tick and within a tick by lane: lists with one entry per action.

    Attributes:
        ticks: its tick when every action takes one and starts as early as it can.
        lanes, positions: where it stands in the schedule.
        stages, kinds, microbatches: what it is; kinds are F 0, B 1, I 2, W 3.
        own: the row of what it needs of its own stage: a backward its forward, W its I.
        near: the row of what it needs of a neighbouring stage. ``len(ticks)`` stands for nothing, here and below.
        forward: the row of each stage's forward of each microbatch.
        gradient: the row of what makes the gradient of its input, I where the backward is split and B elsewhere.
    """

    ticks: list[int]
    lanes: list[int]
    positions: list[int]
    stages: list[int]
    kinds: list[int]
    microbatches: list[int]
    own: list[int]
    near: list[int]
    forward: list[list[int]]
    gradient: list[list[int]]


class _Numbers:
    """The actions by number: whole stages, kinds within a stage, microbatches within a kind.

    There is room for a stage before the first and one behind the last, so that a neighbour has a number always.
    """

    def __init__(self, lanes: Lanes, *, stages: int) -> None:
        every = [action for lane in lanes for action in lane]
        self.first_stage = min(0, min((stage for stage, _, _ in every), default=0)) - 1
        self.first = min(0, min((microbatch for _, _, microbatch in every), default=0))
        self.width = max((microbatch for _, _, microbatch in every), default=0) - self.first + 1
        last_stage = max(stages, max((stage for stage, _, _ in every), default=0) + 1)
        self.of_stage = 4 * self.width
        self.count = (last_stage - self.first_stage + 1) * self.of_stage
        self.lanes = [
            [
                (stage - self.first_stage) * self.of_stage + _KINDS[kind] * self.width + microbatch - self.first
                for stage, kind, microbatch in lane
            ]
            for lane in lanes
        ]
        self.present = {number for lane in self.lanes for number in lane}
        self.own, self.near = self._needs(last_stage, stages)

    def forward(self, stage: int) -> range:
        """Return the numbers of a stage's forwards."""
        start = (stage - self.first_stage) * self.of_stage
        return range(start, start + self.width)

    def gradient(self, stage: int) -> list[int]:
        """Return the numbers of what makes the gradients of a stage's input."""
        whole = [number + self.width for number in self.forward(stage)]
        return [half if (half := number + self.width) in self.present else number for number in whole]

    def _needs(self, last_stage: int, stages: int) -> tuple[list[int], list[int]]:
        """Return what each action needs of its own stage and of a neighbour, by numbers; ``count`` stands for nothing.

        See `Schedule.needs`.
        """
        nothing = [self.count] * self.width
        own, near = nothing * 4, nothing * 4
        for stage in range(self.first_stage + 1, last_stage + 1):
            forwards = list(self.forward(stage))
            own += nothing + forwards * 2 + [number + 2 * self.width for number in forwards]
            back = self.gradient(stage + 1) if stage != stages - 1 else nothing
            near += (list(self.forward(stage - 1)) if stage else nothing) + back * 2 + nothing
        return own, near

    def ends(self) -> list[list[int]]:
        """Return when each action that can start ends, in ticks, lane by lane.

        Follow each lane until it waits for an action of another, and go on there once that has its tick.
        """
        after = [-1] * self.count + [0]
        ends: list[list[int]] = [[] for _ in self.lanes]
        clock = [0] * len(self.lanes)
        waiting: dict[int, list[int]] = {}
        running = list(range(len(self.lanes)))
        while running:
            lane = running.pop()
            now, found, actions = clock[lane], ends[lane], self.lanes[lane]
            for place in range(len(found), len(actions)):
                action = actions[place]
                own, near = after[self.own[action]], after[self.near[action]]
                if own < 0 or near < 0:
                    waiting.setdefault(self.own[action] if own < 0 else self.near[action], []).append(lane)
                    break
                now = 1 + max(now, own, near)
                found.append(now)
                if after[action] < 0:
                    after[action] = now
                if action in waiting:
                    running += waiting.pop(action)
            clock[lane] = now
        return ends


def rows_of(lanes: Lanes, *, stages: int) -> Rows:
    """Return the rows of a schedule of so many stages; what can never start (a deadlock) has none."""
    numbers = _Numbers(lanes, stages=stages)
    each, width = len(lanes), max(map(len, lanes), default=0)
    # One number per action that orders them: tick, then lane, with the position in its lane behind.
    places = [
        (tick * each + lane) * width + position
        for lane, own in enumerate(numbers.ends())
        for position, tick in enumerate(own)
    ]
    places.sort()
    positions = [place % width for place in places]
    in_lane = [place // width for place in places]
    lane_of = [place % each for place in in_lane]
    actions = [numbers.lanes[lane][position] for lane, position in zip(lane_of, positions, strict=True)]
    row = [len(actions)] * (numbers.count + 1)
    for place, action in enumerate(actions):
        row[action] = place
    return Rows(
        ticks=[place // each - 1 for place in in_lane],
        lanes=lane_of,
        positions=positions,
        stages=[action // numbers.of_stage + numbers.first_stage for action in actions],
        kinds=[action // numbers.width % 4 for action in actions],
        microbatches=[action % numbers.width + numbers.first for action in actions],
        own=[row[numbers.own[action]] for action in actions],
        near=[row[numbers.near[action]] for action in actions],
        forward=[[row[number] for number in numbers.forward(stage)] for stage in range(stages)],
        gradient=[[row[number] for number in numbers.gradient(stage)] for stage in range(stages)],
    )
