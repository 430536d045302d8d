"""What a step that ran out of memory is told: predicted against available, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosplit.planning.explain.reasons import setting
from autosplit.planning.explain.verdicts import DeviceVerdict, binding, device_verdicts
from autosplit.planning.plan.plan import Plan
from autosplit.schedule.action import Action
from autosplit.units import format_bytes

_MOST = 3
"""So many ways out are named at most."""
_OTHERS = 1.02
"""Tensors that have so many times the predicted peak are more than the step's own."""


def short_of_memory(plan: Plan, *, action: Action | None, sizes: Sequence[int], held_bytes: int | None = None) -> str:
    """Return what the plan knows of a step in which memory ran out, in one paragraph.

    ``action`` is where; None: between the cells. ``sizes`` are the rows of the batch's microbatches, ``held_bytes``
    what all tensors had on the action's device then; None where nobody counts them.
    """
    devices = device_verdicts(plan)
    if action is None:
        where = "out of memory between the cells of a step"
        devices = (binding(plan) or max(devices, key=lambda one: one.peak_bytes),)
    else:
        lane = plan.stages[action.stage].lane
        devices = tuple(one for one in devices if one.lane == lane)
        where = f"out of memory in {action}"
    one = devices[0]
    room = "no limit is known" if one.capacity_bytes is None else f"{format_bytes(one.capacity_bytes)} are available"
    held = "" if held_bytes is None else f", and tensors had {format_bytes(held_bytes)} when it ran out"
    planned = f"{'' if action is None else 'stage ' + str(action.stage) + ' is '}on {one.device}"
    facts = f"{where}: {planned}, where {format_bytes(one.peak_bytes)} were predicted and {room}{held}"
    helps = [*_helps(plan, one, sizes, held_bytes)][:_MOST]
    return f"{facts}. What would help: {'; '.join(helps)}. The pipe can be called again once there is room"


def _helps(plan: Plan, one: DeviceVerdict, sizes: Sequence[int], held_bytes: int | None) -> Iterator[str]:
    """Yield ways out, those that the numbers speak for first."""
    planned = plan.microbatch_rows
    if max(sizes) > max(planned) or (len(sizes), sum(sizes)) > (len(planned), sum(planned)):
        yield (
            f"a plan for this batch, with sample= of its size: it has {sum(sizes)} rows in {len(sizes)} microbatches, "
            f"planned were {sum(planned)} in {len(planned)}"
        )
    if held_bytes is not None and held_bytes > _OTHERS * one.peak_bytes:
        more = format_bytes(held_bytes - one.peak_bytes)
        yield f"to free what else lies on {one.device}: tensors had {more} more than all that was predicted of the step"
    yield from (change.text for change in plan.changes[:1])
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    smaller = [other for other in plan.frontier if other.peak_bytes < peak]
    if smaller:
        best = min(smaller, key=lambda other: (other.verdict == "no", other.step_s))
        yield f"{setting(best)}, {format_bytes(peak - best.peak_bytes)} less on the fullest device by the plan"
    if any(plan.stages[stage].recompute != "always" for stage in one.stages):
        yield "recompute='always' or 'block', which keeps less from forward to backward"
    if max(planned) > 1:
        yield f"more than {plan.chunks} chunks, or fewer rows in the batch"
    yield "more devices, or a lower memory_limit= to plan for"
