"""What each device holds over a step, kind by kind, from the replay of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autosplit.memory.pieces import MemoryKind
from autosplit.planning.plan.parts import LaneCurve
from autosplit.planning.plan.plan import Plan
from autosplit.schedule.action import Schedule

if TYPE_CHECKING:
    from autosplit.planning.memory import DevicePeak

MOST_ACTIONS = 40_000
"""Of a longer step no curves are kept: they would be the larger part of the plan."""


def lane_curves(fullest: Sequence[DevicePeak], schedule: Schedule) -> tuple[LaneCurve, ...]:
    """Return what each device holds at the fullest moment of each of its actions, and in the optimizer's step.

    Empty where nothing was replayed, or the step has more than :data:`MOST_ACTIONS` actions.
    """
    if sum(map(len, schedule.lanes)) > MOST_ACTIONS:
        return ()
    return tuple(_curve(device, actions=len(lane)) for device, lane in zip(fullest, schedule.lanes, strict=False))


def _curve(device: DevicePeak, *, actions: int) -> LaneCurve:
    moments: list[Mapping[MemoryKind, int]] = [*device.over_step]
    if len(moments) == actions:  # no optimizer's step: what is left stays
        moments.append(device.left)
    transient = [moment.get("transient", 0) for moment in moments]
    most = max(range(len(moments)), key=lambda index: sum(moments[index].values()))
    transient[most] += device.epilogue_bytes

    def of(*kinds: MemoryKind) -> tuple[int, ...]:
        return tuple(sum(moment.get(kind, 0) for kind in kinds) for moment in moments)

    return LaneCurve(
        parameter_bytes=of("parameters"),
        gradient_bytes=of("gradients"),
        optimizer_bytes=of("optimizer"),
        activation_bytes=of("activations", "whole_batch", "casts"),
        transient_bytes=tuple(transient),
    )


def parts(curve: LaneCurve) -> tuple[tuple[int, ...], ...]:
    """Return a device's bytes over the step by kind, from what stays to what passes."""
    return (
        curve.parameter_bytes,
        curve.gradient_bytes,
        curve.optimizer_bytes,
        curve.activation_bytes,
        curve.transient_bytes,
    )


def curves_match(plan: Plan, schedule: Schedule) -> bool:
    """Tell whether the plan has its devices' bytes over a step of this schedule, an entry per action and one more."""
    lengths = [{len(values) for values in parts(curve)} for curve in plan.curves]
    return lengths == [{len(lane) + 1} for lane in schedule.lanes]
