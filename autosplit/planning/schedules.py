"""The schedule that is asked for: one of the catalog's by its name, or the caller's own from an action file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.errors import InputError, ScheduleError
from autosplit.options import SCHEDULES
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build, stages_per_device
from autosplit.schedule.files import from_rows, read_actions
from autosplit.schedule.validate import validate

_DEFAULT_CHUNKS = 8
"""What `autosplit` takes for ``chunks`` when nothing is said; it gives way to what a file has."""


@dataclass(frozen=True)
class Asked:
    """A schedule as `Options` hold it: ``actions`` are the caller's own, lane by lane, in text form."""

    schedule: str
    virtual_stages: int
    stages: int
    chunks: int
    actions: tuple[tuple[str, ...], ...] = ()


def ask(schedule: Any, *, virtual_stages: Any, devices: int, chunks: int) -> Asked:
    """Return the schedule that is named, or that a file lists, checked against the devices and chunks.

    ``virtual_stages=1`` stands for what the schedule takes when nothing is asked for; under "auto" any other number
    means interleaved. Raises InputError where there is no such schedule or number, and ScheduleError where the file
    cannot be read, is not legal, or is made for other devices or chunks.
    """
    if isinstance(virtual_stages, bool) or not isinstance(virtual_stages, int) or virtual_stages < 1:
        raise InputError(f"virtual_stages={virtual_stages!r}: give the stages per device as an int of at least 1")
    if schedule in SCHEDULES:
        name = "interleaved" if schedule == "auto" and virtual_stages > 1 else schedule
        each = 1 if name == "auto" else stages_per_device(name, virtual_stages)
        return Asked(name, each, each * devices, chunks)
    if not _is_path(schedule):
        valid = ", ".join(map(repr, SCHEDULES))
        raise InputError(f"schedule={schedule!r} is not available; valid: {valid}, or the path of an action file")
    own = read_actions(schedule)
    return _fitting(own, virtual_stages=virtual_stages, devices=devices, chunks=chunks)


def _is_path(schedule: Any) -> bool:
    if isinstance(schedule, Path):
        return True
    if not isinstance(schedule, str) or not schedule.strip() or "\0" in schedule:
        return False
    return any(mark in schedule for mark in "/\\.") or Path(schedule).is_file()


def _fitting(own: Schedule, *, virtual_stages: int, devices: int, chunks: int) -> Asked:
    if len(own.lanes) != devices:
        raise ScheduleError(
            f"schedule {own.name!r} has {len(own.lanes)} rows, one per device, and there are {devices} devices; "
            f"give {len(own.lanes)} devices, or a file with {devices} rows"
        )
    each = max(own.stage_lane.count(lane) for lane in range(devices))
    if virtual_stages not in (1, each):
        raise ScheduleError(
            f"schedule {own.name!r} puts {each} stages on a device, virtual_stages={virtual_stages} was given; "
            "leave virtual_stages out"
        )
    if chunks not in (_DEFAULT_CHUNKS, own.microbatches):
        raise ScheduleError(
            f"schedule {own.name!r} has {own.microbatches} microbatches, chunks={chunks} was given; "
            f"give chunks={own.microbatches}, or a file with {chunks}"
        )
    rows = tuple(tuple(map(str, lane)) for lane in own.lanes)
    return Asked(own.name, each, own.stages, own.microbatches, rows)


def schedule_of(
    name: str, *, stages: int, microbatches: int, virtual_stages: int = 1, actions: Sequence[Sequence[str]] = ()
) -> Schedule:
    """Return a legal schedule for so many microbatches: the catalog's of that name, or that of ``actions``.

    Raises ScheduleError where there are more microbatches than ``actions`` have, or other stages.
    """
    if not actions:
        return build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
    whole = from_rows(actions, name=name)
    if whole.stages != stages:
        raise ScheduleError(f"schedule {name!r} is for {whole.stages} stages, and there are {stages}; plan again")
    if microbatches > whole.microbatches:
        raise ScheduleError(
            f"schedule {name!r} has {whole.microbatches} microbatches, {microbatches} are to run; "
            f"give chunks={whole.microbatches}, or a file with {microbatches}"
        )
    lanes = tuple(tuple(a for a in lane if a.microbatch < microbatches) for lane in whole.lanes)
    return validate(Schedule(name, lanes, whole.stage_lane))
