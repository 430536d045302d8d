"""What callers choose of a plan, checked once and together with the plan that they pin; without torch.

`autosplit`, `plan` and the command line ask `chosen`: the command line before the model is made, so that a wrong word
is said at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autosplit.checks import (
    CUT,
    check_chunks,
    check_memory_limit,
    check_optimizer,
    check_precision,
    check_recompute,
    check_reserve,
    choose,
)
from autosplit.errors import PlanError
from autosplit.planning.request.schedules import ScheduleRequest, ask

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan

_CHUNKS = 8
"""What is taken for ``chunks`` where nothing is said, and gives way to what a plan or an action file has."""


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
    cut: Any = "modules",
    pinned: Plan | None = None,
) -> dict[str, Any]:
    """Return the arguments of `Options` that say what was chosen for so many devices, checked.

    What is left at its default gives way to a pinned plan's.

    Raises InputError, ScheduleError: a choice is not available. PlanError: it is not the pinned plan's.
    """
    count = _CHUNKS if chunks == "auto" else check_chunks(chunks)
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
        "recompute": _recompute(recompute, stages=asked.stages, pinned=pinned),
        "memory_limit": check_memory_limit(memory_limit),
        "reserve": check_reserve(reserve),
        "optimizer": check_optimizer(_optimizer(optimizer, pinned)),
        "precision": check_precision(precision),
        "cut_between": choose("cut", cut, CUT),
    }


def _chunks(plan: Plan, chunks: int) -> int:
    """Return the plan's chunks; the default 8 gives way to them, any other number that differs is an error."""
    if chunks not in (8, plan.chunks):
        raise PlanError(
            f"the plan has chunks={plan.chunks}, chunks={chunks} was given; leave chunks out, or plan again"
        )
    return plan.chunks


def _check_schedule(asked: ScheduleRequest, plan: Plan) -> None:
    """Raise PlanError where a schedule is asked for that is not the plan's; "auto" is any."""
    planned = plan.schedule, plan.virtual_stages, plan.actions
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
