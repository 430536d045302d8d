"""The schedules by name, and how many microbatches each keeps in flight.

| name | devices hold | backward | microbatches held by a stage, with ``d = stages - stage`` |
|---|---|---|---|
| gpipe | one stage | B | all |
| 1f1b | one stage | B | d |
| forward | one stage | none | 1 |
| interleaved | v ≥ 2 stages, looped | B | counted; device r of P holds 2 (P - r - 1) + (v - 1) P + 1 in all |
| looped_bfs | v ≥ 2 stages, looped | B | all |
| zb_h1 | one stage | I, W | P, of which d with everything that the forward saved |
| zb_v | 2 stages, as a V | I, W | d |

Never more than there are microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.gpipe import forward_only, gpipe
from autosplit.schedule.in_flight import most_held
from autosplit.schedule.interleaved import interleaved, looped_bfs
from autosplit.schedule.one_f_one_b import one_f_one_b
from autosplit.schedule.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class Size:
    """What a schedule is made for: stages in all, microbatches, and stages per device."""

    stages: int
    microbatches: int
    virtual_stages: int


@dataclass(frozen=True)
class Entry:
    """How one schedule is made, its in-flight count of a stage, and how many stages a device may hold.

    ``virtual_stages`` is None where it may be any number from 2 on.
    """

    build: Callable[[Size], Schedule]
    in_flight: Callable[[int, Size], int]
    virtual_stages: int | None = 1


def _all(stage: int, size: Size) -> int:
    return size.microbatches


def _depth(stage: int, size: Size) -> int:
    return min(size.microbatches, size.stages - stage)


def _interleaved(stage: int, size: Size) -> int:
    schedule = _built("interleaved", size)
    return most_held(schedule.lanes[schedule.stage_lane[stage]], stage=stage)


SCHEDULES: Mapping[str, Entry] = MappingProxyType(
    {
        "gpipe": Entry(lambda size: gpipe(size.stages, size.microbatches), _all),
        "1f1b": Entry(lambda size: one_f_one_b(size.stages, size.microbatches), _depth),
        "forward": Entry(lambda size: forward_only(size.stages, size.microbatches), lambda stage, size: 1),
        "interleaved": Entry(
            lambda size: interleaved(size.stages, size.microbatches, virtual_stages=size.virtual_stages),
            _interleaved,
            virtual_stages=None,
        ),
        "looped_bfs": Entry(
            lambda size: looped_bfs(size.stages, size.microbatches, virtual_stages=size.virtual_stages),
            _all,
            virtual_stages=None,
        ),
        "zb_h1": Entry(
            lambda size: zb_h1(size.stages, size.microbatches),
            lambda stage, size: min(size.microbatches, size.stages),
        ),
        "zb_v": Entry(lambda size: zb_v(size.stages, size.microbatches), _depth, virtual_stages=2),
    }
)


def build(name: str, *, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Return the schedule called ``name``.

    ``stages`` counts them all, so there are ``stages / virtual_stages`` devices. ``virtual_stages=1`` stands for what
    the schedule takes when nothing is asked for: 2 under interleaved, looped_bfs and zb_v, whose devices hold several.
    Raises ScheduleError when the stages do not fill the devices, or the schedule has no such number per device.
    """
    return _built(name, _size(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages))


@lru_cache(maxsize=16)
def _built(name: str, size: Size) -> Schedule:
    return _entry(name).build(size)


def in_flight(name: str, *, stage: int, stages: int, microbatches: int, virtual_stages: int = 1) -> int:
    """Return how many microbatches a stage holds at most: begun by their forward and not released by their backward.

    Where the backward is split, W releases. Without a backward the forward itself releases its microbatch, so there is
    one. The numbers mean what they mean to `build`; `in_flight_of` counts any schedule, and what whole devices hold.
    """
    size = _size(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
    return _entry(name).in_flight(stage, size)


def _entry(name: str) -> Entry:
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[name]


def least_per_device(name: str) -> int:
    """Return the fewest stages that a schedule puts on a device."""
    return _entry(name).virtual_stages or 2


def stages_per_device(name: str, virtual_stages: int = 1) -> int:
    """Return how many stages a device holds under a schedule; ``virtual_stages`` means what it means to `build`.

    Raises ScheduleError when the schedule has no such number per device.
    """
    allowed = _entry(name).virtual_stages
    if virtual_stages == 1:
        virtual_stages = least_per_device(name)
    if virtual_stages < 2 if allowed is None else virtual_stages != allowed:
        takes = "2 or more stages" if allowed is None else "1 stage" if allowed == 1 else f"{allowed} stages"
        others = [other for other, entry in SCHEDULES.items() if entry.virtual_stages in (None, virtual_stages)]
        instead = f", or choose {' or '.join(others)}" if virtual_stages > 1 else ""
        raise ScheduleError(f"{name} puts {takes} on a device, not {virtual_stages}; leave virtual_stages out{instead}")
    return virtual_stages


def _size(name: str, *, stages: int, microbatches: int, virtual_stages: int) -> Size:
    virtual_stages = stages_per_device(name, virtual_stages)
    if stages % virtual_stages:
        less = stages - stages % virtual_stages
        ways = " or ".join(str(count) for count in (less, less + virtual_stages) if count)
        raise ScheduleError(
            f"{name} puts {virtual_stages} stages on every device, and {stages} is no multiple of {virtual_stages}; "
            f"cut the model into {ways} stages"
        )
    return Size(stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
