"""A plan as one HTML file: it opens from a disk, asks no network for anything, and needs nothing but a browser.

The text is the report's own sections. The charts are drawn by the page's script from the plan's numbers. Names come
from the model or from a stranger's file: they are escaped, and the page's policy runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.fields import LaneCurve
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative
from autosplit.planning.timeline import StepTimeline
from autosplit.report.beside import Beside, beside, measured_sections
from autosplit.report.document import printable
from autosplit.report.next_steps import COMMAND, next_steps
from autosplit.report.prediction import (
    changes,
    memory_words,
    meshes,
    needs_words,
    odds_words,
    prediction,
    proof,
    verdicts,
)
from autosplit.report.sections import REASONS, boundary_table, header, lists, stage_tables
from autosplit.report.words import device_words, format_count, format_rate, recompute_words, schedule_words
from autosplit.schedule.action import Action, Schedule
from autosplit.units import format_bytes, format_seconds, plural

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("format", "model", "chart", "timeline", "memory", "cuts", "frontier", "page")
_READ = {"step_s", "bubble", "bottleneck_s", "stages", "transfers", "units", "frontier"}
"""The plan's fields that the page's script reads."""


def page(plan: Plan, *, measured: StepTimeline | None = None, command: str = COMMAND) -> str:
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
    scripts = [(_TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    seen = None if measured is None else beside(plan, measured)
    data = page_data(plan, seen)
    return environment.get_template("page.html").render(
        plan=plan,
        data=data,
        json=as_script(data),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        figures=_figures(plan, seen),
        facts=[*header(plan).facts, *prediction(plan).facts],
        first=[*changes(plan), *lists(plan, REASONS)],
        rest=[
            *stage_tables(plan, width=None),
            boundary_table(plan, width=None),
            *measured_sections(plan, seen),
            *meshes(plan),
            *lists(plan, "Whole modules", "Notes"),
            *next_steps(plan, command),
        ],
        verdicts=list(verdicts(plan, width=None)),
        what=_what(plan),
        answer=memory_words(plan),
        verdict="unknown" if binding(plan) is None else plan.verdict,
        seconds=format_seconds,
        bytes=format_bytes,
    )


def _printable(value: object) -> object:
    """Return a text without what does not print; what is already HTML, and numbers, stay."""
    return printable(value) if type(value) is str else value


def _hash(text: str) -> str:
    """Return what a content security policy calls a script or a style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _what(plan: Plan) -> str:
    """Return what was planned in one line: devices, schedule, batch, optimizer."""
    rows = plan.microbatch_rows
    tokens = "" if plan.sequence is None else f" of {plural(plan.sequence, 'token')}"
    batch = f"{sum(rows)} rows{tokens} in {plural(len(rows), 'microbatch')}"
    precision = "" if (plan.precision or plan.dtype) is None else f" in {plan.precision or plan.dtype}"
    size = f"{format_count(plan.parameters)} parameters{precision}"
    schedule = schedule_words(plan.schedule, plan.virtual_stages, plan.replicas)
    return f"{size} · {device_words(plan.devices)} · {schedule} · {batch} · {plan.optimizer}"


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
            ranged = needs_words(tightest).partition(" (")[2].rstrip(")")
            memory = (memory[0], memory[1], f"{memory[2]}; {ranged}{odds_words(tightest)}")
    step = (
        proof(plan) if plan.objective == "step_time" else f"{plan.schedule}, {len(plan.microbatch_rows)} microbatches"
    )
    slowest = "the slowest device, per microbatch"
    if seen is not None:
        peaks = [device.peak_bytes for device in seen.devices if device.peak_bytes is not None]
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


def page_data(plan: Plan, seen: Beside | None = None) -> dict[str, Any]:
    """Return what the page's script reads: the plan's own fields, its actions and curves, and a recorded step.

    There are no units where they leave a stage empty, so that a moved cut cannot be costed.
    """
    schedule = plan.schedule_for(len(plan.microbatch_rows))
    fields = plan.model_dump(include=_READ, exclude={"stages": {"__all__": {"nodes", "modules"}}})
    movable = {unit.stage for unit in plan.units} == {stage.index for stage in plan.stages if stage.gradients != "none"}
    return fields | {
        "devices": [printable(device) for device in plan.devices],
        "microbatches": schedule.microbatches,
        "lanes": [[str(action) for action in lane] for lane in schedule.lanes],
        "units": [unit | {"name": printable(unit["name"])} for unit in fields["units"]] if movable else [],
        "curves": [_short(curve) for curve in plan.curves] if plan.curves_match(schedule) else None,
        "frontier": [
            fields | {"title": _title(row), "plan": row.choice == plan.alternative.choice}
            for fields, row in zip(fields["frontier"], plan.frontier, strict=True)
        ],
        "recorded": None if seen is None else _recorded(schedule, seen),
    }


def as_script(data: dict[str, Any]) -> str:
    """Return data as JSON that can stand inside an HTML script element, whatever its texts are."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(curve: LaneCurve) -> list[Any]:
    """Return a device's bytes by kind; a kind that never changes is one number."""
    return [list(values) if len(set(values)) > 1 else values[0] for values in curve.kinds]


def _title(row: Alternative) -> str:
    again = "" if set(row.recompute) == {"never"} else f", recompute {recompute_words(row.recompute)}"
    return printable(
        f"{schedule_words(row.schedule, row.virtual_stages, row.replicas)}, {plural(row.chunks, 'chunk')}{again}"
    )


def _recorded(schedule: Schedule, seen: Beside) -> dict[str, Any]:
    """Return a recorded step: per lane, the start and end of each of the schedule's actions, and what was held then.

    No lanes where it did not run this schedule, or where its times are not a step's.
    """
    measured = seen.measured
    bars = {Action(bar.stage, bar.kind, bar.microbatch): bar for bar in measured.bars}
    same = measured.timed and measured.whole is None and set(bars) == set(schedule)
    lanes = [[bars[action] for action in lane] for lane in schedule.lanes] if same else []
    counted = any(bar.held_bytes is not None for bar in measured.bars)
    return {
        "step": round(measured.step_s, 9),
        "lanes": [[round(time, 9) for bar in lane for time in (bar.start_s, bar.end_s)] for lane in lanes],
        "held": [[bar.held_bytes for bar in lane] for lane in lanes] if same and counted else None,
        "peaks": [device.peak_bytes for device in seen.devices],
        "why": None if same else _why_not_drawn(measured),
    }


def _why_not_drawn(measured: StepTimeline) -> str:
    if measured.whole is not None:
        return f"The recorded step ran as one piece: {printable(measured.whole)}."
    if not measured.timed:
        return "Of the recorded step only bytes were counted, not the time."
    return "The recorded step had another number of microbatches than the plan, and is not drawn."
