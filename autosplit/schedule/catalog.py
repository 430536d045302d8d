"""The schedules by name, and how many microbatches each keeps in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.gpipe import forward_only, gpipe
from autosplit.schedule.one_f_one_b import one_f_one_b


@dataclass(frozen=True)
class Entry:
    """How one schedule is made, and its in-flight count as a function of (stages behind this one + 1, microbatches)."""

    build: Callable[[int, int], Schedule]
    in_flight: Callable[[int, int], int]


SCHEDULES: Mapping[str, Entry] = MappingProxyType(
    {
        "gpipe": Entry(gpipe, lambda depth, microbatches: microbatches),
        "1f1b": Entry(one_f_one_b, lambda depth, microbatches: min(microbatches, depth)),
        "forward": Entry(forward_only, lambda depth, microbatches: 1),
    }
)


def build(name: str, *, stages: int, microbatches: int) -> Schedule:
    """Return the schedule called ``name``."""
    return _entry(name).build(stages, microbatches)


def in_flight(name: str, *, stage: int, stages: int, microbatches: int) -> int:
    """Return how many microbatches a stage holds at most: begun by their forward and not released by their backward.

    Without a backward the forward itself releases its microbatch, so there is one.
    """
    return _entry(name).in_flight(stages - stage, microbatches)


def _entry(name: str) -> Entry:
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[name]
