"""What each device holds while a simulated step runs: bytes over time, from a few sizes per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autosplit.schedule.action import Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageHolds:
    """Sizes of one stage, in bytes.

    Attributes:
        static_bytes: held all along: parameters, gradients, optimizer state.
        resident_bytes: per microbatch, from the start of its F to the end of its B, or of its I.
        waiting_bytes: per microbatch, from the end of its I to the end of its W.
        transient_bytes: by kind of action, what it holds besides while it runs.
    """

    static_bytes: int = 0
    resident_bytes: int = 0
    waiting_bytes: int = 0
    transient_bytes: Mapping[Kind, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a device holds from a moment on, until the next one."""

    from_s: float
    bytes: int


@dataclass(frozen=True)
class LaneMemory:
    """What one device holds over the step: in order, its peak, and the first action that reaches it."""

    held: tuple[Held, ...]
    peak_bytes: int
    peak_s: float
    peak_action: Action | None


def occupancy(schedule: Schedule, spans: Iterable[Span], holds: Sequence[StageHolds]) -> tuple[LaneMemory, ...]:
    """Return what each device holds, from its actions' spans in order; ``holds`` is by stage.

    ```
                 F0  .  F1   B0   F2 ..        resident 2, transient of B 1
        bytes    2   2  4    5    4            B0 ends: 4 - 2; F2 starts: + 2
    ```
    """
    of_lane: list[list[Span]] = [[] for _ in schedule.lanes]
    for span in spans:
        of_lane[schedule.stage_lane[span.action.stage]].append(span)
    return tuple(_lane(schedule, lane, own, holds) for lane, own in enumerate(of_lane))


def _lane(schedule: Schedule, lane: int, spans: Sequence[Span], holds: Sequence[StageHolds]) -> LaneMemory:
    now = sum(own.static_bytes for own, place in zip(holds, schedule.stage_lane, strict=True) if place == lane)
    held = [Held(0.0, now)]
    peak_bytes, peak_s, peak_action = now, 0.0, None
    for span in spans:
        kind, own = span.action.kind, holds[span.action.stage]
        if kind == "F":
            now += own.resident_bytes
        running = now + own.transient_bytes.get(kind, 0)
        held.append(Held(span.start_s, running))
        if running > peak_bytes:
            peak_bytes, peak_s, peak_action = running, span.start_s, span.action
        now -= own.waiting_bytes if kind == "W" else 0
        if kind in "BI" or not schedule.has_backward:
            now -= own.resident_bytes
        now += own.waiting_bytes if kind == "I" else 0
        held.append(Held(span.end_s, now))
    return LaneMemory(_joined(held), peak_bytes, peak_s, peak_action)


def _joined(held: Sequence[Held]) -> tuple[Held, ...]:
    """Return the entries without those that last no time or change nothing."""
    kept: list[Held] = []
    for entry in held:
        if kept and kept[-1].from_s == entry.from_s:
            kept.pop()
        if not kept or kept[-1].bytes != entry.bytes:
            kept.append(entry)
    return tuple(kept)
