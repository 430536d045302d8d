"""A plan as one HTML file: it opens from a disk, asks no network for anything, and needs nothing but a browser.

The text is the report's own sections. The charts are drawn by the page's script from the plan's numbers. Names come
from the model or from a stranger's file: they are escaped, and the page's policy runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative, LaneCurve
from autosplit.planning.timeline import Bar, StepTimeline
from autosplit.report.beside import Beside, beside
from autosplit.report.document import Section, printable
from autosplit.report.prediction import is_this_plan, memory_words, needs_words, proof
from autosplit.report.sections import sections
from autosplit.report.words import device_words, format_count, format_rate, plural, recompute_words, schedule_words
from autosplit.schedule.action import Action, Schedule
from autosplit.units import format_bytes, format_seconds

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("format", "model", "chart", "timeline", "memory", "cuts", "frontier", "page")
_DRAWN = ("Partition of ", "Schedule ", "Verdict per device", "Plans that none ", "Prediction")
"""Titles of the sections that the page shows in its own way."""
_FIRST = ("What would ", "Reasons")
"""Titles of those that come before the charts."""
_VERDICTS = {"fits": "✓ fits", "borderline": "≈ borderline", "no": "✕ does not fit", "unknown": "not judged"}
_PARTS = ("parameters", "gradients", "optimizer state", "activations", "transient")
_MOST_PLACES = 4
"""How many stages of one device the legend tells apart."""
_KINDS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("input", "input gradient"),
    ("weight", "weight gradients"),
)


def page(plan: Plan, *, measured: StepTimeline | None = None) -> str:
    """Return the page of ``plan`` as HTML text, with a recorded step beside it.

    What an older plan does not hold the page says instead.
    """
    # A report without a page need not wait for the import.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = [(_TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(own) + "})();\n"
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    seen = None if measured is None else beside(plan, measured)
    data = page_data(plan, seen)
    verdict = "unknown" if binding(plan) is None else plan.verdict
    found = sections(plan, width=None, seen=seen)
    return environment.get_template("page.html").render(
        plan=plan,
        data=data,
        json=as_script(data),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        figures=_figures(plan, seen),
        facts=[fact for section in _titled(found, ("Partition of ", "Prediction")) for fact in section.facts],
        first=list(_titled(found, _FIRST)),
        rest=[section for section in found if not section.title.startswith(_DRAWN + _FIRST)],
        verdicts=list(_titled(found, ("Verdict per device",))),
        what=_what(plan),
        answer=_answer(plan),
        counted=any(peak is not None for peak in (data["recorded"] or {}).get("peaks", ())),
        verdict=verdict,
        verdict_words=_VERDICTS[verdict],
        legend=_legend(data),
        parts=_PARTS,
        ranged=any(stage.memory.low_bytes is not None for stage in plan.stages),
        places=min(_MOST_PLACES, max(Counter(stage.lane for stage in plan.stages).values())),
        seconds=format_seconds,
        bytes=format_bytes,
    )


def _printable(value: object) -> object:
    """Return a text without what does not print; what is already HTML, and numbers, stay."""
    return printable(value) if type(value) is str else value


def _hash(text: str) -> str:
    """Return what a content security policy calls a script or a style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _titled(found: Iterable[Section], starts: tuple[str, ...]) -> Iterable[Section]:
    return (section for section in found if section.title.startswith(starts))


def _what(plan: Plan) -> str:
    """Return what was planned in one line: devices, schedule, batch, optimizer."""
    rows = plan.microbatch_rows
    tokens = "" if plan.sequence is None else f" of {plural(plan.sequence, 'token')}"
    batch = f"{sum(rows)} rows{tokens} in {len(rows)} microbatch{'es' * (len(rows) != 1)}"
    precision = "" if (plan.precision or plan.dtype) is None else f" in {plan.precision or plan.dtype}"
    size = f"{format_count(plan.parameters)} parameters{precision}"
    schedule = schedule_words(plan.schedule, plan.virtual_stages)
    return f"{size} · {device_words(plan.devices)} · {schedule} · {batch} · {plan.optimizer}"


def _answer(plan: Plan) -> str:
    """Return whether it fits as a sentence; the verdict stands beside it."""
    words = memory_words(plan).removeprefix("fits; ").removeprefix("borderline: ").removeprefix("DOES NOT FIT: ")
    return f"{words[0].upper()}{words[1:]}."


def _figures(plan: Plan, seen: Beside | None) -> list[tuple[str, str, str]]:
    """Return the page's few large figures: what, how much, and a word on it."""
    tightest = binding(plan)
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    if tightest is None:
        memory = ("largest peak", format_bytes(peak), "no capacity is known")
    else:
        share = f"{tightest.share:.0%} of {format_bytes(tightest.capacity_bytes or 0)}"
        memory = ("largest peak", format_bytes(tightest.peak_bytes), f"{share} on device {tightest.lane}")
        if tightest.low_bytes != tightest.high_bytes:
            memory = (memory[0], memory[1], f"{memory[2]}; {needs_words(tightest).partition(' (')[2].rstrip(')')}")
    step = (
        proof(plan) if plan.objective == "step_time" else f"{plan.schedule}, {len(plan.microbatch_rows)} microbatches"
    )
    slowest = "the slowest device, per microbatch"
    if seen is not None:
        peaks = [one.peak_bytes for one in seen.devices if one.peak_bytes is not None]
        step += "" if seen.step_s is None else f"; measured {format_seconds(seen.step_s)}"
        memory = (*memory[:2], memory[2] + (f"; measured {format_bytes(max(peaks))}" if peaks else ""))
    return [
        ("step", format_seconds(plan.step_s), step),
        *_speed(plan),
        ("bubble", f"{plan.bubble:.1%}", "of the devices' time is idle"),
        ("bottleneck", format_seconds(plan.bottleneck_s), slowest),
        memory,
    ]


def _speed(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the figure of tokens or rows per second, with the share of the devices' arithmetic."""
    if plan.rows_per_s is None:
        return
    rate, unit = (plan.rows_per_s, "rows/s") if plan.tokens_per_s is None else (plan.tokens_per_s, "tokens/s")
    used = "no rate of the devices is known" if plan.mfu is None else f"{plan.mfu:.1%} model FLOPs utilisation"
    yield unit, format_rate(rate), used


def _legend(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the kinds of actions that the step has."""
    used = {kind for lane in data["lanes"] for kind in lane[1::3]}
    return [names for kind, names in enumerate(_KINDS) if kind in used]


_ACTIONS = "FBIW"


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
            [number for a in lane for number in (a.stage, _ACTIONS.index(a.kind), a.microbatch)]
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
