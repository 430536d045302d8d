"""A step as a trace that Perfetto and chrome://tracing open: predicted, and measured beside it.

    process "lane 0 ..."   track "predicted"   0F0 0F1 ....... 0B0 0B1      a slice per action, idle time left free
                           track "measured"    0F0  0F1 ...... 0B0  0B1
                           transfers to the lane as slices of their own tracks, arrows from action to action
                           counters: what its device holds, by kind

The format is "Trace Event Format" (JSON): https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import Bar, Sent, StepTimeline, predicted
from autosplit.report.beside import json_number
from autosplit.schedule.action import Action, Kind, describe

_US_PER_S = 1e6
_NUDGE_US = 0.001
"""An arrow begins inside its action: at the end there is the next one."""
_TRACKS = {False: (1, "predicted"), True: (2, "measured")}
_COLOURS = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "thread_state_iowait", "W": "rail_idle"}
_KINDS = ("parameter", "gradient", "optimizer", "activation", "transient")
Event = dict[str, Any]


def trace_text(plan: Plan, measured: StepTimeline | None = None) -> str:
    """Return the trace as JSON text; both steps begin at time 0, with their first action."""
    events = list(_names(plan, measured))
    foreseen = predicted(plan)
    for number, timeline in enumerate(filter(None, (foreseen, measured))):
        events += _actions(timeline)
        events += _transfers(timeline, first_id=number << 20)
    events += _planned_memory(plan, foreseen)
    if measured is not None:
        known = ((bar, bar.held_bytes) for bar in measured.bars if bar.held_bytes is not None)
        events += (_counter(bar.lane, "bytes, measured", bar.end_s, {"all": held}) for bar, held in known)
    about = {
        "model": plan.fingerprint.model,
        "devices": list(plan.devices),
        "schedule": plan.schedule,
        "microbatch_rows": list(plan.microbatch_rows),
        "predicted step_s": plan.step_s,
    }
    if measured is not None:
        about |= {
            "measured step_s": measured.step_s + measured.once_s,
            "of that beside the actions, once per step (s)": measured.once_s,
            "measured as one piece": measured.whole,
            "loss": json_number(measured.loss),
        }
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _names(plan: Plan, measured: StepTimeline | None) -> Iterator[Event]:
    """Yield what processes and tracks are called, and their order."""
    for lane, device in enumerate(plan.devices):
        stages = [str(stage.index) for stage in plan.stages if stage.lane == lane]
        process, name = lane + 1, f"lane {lane}: {device}, stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
        yield _meta(process, "process_name", {"name": name})
        yield _meta(process, "process_sort_index", {"sort_index": process})
        for is_measured, (track, text) in _TRACKS.items():
            if is_measured and measured is None:
                continue
            yield _meta(process, "thread_name", {"name": text}, track)
            yield _meta(process, "thread_sort_index", {"sort_index": track}, track)


def _meta(process: int, name: str, args: dict[str, Any], track: int = 0) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": name, "args": args}


def _actions(timeline: StepTimeline) -> Iterator[Event]:
    track, text = _TRACKS[timeline.measured]
    for bar in timeline.bars:
        action = Action(bar.stage, bar.kind, bar.microbatch)
        yield {
            "ph": "X",
            "pid": bar.lane + 1,
            "tid": track,
            "name": str(action),
            "cat": f"{text},{bar.kind}",
            "cname": _COLOURS[bar.kind],
            "ts": _us(bar.start_s),
            "dur": round(_us(bar.end_s) - _us(bar.start_s), 3),
            "args": {"action": describe(action)},
        }


def _transfers(timeline: StepTimeline, *, first_id: int) -> Iterator[Event]:
    """Yield a slice for every transfer that takes time, and an arrow from the action that sends to the one that takes.

    Transfers to a lane may overlap: they are asynchronous slices, each with a number.
    """
    track, text = _TRACKS[timeline.measured]
    bars = {(bar.stage, bar.kind, bar.microbatch): bar for bar in timeline.bars}
    for number, sent in enumerate(timeline.sent, start=first_id + 1):
        sender, taker = (_bar(bars, stage, sent) for stage in (sent.source, sent.target))
        if sender is None or taker is None:
            continue
        what = "gradients" if sent.backward else "values"
        common = {"cat": f"transfers, {text}", "id": number, "name": f"{sent.source} to {sent.target}, {what}"}
        if sent.end_s > sent.start_s:
            args = {"microbatch": sent.microbatch}
            yield common | {"ph": "b", "pid": taker.lane + 1, "tid": 0, "ts": _us(sent.start_s), "args": args}
            yield common | {"ph": "e", "pid": taker.lane + 1, "tid": 0, "ts": _us(sent.end_s)}
        yield common | {
            "ph": "s",
            "pid": sender.lane + 1,
            "tid": track,
            "ts": max(_us(sender.start_s), _us(sender.end_s) - _NUDGE_US),
        }
        yield common | {"ph": "f", "bp": "e", "pid": taker.lane + 1, "tid": track, "ts": _us(taker.start_s)}


def _bar(bars: Mapping[tuple[int, Kind, int], Bar], stage: int, sent: Sent) -> Bar | None:
    """Return the action of a stage that sends or takes."""
    kinds: tuple[Kind, ...] = ("I", "B") if sent.backward else ("F",)
    return next((bars[stage, kind, sent.microbatch] for kind in kinds if (stage, kind, sent.microbatch) in bars), None)


def _planned_memory(plan: Plan, foreseen: StepTimeline) -> Iterator[Event]:
    """Yield a counter per device with what it holds by kind, where the plan says so for this step."""
    lanes = plan.schedule_for(len(plan.microbatch_rows)).lanes
    bars = {(bar.stage, bar.kind, bar.microbatch): bar for bar in foreseen.bars}
    for lane, (curve, actions) in enumerate(zip(plan.curves, lanes, strict=False)):
        starts = [bars[a.stage, a.kind, a.microbatch].start_s for a in actions]
        ends = [bars[a.stage, a.kind, a.microbatch].end_s for a in actions]
        points = [*starts, max(ends, default=0.0)]
        columns = {kind: getattr(curve, f"{kind}_bytes") for kind in _KINDS}
        for index, start_s in enumerate(points[: len(curve.parameter_bytes)]):
            values = {kind: column[index] for kind, column in columns.items()}
            yield _counter(lane, "bytes, predicted", start_s, values)


def _counter(lane: int, name: str, time_s: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": lane + 1, "name": name, "ts": _us(time_s), "args": values}


def _us(seconds: float) -> float:
    return round(seconds * _US_PER_S, 3)
