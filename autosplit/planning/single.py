"""Where one device holds the model: what data parallel would take, which has no bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autosplit.options import Link
from autosplit.planning.plan import Plan
from autosplit.planning.sketch import Sketch
from autosplit.planning.verdicts import device_verdicts
from autosplit.units import format_bytes, format_seconds

_ROOM = 0.8
"""A device holds a model with room that fills at most this share of what it surely has."""


def one_is_enough(plan: Plan, links: Sequence[Link]) -> str | None:
    """Return that one device of the plan's would hold the model with room, and what data parallel over all would take.

    None where it would not, where devices differ, and for a plan without units or of an evaluation. Every replica
    takes its share of the microbatches; gradients are summed once, in a ring over the slowest of ``links``.
    """
    count, rows = len(plan.devices), sum(plan.microbatch_rows)
    room = device_verdicts(plan)[0].room_bytes
    alike = len(set(plan.devices)) == 1 and plan.schedule != "forward"
    if count < 2 or rows < count or not plan.units or room is None or not alike or not links:
        return None
    sketch = Sketch(plan)
    share = -(-rows // count)
    each = min(sketch.rows, share)
    setting = replace(
        sketch.setting(), devices=1, schedule="1f1b", virtual_stages=1, rows=each, microbatches=-(-share // each)
    )
    alone = sketch.estimate(replace(setting, recompute="never", capacity_bytes=None))
    if alone is None or alone.peak_bytes > _ROOM * room:
        return None
    gradients = sum(stage.memory.parameter_bytes for stage in plan.stages)
    ring_s = max(2 * (count - 1) * link.transfer_s(-(-gradients // count)) for link in links)
    held, step_s = format_bytes(alone.peak_bytes), format_seconds(alone.step_s)
    return (
        f"one {plan.devices[0]} holds the model with room (about {held} of {format_bytes(room)}, {each} "
        f"row{'s' * (each > 1)} at a time): data parallel (DDP) over the {count} has no bubble and would take about "
        f"{step_s} a step, and up to {format_seconds(ring_s)} more to sum gradients; this plan takes "
        f"{format_seconds(plan.step_s)}"
    )
