"""When each action of a schedule starts and ends, from the times of its stages and transfers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autosplit.schedule.action import KINDS, Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TransferTime:
    """How long the values between two stages travel, per microbatch: forward, and their gradients back."""

    producer: int
    consumer: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        schedule: whose actions it runs.
        seconds: by kind of action and stage, how long they take.
        starts_s, ends_s: when each action starts and ends, in issue order.
        busy_s: how long each device works.
        host_s: how long the thread that issues every lane's actions issues; it waits for nothing. Of several threads
            the longest.
    """

    schedule: Schedule
    seconds: Mapping[Kind, Sequence[float]]
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    busy_s: Sequence[float]
    host_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Its length."""
        return max(self.ends_s, default=0.0)

    @property
    def bubble(self) -> float:
        """The idle fraction over all its devices."""
        return 1.0 - sum(self.busy_s) / (self.step_s * len(self.busy_s)) if self.step_s else 0.0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action's span, in issue order."""
        return tuple(map(Span, self.schedule.issue_order, self.starts_s, self.ends_s))


def simulate(
    schedule: Schedule,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    input_gradient_s: Sequence[float] | None = None,
    weight_gradient_s: Sequence[float] | None = None,
    transfers: Sequence[TransferTime] = (),
    issue_s: Mapping[Kind, Sequence[float]] | None = None,
    host_stages: Collection[int] = (),
    own_hosts: bool = False,
) -> Timeline:
    """Return the timeline from one microbatch's times of each stage, virtual ones too.

    ``forward_s[stage]`` is F's time, ``backward_s`` B's, ``input_gradient_s`` I's and ``weight_gradient_s`` W's; the
    kinds that the schedule does not use may be left out. A transfer takes no lane time; it only delays its consumer,
    and there is none between stages on one lane. An action starts when its lane is free and all that it needs has
    ended and arrived. Raises ValueError when times of a kind that the schedule uses are missing.

    ``issue_s[kind][stage]`` is how long one host thread takes to issue an action, for all lanes, in the order of
    ``schedule.issue_order``; it does not wait for lanes, and no action starts before it is issued. The actions of
    ``host_stages`` it runs itself, when what they need is there. ``own_hosts``: each lane has such a thread, which
    issues the lane's actions alone.
    """
    rows, coming = schedule.rows, _coming(schedule, transfers)
    seconds = _by_kind(schedule, (forward_s, backward_s, input_gradient_s, weight_gradient_s))
    takes = [seconds.get(kind, ()) for kind in KINDS]
    issue = [() if issue_s is None else issue_s.get(kind, ()) for kind in KINDS]
    starts, hosts, issued = list[float](), [0.0] * len(schedule.lanes), [0.0] * len(schedule.lanes)
    free, busy = [0.0] * len(schedule.lanes), [0.0] * len(schedule.lanes)
    ends = [0.0] * (len(rows.ticks) + 1)
    columns = rows.stages, rows.kinds, rows.microbatches, rows.same, rows.near
    actions = zip(*(column.tolist() for column in columns), strict=True)
    for row, (stage, kind, microbatch, same, near) in enumerate(actions):
        lane, takes_s = schedule.lane_of(stage, microbatch), takes[kind][stage]
        host = lane if own_hosts else 0
        if issue_s is not None:
            hosts[host] += 0.0 if stage in host_stages else issue[kind][stage]
            issued[host] = hosts[host]
        start_s = max(free[lane], ends[same], ends[near], hosts[host])
        for source, delay_s in coming[kind][stage]:
            if (arrived_s := ends[source[microbatch]] + delay_s) > start_s:
                start_s = arrived_s
        starts.append(start_s)
        free[lane] = ends[row] = start_s + takes_s
        busy[lane] += takes_s
        if stage in host_stages:
            hosts[host] = ends[row]
    return Timeline(schedule, seconds, starts, ends[:-1], busy, max(issued))


def _by_kind(schedule: Schedule, times: Sequence[Sequence[float] | None]) -> dict[Kind, Sequence[float]]:
    known = {kind: seconds for kind, seconds in zip(KINDS, times, strict=True) if seconds is not None}
    missing = sorted(schedule.kinds - known.keys())
    if missing:
        names = {"B": "backward_s", "I": "input_gradient_s", "W": "weight_gradient_s"}
        raise ValueError(
            f"schedule {schedule.name!r} has actions of kind {' and '.join(missing)}; "
            f"give {' and '.join(names[kind] for kind in missing)}"
        )
    return known


def _coming(schedule: Schedule, transfers: Sequence[TransferTime]) -> list[list[list[tuple[list[int], float]]]]:
    """Return by kind and stage what an action waits for: its rows by microbatch, and how long it travels from there."""
    coming: list[list[list[tuple[list[int], float]]]] = [[[] for _ in range(schedule.stages)] for _ in KINDS]
    forward, *backward = coming
    for transfer in transfers:
        if schedule.stage_lane[transfer.producer] != schedule.stage_lane[transfer.consumer]:
            forward[transfer.consumer].append((schedule.rows.forward[transfer.producer].tolist(), transfer.forward_s))
            gradients = schedule.rows.gradient[transfer.consumer]
            for kind in backward[:2]:  # W needs nothing of another stage
                kind[transfer.producer].append((gradients.tolist(), transfer.backward_s))
    return coming
