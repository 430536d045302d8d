"""The verdict on every device, what would make a plan fit, and the other plans that were weighed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosplit.planning.explain.verdicts import DeviceVerdict, device_verdicts
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative
from autosplit.report.document import Section, column, room_beside, table_width
from autosplit.report.words import clip, numbers, recompute_words, schedule_words
from autosplit.units import format_bytes, format_seconds

FRONTIER_ROWS = 12
VERDICT_ROWS = 16


def verdicts(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield one row per device, where a capacity is known: what it needs and has, and what most of that is."""
    every = device_verdicts(plan)
    if all(row.verdict is None for row in every):
        return
    fullest = sorted(every, key=lambda row: (row.verdict == "fits", -row.share))[:VERDICT_ROWS]
    rows = every if width is None else tuple(row for row in every if row in fullest)
    ranged = any(row.low_bytes != row.high_bytes for row in rows)
    stages = [column("stages", rows, lambda row: numbers(row.stages), align="left")] if _several(rows) else []
    columns = (
        column("needs", rows, lambda row: format_bytes(row.peak_bytes)),
        *([column("range", rows, _range, align="left")] if ranged else []),
        column("has", rows, lambda row: _size(row.capacity_bytes)),
        column("verdict", rows, lambda row: row.verdict or "-", align="left"),
        column("most of it", rows, _most, align="left"),
    )
    device = column("device", rows, lambda row: f"{row.lane}: {row.device}", align="left")
    if width is not None and table_width([device, *stages, *columns]) > width:
        device = column("device", rows, lambda row: str(row.lane))
    if width is not None and table_width([device, *stages, *columns]) > width:
        stages = []  # the table of stages has their devices
    left = [row for row in every if row not in rows]
    yield Section("Verdict per device", columns=(device, *stages, *columns), below=tuple(_emptier(left)))


def _emptier(rows: Sequence[DeviceVerdict]) -> Iterator[str]:
    """Yield a line for the devices that have the most room."""
    if rows:
        sizes, said = sorted(row.peak_bytes for row in rows), dict.fromkeys(row.verdict or "-" for row in rows)
        yield (
            f"and {len(rows)} that are less full, {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}: "
            f"{', '.join(said)}"
        )


def changes(plan: Plan) -> Iterator[Section]:
    """Yield what would make a plan fit, the cheapest first."""
    if plan.changes:
        title = "What would give it room to spare" if plan.verdict == "borderline" else "What would make it fit"
        if plan.verdict == "fits":
            title = "What would need less"
        yield Section(f"{title}, the cheapest first", points=tuple(change.text for change in plan.changes))


def frontier(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield the plans that none beats in both step and peak, the fastest first."""
    if len(plan.frontier) < 2:
        return
    shown = [one for place, one in enumerate(plan.frontier) if place < FRONTIER_ROWS or is_this_plan(plan, one)]
    left = len(plan.frontier) - len(shown)
    below = [f"and {left} slower ones that need less"] if left else []
    if not all(one.replayed for one in shown):
        below.append("~: by the solver's formula, not replayed")
    setting = (
        column("chunks", shown, lambda one: str(one.chunks)),
        column("schedule", shown, lambda one: schedule_words(one.schedule, one.virtual_stages), align="left"),
    )
    outcome = (
        column("step", shown, lambda one: format_seconds(one.step_s)),
        column("largest peak", shown, lambda one: f"{'' if one.replayed else '~'}{format_bytes(one.peak_bytes)}"),
        column("verdict", shown, lambda one: one.verdict, align="left"),
        column("", shown, lambda one: "this plan" if is_this_plan(plan, one) else "", align="left"),
    )
    room = room_beside([*setting, *outcome], width=width)
    recompute = column("recompute", shown, lambda one: clip(recompute_words(one.recompute), width=room), align="left")
    yield Section(
        "Plans that none beats in both step and memory", columns=(*setting, recompute, *outcome), below=tuple(below)
    )


def is_this_plan(plan: Plan, one: Alternative) -> bool:
    """Tell whether a weighed plan is the one that was chosen."""
    chosen = tuple(stage.recompute for stage in plan.stages)
    listed = one.recompute * len(chosen) if len(one.recompute) == 1 else one.recompute
    same = (one.chunks, one.schedule, one.virtual_stages) == (plan.chunks, plan.schedule, plan.virtual_stages)
    return same and listed == chosen


def _several(rows: tuple[DeviceVerdict, ...]) -> bool:
    return any(row.stages != (row.lane,) for row in rows)


def _range(row: DeviceVerdict) -> str:
    low, high = format_bytes(row.low_bytes), format_bytes(row.high_bytes)
    (number, unit), other = low.split(), high.split()[1]
    return f"{number if unit == other else low} to {high}"


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _most(row: DeviceVerdict) -> str:
    return f"{row.term} {row.term_bytes / row.peak_bytes:.0%}" if row.peak_bytes else "-"
