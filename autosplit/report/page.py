"""A plan as one HTML file: it opens from a disk, asks no network for anything, and needs nothing but a browser.

The text is the report's own sections. The charts are drawn by the page's script from the plan's numbers. Names come
from the model or from a stranger's file: they are escaped, and the page's policy runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.beside import Beside, beside
from autosplit.report.document import Section, printable
from autosplit.report.page_data import as_script, page_data
from autosplit.report.prediction import memory_words, needs_words, proof
from autosplit.report.sections import sections
from autosplit.report.words import device_words, format_count, format_rate, plural, schedule_words
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
