"""A recorded step beside the predicted one."""

from __future__ import annotations

from autosplit.planning.plan import Plan
from autosplit.planning.timeline import StepTimeline, predicted
from autosplit.report.document import Section, column
from autosplit.units import format_seconds


def measured_section(plan: Plan, timeline: StepTimeline) -> Section:
    """Return one row per device: how long it works in the predicted and in the recorded step, and the two steps."""
    foreseen = predicted(plan)
    rows = range(len(plan.devices))
    before, after = _busy_s(foreseen, len(rows)), _busy_s(timeline, len(rows))
    return Section(
        "Predicted beside measured",
        facts=(
            (
                "step",
                f"{format_seconds(foreseen.step_s)} predicted, {format_seconds(timeline.step_s)} measured"
                f"{_ratio(timeline.step_s, foreseen.step_s)}",
            ),
        ),
        columns=(
            column("device", rows, lambda lane: f"{lane}: {plan.devices[lane]}", align="left"),
            column("predicted busy", rows, lambda lane: format_seconds(before[lane])),
            column("measured busy", rows, lambda lane: format_seconds(after[lane])),
            column("idle predicted", rows, lambda lane: _idle(before[lane], foreseen.step_s)),
            column("idle measured", rows, lambda lane: _idle(after[lane], timeline.step_s)),
        ),
    )


def _busy_s(timeline: StepTimeline, lanes: int) -> list[float]:
    busy_s = [0.0] * lanes
    for bar in timeline.bars:
        busy_s[bar.lane] += bar.end_s - bar.start_s
    return busy_s


def _idle(busy_s: float, step_s: float) -> str:
    return f"{max(0.0, 1 - busy_s / step_s):.1%}" if step_s else "-"


def _ratio(measured_s: float, predicted_s: float) -> str:
    return f", {measured_s / predicted_s:.2f} times the prediction" if predicted_s else ""
