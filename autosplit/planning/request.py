"""What callers choose of a plan, checked once and together with the plan that they pin; without torch.

`autosplit`, `plan` and the command line ask `chosen`: the command line before the model is made, so that a wrong word
is said at once. A schedule is one of the catalog's by its name, or the caller's own from an action file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.checks import (
    CUT,
    SCHEDULES,
    check_allocator,
    check_chunks,
    check_memory_limit,
    check_offload,
    check_optimizer,
    check_precision,
    check_recompute,
    check_reserve,
    choose,
    meant,
)
from autosplit.errors import InputError, PlanError, ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import least_per_device, stages_per_device
from autosplit.schedule.files import from_rows, read_actions, schedule_of
from autosplit.units import plural

if TYPE_CHECKING:
    from autosplit.options import Options
    from autosplit.planning.plan.plan import Plan


class _Default(int):
    """A number that stands for what nobody gave; an equal one that somebody gave is another object."""


DEFAULT_CHUNKS = _Default(8)
"""The default of ``chunks``; an action file's number replaces it."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule as `Options` hold it: ``actions`` are the caller's own, lane by lane, in text form."""

    schedule: str
    virtual_stages: int
    stages: int
    chunks: int
    actions: tuple[tuple[str, ...], ...] = ()


def ask(schedule: Any, *, virtual_stages: Any, devices: int, chunks: int) -> ScheduleRequest:
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
        return ScheduleRequest(name, each, each * devices, int(chunks))
    if not _is_path(schedule):
        valid = ", ".join(map(repr, SCHEDULES))
        near = meant(schedule, SCHEDULES)
        raise InputError(f"schedule={schedule!r} is not available{near}; valid: {valid}, or the path of an action file")
    custom = read_actions(schedule)
    return _fitting(custom, virtual_stages=virtual_stages, devices=devices, chunks=chunks)


def _is_path(schedule: Any) -> bool:
    if isinstance(schedule, Path):
        return True
    if not isinstance(schedule, str) or not schedule.strip() or "\0" in schedule:
        return False
    return any(mark in schedule for mark in "/\\.") or Path(schedule).is_file()


def _fitting(custom: Schedule, *, virtual_stages: int, devices: int, chunks: int) -> ScheduleRequest:
    if len(custom.lanes) != devices:
        raise ScheduleError(
            f"schedule {custom.name!r} has {plural(len(custom.lanes), 'row')}, one per device, and there are "
            f"{plural(devices, 'device')}; give {plural(len(custom.lanes), 'device')}, or a file with {devices} rows"
        )
    each = max(custom.stage_lane.count(lane) for lane in range(devices))
    if virtual_stages not in (1, each):
        raise ScheduleError(
            f"schedule {custom.name!r} puts {each} stages on a device, virtual_stages={virtual_stages} was given; "
            "leave virtual_stages out"
        )
    if chunks is not DEFAULT_CHUNKS and chunks != custom.microbatches:
        raise ScheduleError(
            f"schedule {custom.name!r} has {plural(custom.microbatches, 'microbatch')}, chunks={chunks} was given; "
            f"give chunks={custom.microbatches}, or a file with {chunks}"
        )
    return ScheduleRequest(custom.name, each, custom.stages, custom.microbatches, custom.texts)


@dataclass(frozen=True)
class ResolvedSchedule:
    """What a plan is made for: ``custom`` where the catalog has no such schedule for as many stages and microbatches.

    ``stages`` is how many there are to be; ``warning`` says where the schedule is not what was asked.
    """

    schedule: str
    virtual_stages: int
    stages: int
    custom: Schedule | None = None
    warning: str | None = None


def settle(options: Options, *, parts: int, microbatches: int) -> ResolvedSchedule:
    """Return the schedule for a model of so many separable parts.

    With fewer parts than stages, devices get fewer stages each, as far as the schedule allows that; then fewer devices
    are used; a single part is one stage under 1F1B. A schedule from an action file is never changed: raises
    ScheduleError if it has more stages than there are parts.
    """
    name = "1f1b" if options.schedule == "auto" else options.schedule
    devices = len(options.devices)
    if options.actions:
        stages = from_rows(options.actions, name=name).stages
        if stages > parts:
            raise ScheduleError(
                f"schedule {name!r} is for {stages} stages, and the model has only {plural(parts, 'separable part')}; "
                f"give a file of at most {plural(parts, 'stage')}, or a schedule by name"
            )
        custom = schedule_of(name, stages=stages, microbatches=microbatches, actions=options.actions)
        return ResolvedSchedule(name, options.virtual_stages, stages, custom)
    if replicas := options.replicas:
        if len(replicas) > parts:
            raise ScheduleError(
                f"replicas={list(replicas)} are {plural(len(replicas), 'stage')}, and the model has only "
                f"{plural(parts, 'separable part')}; give fewer stages"
            )
        if microbatches < max(replicas):
            raise ScheduleError(
                f"replicas={list(replicas)} with {microbatches} microbatches: each replica needs one; give at least "
                f"{max(replicas)} chunks and rows"
            )
        custom = schedule_of(name, stages=len(replicas), microbatches=microbatches, replicas=replicas)
        return ResolvedSchedule(name, 1, len(replicas), custom)
    asked = options.virtual_stages
    if parts >= devices * asked:
        return ResolvedSchedule(name, asked, devices * asked)
    fewest = least_per_device(name)
    each = max(fewest, min(asked, parts // devices))
    stages = min(parts // each, devices) * each
    if not stages:
        name, each, stages = "1f1b", 1, 1
    used = "" if stages == devices * each else f" on {plural(stages // each, 'device')}"
    instead = f" under {name}" if each != asked or (name != options.schedule and options.schedule != "auto") else ""
    warning = (
        f"{plural(devices, 'device')} were given{f' for {asked} stages each' if asked > 1 else ''}, but the model has "
        f"only {plural(parts, 'separable part')}: using {plural(stages, 'stage')}{used if asked > 1 else ''}{instead}"
    )
    return ResolvedSchedule(name, each, stages, warning=warning)


def sizes_of(rows: int, chunks: int, min_rows: int, *, like: str = "tensor_split") -> tuple[int, ...]:
    """Return the rows of each microbatch, at most ``chunks`` of at least ``min_rows``.

    They are cut as ``torch.tensor_split`` cuts, sizes as even as can be, or as ``torch.chunk`` does: all of one size
    except for a smaller last one, which may give fewer.
    """
    if like == "chunk":
        size = max(-(-rows // chunks), min_rows)
        whole, rest = divmod(rows, size)
        if rest >= min_rows or not whole:
            return (*[size] * whole, *[rest] * (rest > 0))
        return (*[size] * (whole - 1), size + rest)
    count = max(1, min(chunks, rows // min_rows))
    base, extra = divmod(rows, count)
    return tuple(base + (i < extra) for i in range(count))


def chosen(
    *,
    devices: int,
    chunks: int | str,
    schedule: Any,
    virtual_stages: Any,
    recompute: Any,
    memory_limit: Any,
    optimizer: Any,
    precision: Any = None,
    reserve: Any = None,
    allocator: Any = None,
    cut: Any = "modules",
    pinned: Plan | None = None,
    offload: Any = None,
) -> dict[str, Any]:
    """Return the arguments of `Options` that say what was chosen for so many devices, checked.

    What is left at its default gives way to a pinned plan's.

    Raises InputError, ScheduleError: a choice is not available. PlanError: it is not the pinned plan's.
    """
    count = DEFAULT_CHUNKS if chunks == "auto" else check_chunks(chunks)
    asked = ask(
        schedule,
        virtual_stages=virtual_stages,
        devices=devices,
        chunks=count if pinned is None else _chunks(pinned, count),
    )
    if pinned is not None:
        _check_schedule(asked, pinned)
    return {
        "chunks": asked.chunks,
        "schedule": asked.schedule,
        "virtual_stages": asked.virtual_stages,
        "actions": asked.actions,
        "memory_limit": check_memory_limit(memory_limit),
        "reserve": check_reserve(reserve),
        "allocator": check_allocator(allocator),
        "precision": check_precision(precision),
        "cut_between": choose("cut", cut, CUT),
        **check_offload(
            pinned.offload if offload is None and pinned is not None else offload,
            optimizer=check_optimizer(_optimizer(optimizer, pinned)),
            schedule=asked.schedule,
            recompute=_recompute(recompute, stages=asked.stages, pinned=pinned),
        ),
    }


def _chunks(plan: Plan, chunks: int) -> int:
    """Return the plan's chunks; the default gives way to them, any number that was given and differs is an error."""
    if chunks is not DEFAULT_CHUNKS and chunks != plan.chunks:
        raise PlanError(
            f"the plan has chunks={plan.chunks}, chunks={chunks} was given; leave chunks out, or plan again"
        )
    return plan.chunks


def _check_schedule(asked: ScheduleRequest, plan: Plan) -> None:
    """Raise PlanError where a schedule is asked for that is not the plan's; "auto" is any."""
    planned = plan.schedule, plan.virtual_stages, plan.schedule_rows
    if asked.schedule != "auto" and planned != (asked.schedule, asked.virtual_stages, asked.actions):
        raise PlanError(
            f"the plan has schedule={plan.schedule!r} with virtual_stages={plan.virtual_stages}, "
            f"schedule={asked.schedule!r} with virtual_stages={asked.virtual_stages} was given; leave schedule and "
            "virtual_stages out, or plan again"
        )


def _optimizer(optimizer: Any, plan: Plan | None) -> Any:
    """Return what keeps state; the default "adamw" gives way to a plan's."""
    if plan is None or optimizer != "adamw":
        return optimizer
    return int(plan.optimizer) if plan.optimizer.isdecimal() else plan.optimizer


def _recompute(recompute: Any, *, stages: int, pinned: Plan | None) -> tuple[str, ...] | None:
    """Return what stages recompute; with a plan it is the plan's, and anything else but "auto" is an error."""
    asked = check_recompute(recompute, stages=stages)
    if pinned is None or asked is None:
        return asked
    planned = [stage.recompute for stage in pinned.stages]
    if planned != (list(asked) * len(planned) if len(asked) == 1 else list(asked)):
        raise PlanError(
            f"the plan has recompute={planned}, recompute={recompute!r} was given; leave recompute out, or plan again"
        )
    return asked
