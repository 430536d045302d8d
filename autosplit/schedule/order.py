"""One legal global order of a schedule's actions, for a single thread that issues every lane."""

from __future__ import annotations

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Schedule


def issue_order(schedule: Schedule) -> tuple[Action, ...]:
    """Return all actions in clock order, within a tick by lane; raises ScheduleError when some can never start."""
    order = schedule.in_order
    blocked = sum(map(len, schedule.lanes)) - len(order)
    if blocked:
        raise ScheduleError(
            f"{blocked} actions of schedule {schedule.name!r} can never start; validate(schedule) shows where\n"
            f"{schedule.grid()}"
        )
    return order
