"""What the page of a plan is drawn from: the plan's numbers as JSON, short, and nothing that the page does not show."""

from __future__ import annotations

import json
from typing import Any

from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative, LaneCurve
from autosplit.planning.timeline import Bar, StepTimeline
from autosplit.report.beside import Beside
from autosplit.report.document import printable
from autosplit.report.verdicts import is_this_plan
from autosplit.report.words import plural, recompute_words, schedule_words
from autosplit.schedule.action import Action, Schedule

_KINDS = "FBIW"


def page_data(plan: Plan, seen: Beside | None = None) -> dict[str, Any]:
    """Return what the page's script reads; seconds and bytes, a list entry per device, stage or unit."""
    schedule = plan.schedule_for(len(plan.microbatch_rows))
    return {
        "devices": [printable(device) for device in plan.devices],
        "microbatches": schedule.microbatches,
        "step": plan.step_s,
        "bubble": plan.bubble,
        "bottleneck": plan.bottleneck_s,
        "lanes": [
            [number for a in lane for number in (a.stage, _KINDS.index(a.kind), a.microbatch)]
            for lane in schedule.lanes
        ],
        "stages": [
            {
                "lane": stage.lane,
                "forward": stage.forward_s,
                "backward": stage.backward_s,
                "weight": stage.weight_s,
                "recompute": stage.recompute,
                "activations": stage.memory.activation_bytes,
            }
            for stage in plan.stages
        ],
        "transfers": [[t.producer, t.consumer, t.forward_s, t.backward_s] for t in plan.transfers],
        "memory": [_device(plan, lane) for lane in range(len(plan.devices))],
        "units": _units(plan),
        "curves": [_curve(curve) for curve in plan.curves] if plan.curves_match(schedule) else None,
        "frontier": [_alternative(plan, one) for one in plan.frontier],
        "recorded": None if seen is None else _recorded(schedule, seen),
    }


def as_script(data: dict[str, Any]) -> str:
    """Return data as JSON that can stand inside an HTML script element, whatever its texts are."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _device(plan: Plan, lane: int) -> dict[str, Any]:
    """Return a device at its fullest moment; buffers count as parameters, as in its curve."""
    own = [stage.memory for stage in plan.stages if stage.lane == lane]
    return {
        "peak": own[0].peak_bytes,
        "low": own[0].low_bytes,
        "high": own[0].high_bytes,
        "capacity": own[0].capacity_bytes,
        "reserve": own[0].reserve_bytes,
        "parts": [
            sum(memory.parameter_bytes + memory.buffer_bytes for memory in own),
            sum(memory.gradient_bytes for memory in own),
            sum(memory.optimizer_bytes for memory in own),
            sum(memory.activation_bytes for memory in own),
            sum(memory.transient_bytes for memory in own),
        ],
    }


def _units(plan: Plan) -> dict[str, list[Any]] | None:
    """Return the units as columns; None where a moved cut cannot be costed."""
    used = {unit.stage for unit in plan.units}
    if used != set(range(len(plan.stages))):
        return None
    return {
        "name": [printable(unit.name) for unit in plan.units],
        "stage": [unit.stage for unit in plan.units],
        "forward": [unit.forward_s for unit in plan.units],
        "backward": [unit.backward_s for unit in plan.units],
        "weight": [unit.weight_s for unit in plan.units],
        "fixed": [unit.static_bytes for unit in plan.units],
        "kept": [unit.kept_bytes for unit in plan.units],
        "transient": [unit.transient_bytes for unit in plan.units],
        "sent": [unit.sent_bytes for unit in plan.units],
    }


def _curve(curve: LaneCurve) -> dict[str, Any]:
    short = [list(values) if len(set(values)) > 1 else values[0] for values in curve.kinds]
    return {"moments": len(curve.parameter_bytes), "kinds": short}


def _alternative(plan: Plan, one: Alternative) -> dict[str, Any]:
    again = "" if set(one.recompute) == {"never"} else f", recompute {recompute_words(one.recompute)}"
    words = f"{schedule_words(one.schedule, one.virtual_stages)}, {plural(one.chunks, 'chunk')}{again}"
    return {
        "title": printable(words),
        "step": one.step_s,
        "peak": one.peak_bytes,
        "verdict": one.verdict,
        "replayed": one.replayed,
        "plan": is_this_plan(plan, one),
    }


def _recorded(schedule: Schedule, seen: Beside) -> dict[str, Any]:
    """Return a recorded step: per lane, the start and end of each of the schedule's actions, and what was held then.

    No lanes where it did not run this schedule, or where its times are not a step's.
    """
    measured = seen.measured
    bars = {Action(bar.stage, bar.kind, bar.microbatch): bar for bar in measured.bars}
    same = measured.timed and measured.whole is None and set(bars) == set(schedule)
    lanes = [[bars[action] for action in lane] for lane in schedule.lanes] if same else []
    return {
        "step": round(measured.step_s, 9),
        "lanes": [[round(time, 9) for bar in lane for time in (bar.start_s, bar.end_s)] for lane in lanes],
        "held": [[bar.held_bytes for bar in lane] for lane in lanes] if _counted(lanes) else None,
        "peaks": [one.peak_bytes for one in seen.devices],
        "why": None if same else _why_not_drawn(measured),
    }


def _counted(lanes: list[list[Bar]]) -> bool:
    return any(bar.held_bytes is not None for lane in lanes for bar in lane)


def _why_not_drawn(measured: StepTimeline) -> str:
    if measured.whole is not None:
        return f"The recorded step ran as one piece: {printable(measured.whole)}."
    if not measured.timed:
        return "Of the recorded step only bytes were counted, not the time."
    return "The recorded step had another number of microbatches than the plan, and is not drawn."
