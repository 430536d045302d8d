"""A recorded step beside the predicted one: times of devices and stages, and the most bytes that devices held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from autosplit.planning.explain.verdicts import device_verdicts
from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StepTimeline, predicted
from autosplit.report.document import Column, Section, column
from autosplit.report.words import numbers
from autosplit.units import format_bytes, format_seconds

_BACKWARD = ("B", "I", "W")
_HOST_BINDS = 0.9
"""Of a step: a host that issues for so long keeps its devices waiting."""


@dataclass(frozen=True)
class DeviceBeside:
    """One lane's device in both steps; None where something was not measured.

    Attributes:
        busy_s: how long its actions ran.
        idle: the share of the step in which none did.
        peak_bytes: the most that it held. Where nobody counts what a device held before the step (the CPU), that is
            taken as planned: parameters, buffers and optimizer state.
        before_bytes: what it held before the step, where that was counted.
    """

    lane: int
    device: str
    predicted_busy_s: float
    busy_s: float | None
    predicted_idle: float
    idle: float | None
    predicted_peak_bytes: int
    peak_bytes: int | None
    before_bytes: int | None


@dataclass(frozen=True)
class StageBeside:
    """One stage's times per microbatch, the medians over a step's microbatches; None where none was measured."""

    stage: int
    predicted_forward_s: float
    forward_s: float | None
    predicted_backward_s: float
    backward_s: float | None


@dataclass(frozen=True)
class Beside:
    """A recorded step and the predicted one, without what runs once beside the bars.

    ``step_s`` is None where the recorded times are no step's.
    """

    measured: StepTimeline
    predicted_step_s: float
    step_s: float | None
    devices: tuple[DeviceBeside, ...]
    stages: tuple[StageBeside, ...]


def beside(plan: Plan, measured: StepTimeline) -> Beside:
    """Return the figures of a recorded step beside those that the plan predicts."""
    foreseen = predicted(plan)
    timed = measured.timed
    return Beside(
        measured=measured,
        predicted_step_s=foreseen.step_s,
        step_s=measured.step_s if timed else None,
        devices=tuple(_devices(plan, foreseen, measured)),
        stages=tuple(_stages(plan, measured if timed and measured.whole is None else None)),
    )


def _devices(plan: Plan, foreseen: StepTimeline, measured: StepTimeline) -> Iterator[DeviceBeside]:
    before, after = (_busy_s(step, len(plan.devices)) for step in (foreseen, measured))
    barred = measured.timed and bool(measured.bars)
    for lane, verdict in enumerate(device_verdicts(plan)):
        held = measured.memory[lane] if lane < len(measured.memory) else None
        peak = None
        if held is not None:
            states = _states(plan, lane) if held.before_bytes is None else held.before_bytes
            peak = states + held.grown_bytes
        yield DeviceBeside(
            lane=lane,
            device=plan.devices[lane],
            predicted_busy_s=before[lane],
            busy_s=after[lane] if barred else None,
            predicted_idle=_idle(before[lane], foreseen.step_s),
            idle=_idle(after[lane], measured.step_s) if barred else None,
            predicted_peak_bytes=verdict.peak_bytes,
            peak_bytes=peak,
            before_bytes=None if held is None else held.before_bytes,
        )


def _states(plan: Plan, lane: int) -> int:
    """Return what a device has before a step, as planned: gradients are None then."""
    memories = [stage.memory for stage in plan.stages if stage.lane == lane]
    return sum(m.parameter_bytes + m.buffer_bytes + m.optimizer_bytes for m in memories)


def _stages(plan: Plan, measured: StepTimeline | None) -> Iterator[StageBeside]:
    took: dict[tuple[int, str, int], float] = {}
    for bar in () if measured is None else measured.bars:
        took[bar.stage, bar.kind, bar.microbatch] = bar.end_s - bar.start_s
    for stage in plan.stages:
        microbatches = sorted({m for s, _, m in took if s == stage.index})
        forward = [took[key] for m in microbatches if (key := (stage.index, "F", m)) in took]
        parts = ([took.get((stage.index, kind, m)) for kind in _BACKWARD] for m in microbatches)
        backward = [sum(time for time in times if time is not None) for times in parts if any(times)]
        yield StageBeside(
            stage=stage.index,
            predicted_forward_s=stage.forward_s,
            forward_s=median(forward) if forward else None,
            predicted_backward_s=stage.backward_s,
            backward_s=median(backward) if backward else None,
        )


def measured_sections(plan: Plan, beside: Beside | None) -> Iterator[Section]:
    """Yield what was predicted and measured: a row per device, and one per stage where its actions were timed."""
    if beside is None:
        return
    rows = beside.devices
    columns = [column("device", rows, lambda row: f"{row.lane}: {row.device}", align="left")]
    if any(row.busy_s is not None for row in rows):
        columns += _pair("busy", rows, "busy_s", format_seconds)
        columns += _pair("idle", rows, "idle", lambda share: f"{share:.1%}")
    if any(row.peak_bytes is not None for row in rows):
        columns += _pair("peak", rows, "peak_bytes", format_bytes)
    yield Section(
        "Predicted beside measured",
        facts=tuple(_facts(plan, beside)),
        columns=tuple(columns) if len(columns) > 1 else (),
        below=tuple(_below(beside)),
    )
    if any(stage.forward_s is not None for stage in beside.stages):
        columns = [column("stage", beside.stages, lambda row: str(row.stage))]
        columns += _pair("forward", beside.stages, "forward_s", format_seconds)
        columns += _pair("backward", beside.stages, "backward_s", format_seconds)
        title = "Stages, predicted beside measured (per microbatch, the median)"
        yield Section(title, columns=tuple(columns))


def recorded_fields(beside: Beside) -> dict[str, Any]:
    """Return a recorded step for JSON: a row per device and per stage, and the step's bars and transfers.

    Seconds and bytes; None where something was not measured.
    """
    measured = beside.measured
    return {
        "step_s": beside.step_s,
        "predicted_step_s": beside.predicted_step_s,
        "once_s": measured.once_s if measured.timed else None,
        "loss": json_number(measured.loss),
        "microbatch_rows": list(measured.rows),
        "whole": measured.whole,
        "devices": [asdict(row) for row in beside.devices],
        "stages": [asdict(row) for row in beside.stages],
        "bars": [asdict(bar) for bar in measured.bars] if measured.timed else [],
        "sent": [asdict(sent) for sent in measured.sent] if measured.timed else [],
    }


def json_number(number: float | None) -> float | str | None:
    """Return a number as JSON has it: no infinity, and nothing that is not a number."""
    return number if number is None or abs(number) < float("inf") else str(number)


def _pair(title: str, rows: Sequence[Any], figure: str, words: Callable[[float], str]) -> list[Column]:
    """Return the columns of a figure as predicted and as measured."""

    def seen(row: Any) -> str:
        value = getattr(row, figure)
        return "-" if value is None else words(value)

    return [column(title, rows, lambda row: words(getattr(row, f"predicted_{figure}"))), column("measured", rows, seen)]


def _facts(plan: Plan, beside: Beside) -> Iterator[tuple[str, str]]:
    measured = beside.measured
    if beside.step_s is None:
        yield "step", f"{format_seconds(beside.predicted_step_s)} predicted; only bytes were counted, not the time"
    else:
        words = f"{format_seconds(beside.predicted_step_s)} predicted, {format_seconds(beside.step_s)} measured"
        if beside.predicted_step_s:
            words += f", {beside.step_s / beside.predicted_step_s:.2f} times the prediction"
        yield "step", words
    yield from _host(plan, measured)
    if measured.whole is not None:
        yield "as one", f"the step ran as one piece: {measured.whole}"
    if measured.rows and measured.rows != plan.microbatch_rows:
        now, then = (f"{sum(rows)} in {len(rows)} microbatches" for rows in (measured.rows, plan.microbatch_rows))
        yield "rows", f"{now} were measured, {then} planned: compare with care"


def _host(plan: Plan, measured: StepTimeline) -> Iterator[tuple[str, str]]:
    """Yield how long the host issued, and that it binds where that is most of the step.

    Of a stage's microbatches the least counts: behind about a thousand launches CUDA's queue is full, and a host that
    waits for room there takes the device's time, which is none of its own.
    """
    took: dict[tuple[int, str], list[float]] = {}
    for bar in measured.bars:
        if bar.issue_s is not None:
            took.setdefault((bar.stage, bar.kind), []).append(bar.issue_s)
    if not took:
        return
    issued_s = sum(len(times) * min(times) for times in took.values())
    each_s = sum(stage.forward_issue_s + stage.backward_issue_s for stage in plan.stages) / plan.issue_threads
    words = f"{format_seconds(len(plan.microbatch_rows) * each_s)} predicted, " if each_s else ""
    words += f"{format_seconds(issued_s)} measured to issue the step, {issued_s / measured.step_s:.0%} of it"
    if issued_s > _HOST_BINDS * measured.step_s:
        words += "; host-bound: fewer chunks, or compile=True, make fewer calls"
    yield "host", words


def _below(beside: Beside) -> Iterator[str]:
    """Yield what a peak that was measured is of."""
    seen = [row for row in beside.devices if row.peak_bytes is not None]
    if any(row.before_bytes is None for row in seen):
        yield (
            "peaks on the CPU: parameters, buffers and optimizer state as planned, and what the allocator gave out for "
            "the lane's own actions and copies during the step; the batch is used where the caller has it"
        )
    counted = [row for row in seen if row.before_bytes is not None]
    if counted:
        yield "peaks elsewhere: all that the device's allocator has given out, the caller's own tensors too"
    for device in dict.fromkeys(row.device for row in counted):
        lanes = [row.lane for row in counted if row.device == device]
        if len(lanes) > 1:
            yield f"{device} has lanes {numbers(lanes)}: its measured peak is of all of them together"


def _busy_s(timeline: StepTimeline, lanes: int) -> list[float]:
    busy_s = [0.0] * lanes
    for bar in timeline.bars:
        busy_s[bar.lane] += bar.end_s - bar.start_s
    return busy_s


def _idle(busy_s: float, step_s: float) -> float:
    return max(0.0, 1 - busy_s / step_s) if step_s else 0.0
