"""The sections of a plan's report: what was planned, its stages, boundaries and schedule.

Partition of Model        what was planned, on what, from measured or modelled times
Schedule                  who does what when, where that is not plain and small enough
Stages                    one row per stage: times, memory
Verdict                   one row per device: what it needs and has, where a capacity is known
Boundaries                one row per value that crosses a cut
Prediction                imbalance, bubble, step time, proof, node classes, memory
What would make it fit    changes, and what each costs
Other plans               those that no other beats in both step and peak
Why this plan             and what the nearest others would cost
Notes                     what else the planner has to say
What to run next          commands, of a plan on paper
Predicted beside measured a recorded step beside the predicted one, by device and by stage
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Boundary, StagePlan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.beside import Beside, beside, measured_sections, recorded_fields
from autosplit.report.document import (
    Column,
    Section,
    as_markdown,
    as_text,
    column,
    page_width,
    room_beside,
    table_width,
)
from autosplit.report.next_steps import COMMAND, next_steps
from autosplit.report.prediction import changes, frontier, generation, meshes, prediction, shares, verdicts
from autosplit.report.words import covers, fit_modules, format_count, repeats, shorten, size_words, some_numbers
from autosplit.units import format_bytes, format_seconds, plural

NARROWEST_MODULES = 24
BOUNDARY_ROWS = 24
GRID_ROWS = 16
REASONS = "Why this plan, and what others would cost"
_PLAIN_SCHEDULES = ("gpipe", "1f1b", "forward")


FORMS = ("text", "markdown", "json")


def render(
    plan: Plan,
    form: str = "text",
    *,
    width: int | None = None,
    measured: StepTimeline | None = None,
    command: str = COMMAND,
) -> str:
    """Return the partition report of ``plan`` in one of `FORMS`; with a recorded step, beside that.

    ``command`` is what made the plan, for what to run next.

    Lines of a text are at most ``width`` columns wide (120 when None) where that is 80 or more; markdown says what the
    text does, with all module names. Bytes are in binary units; times are per microbatch where the table says so and
    per step elsewhere. JSON is the plan's own; with a recorded step it has "recorded" too, and is no plan file then.
    """
    seen = None if measured is None else beside(plan, measured)
    if form == "json":
        if seen is None:
            return plan.to_json()
        return json.dumps(plan.model_dump(mode="json") | {"recorded": recorded_fields(seen)}, indent=2, allow_nan=False)
    if form == "markdown":
        return as_markdown(sections(plan, width=None, seen=seen, command=command))
    page = page_width(width)
    return as_text(sections(plan, width=page, seen=seen, command=command), width=page)


def sections(plan: Plan, *, width: int | None, seen: Beside | None = None, command: str = COMMAND) -> list[Section]:
    """Return the report of ``plan`` for a page of ``width`` columns of text; None: a page without a width."""
    return [
        header(plan),
        *_grid(plan, width=width),
        *stage_tables(plan, width=width),
        *verdicts(plan, width=width),
        boundary_table(plan, width=width),
        prediction(plan),
        *generation(plan),
        *measured_sections(plan, seen),
        *changes(plan),
        *frontier(plan, width=width),
        *meshes(plan),
        *lists(plan, REASONS, "Whole modules", "Notes"),
        *next_steps(plan, command),
    ]


def lists(plan: Plan, *titles: str) -> Iterator[Section]:
    """Yield what the planner has to say under these titles."""
    points = {REASONS: plan.reasons, "Whole modules": plan.whole, "Notes": plan.notes}
    yield from (Section(title, points=points[title]) for title in titles if points[title])


def _grid(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield the schedule's grid: none for GPipe and 1F1B, which everybody knows, or where it is too large."""
    if plan.schedule in _PLAIN_SCHEDULES and not plan.schedule_rows:
        return
    lines = str(plan.schedule_for(len(plan.microbatch_rows))).splitlines()
    if len(lines) <= GRID_ROWS and (width is None or max(map(len, lines)) <= width):
        yield Section("Schedule (a row per device; 2F0 is stage 2, forward, microbatch 0)", verbatim=tuple(lines))


def header(plan: Plan) -> Section:
    """Return what was planned, and on what."""
    each = f", up to {plan.virtual_stages} stages on each" if plan.virtual_stages > 1 else ""
    hosted = f", {' and '.join(plan.offload)} on the host" if plan.offload else ""
    source = " (from an action file)" if plan.schedule_rows else ""
    times = "measured node times" if plan.measured else "modelled node times (nothing was measured)"
    facts = (
        ("model", model_words(plan)),
        *_mesh_words(plan),
        ("devices", f"{len(plan.devices)}: {repeats(plan.devices)}{each}{', a process for each' * plan.processes}"),
        ("chunks", _microbatches(plan)),
        ("schedule", f"{plan.schedule}{source}, optimizer {plan.optimizer}{hosted}"),
        ("basis", f"{times}, torch {plan.fingerprint.torch}"),
        ("traced", _traced(plan)),
    )
    return Section(f"Partition of {plan.fingerprint.model}", facts=facts)


def _mesh_words(plan: Plan) -> list[tuple[str, str]]:
    """Return the mesh, of a plan on paper or of ranks."""
    if plan.mesh is None:
        return []
    rows = plural(sum(plan.microbatch_rows) * plan.mesh.dp, "row")
    where = "processes" if plan.machine is None else plan.machine
    facts = [("mesh", f"{plan.mesh} of {where}, {rows} in all; what follows is of one pipeline")]
    if plan.mesh.runtime != "autosplit":
        facts += [("assumed", f"what {plan.mesh.runtime} shards, overlaps and shares, which autosplit does not run")]
    elif plan.machine is None and plan.mesh.dp > 1:
        facts += [("not counted", "the sums over replicas, and what shards save")]
    return facts


def model_words(plan: Plan) -> str:
    """Return how large the model is, what it trains in, and how long its rows are."""
    dtype = "" if plan.dtype is None else f" in {plan.dtype}"
    precision = f"{dtype}, as the model is" if plan.precision is None else f", precision {plan.precision}"
    rows = "" if plan.sequence is None else f", rows of {plural(plan.sequence, 'token')}"
    count = f"{format_count(plan.parameters)} parameters"
    if 0 < plan.frozen < plan.parameters:
        count = f"trained {format_count(plan.parameters - plan.frozen)} of {count}"
    kept = "".join(f", {name} {value}" for name, value in (("LoRA", plan.lora), ("base", plan.base)) if value)
    return f"{count}{precision}{kept}{rows}"


def _traced(plan: Plan) -> str:
    """Say how the model was followed, and how much of it stayed whole."""
    ways = {
        "recorded": "run and recorded",
        "module tree": "no graph can follow it: its own Python runs, module by module",
    }
    kept = f", {plural(len(plan.whole), 'module')} whole" if plan.whole else ""
    return ways[plan.rung] + kept


def _microbatches(plan: Plan) -> str:
    rows = plan.microbatch_rows
    sizes = ", ".join(f"{len(list(run))} x {plural(size, 'row')}" for size, run in groupby(rows))
    used = "" if len(rows) == plan.chunks else f", {len(rows)} used"
    return f"{plan.chunks}{used}: {sizes} (a batch of {plural(sum(rows), 'row')})"


def stage_tables(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield two tables with one row per stage: one of all columns would need about 160 columns of text."""
    index = column("stage", plan.stages, lambda stage: str(stage.index))
    times = _time_columns(plan)
    device = _device_column(plan, [index, *times], width=width)
    basis = "measured" if plan.measured else "modelled"
    room = room_beside([index, device, *times], width=width)
    owned = covers(plan)
    modules = column("modules", plan.stages, lambda stage: fit_modules(owned[stage.index], width=room), align="left")
    aside = room is not None and width is not None and room < NARROWEST_MODULES
    yield Section(
        f"Stages (forward, backward and what a stage sends: per microbatch, {basis})",
        columns=(index, device, *(() if aside else (modules,)), *times),
        below=tuple(_modules_below(owned, width=width)) if aside and width is not None else (),
    )
    yield Section(
        "Memory per stage when its device is fullest, and the device's peak"
        if shares(plan)
        else "Memory per stage over a step",
        columns=(index, *_memory_columns(plan)),
        below=(*_buffers(plan), *_communicators(plan)),
    )


def _device_column(plan: Plan, others: Sequence[Column], *, width: int | None) -> Column:
    """Return the stages' devices: their names, and their numbers where several stages share one; else those alone."""
    numbered = column("device", plan.stages, lambda stage: f"{stage.lane}: {stage.device}", align="left")
    named = numbered if shares(plan) else column("device", plan.stages, lambda stage: stage.device, align="left")
    if width is None or table_width([named, *others]) <= width:
        return named
    return column("device", plan.stages, lambda stage: str(stage.lane), align="left")


def _modules_below(owned: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return the modules as lines of their own, for a page on which the table has no room for them."""
    return [
        "modules",
        *(f"  stage {index}: {fit_modules(names, width=width - 16)}" for index, names in enumerate(owned)),
    ]


def _buffers(plan: Plan) -> list[str]:
    sizes = [(stage.index, stage.memory.buffer_bytes) for stage in plan.stages if stage.memory.buffer_bytes]
    listed = ", ".join(f"{format_bytes(size)} on stage {index}" for index, size in sizes)
    return [f"and buffers: {listed}"] if sizes else []


def _communicators(plan: Plan) -> Iterator[str]:
    """Yield what NCCL keeps of the devices of processes."""
    lanes: dict[int, list[int]] = {}
    for lane, size in sorted({stage.lane: stage.memory.communicator_bytes for stage in plan.stages}.items()):
        lanes.setdefault(size, []).append(lane)
    listed = ", ".join(f"{format_bytes(size)} on {some_numbers(ids)}" for size, ids in lanes.items() if size)
    if listed:
        yield f"NCCL's buffers are taken from the capacity, by device: {listed}"


def _time_columns(plan: Plan) -> list[Column]:
    columns = [
        column("params", plan.stages, lambda stage: format_count(stage.parameters)),
        column("forward", plan.stages, lambda stage: format_seconds(stage.forward_s)),
        column("backward", plan.stages, lambda stage: format_seconds(stage.backward_s)),
    ]
    if any(stage.recompute != "never" for stage in plan.stages):
        columns.append(column("recompute", plan.stages, lambda stage: stage.recompute, align="left"))
    if any(stage.replicas > 1 for stage in plan.stages):
        columns.append(column("replicas", plan.stages, lambda stage: str(stage.replicas)))
    return [*columns, column("sends", plan.stages, lambda stage: _sends(plan, stage), align="left")]


def _memory_columns(plan: Plan) -> list[Column]:
    columns = [
        column("params", plan.stages, lambda stage: format_bytes(stage.memory.parameter_bytes)),
        column("grads", plan.stages, lambda stage: format_bytes(stage.memory.gradient_bytes)),
        column("optim", plan.stages, lambda stage: format_bytes(stage.memory.optimizer_bytes)),
        column("activ", plan.stages, lambda stage: format_bytes(stage.memory.activation_bytes)),
        column("transient", plan.stages, lambda stage: format_bytes(stage.memory.transient_bytes)),
        column("peak", plan.stages, lambda stage: format_bytes(stage.memory.peak_bytes)),
    ]
    if any(stage.memory.capacity_bytes is not None for stage in plan.stages):
        columns.append(column("capacity", plan.stages, lambda stage: size_words(stage.memory.capacity_bytes)))
    return columns


def _sends(plan: Plan, stage: StagePlan) -> str:
    """Return what leaves the stage with every microbatch, one transfer per consumer, and where it goes."""
    out = [item for item in plan.boundaries if item.producer == stage.index and not item.per_step and item.consumers]
    if not out:
        return "-"
    consumers = {consumer for item in out for consumer in item.consumers}
    return f"{format_bytes(sum(item.bytes * len(item.consumers) for item in out))} to {some_numbers(consumers)}"


def boundary_table(plan: Plan, *, width: int | None) -> Section:
    """Return the boundary table: all of them, or the largest in model order and a line that counts the rest."""
    if not plan.boundaries:
        return Section("Boundaries: none")
    largest = sorted(plan.boundaries, key=lambda item: item.bytes, reverse=True)[:BOUNDARY_ROWS]
    shown = [item for item in plan.boundaries if item in largest]
    columns = [
        column("from", shown, lambda item: "input" if item.producer < 0 else str(item.producer)),
        column("to", shown, lambda item: some_numbers(item.consumers) or "output", align="left"),
        column("size", shown, lambda item: format_bytes(item.bytes)),
        column("sent per", shown, lambda item: "step" if item.per_step else "microbatch", align="left"),
    ]
    room = room_beside(columns, width=width)
    value = column("value", shown, lambda item: shorten(item.value, width=room), align="left")
    return Section("Boundaries", columns=(value, *columns), below=tuple(_hidden(plan.boundaries, shown=shown)))


def _hidden(boundaries: Sequence[Boundary], *, shown: Sequence[Boundary]) -> Iterable[str]:
    rest = [item for item in boundaries if item not in shown]
    if rest:
        ones = "1 smaller one" if len(rest) == 1 else f"{len(rest)} smaller ones"
        yield f"and {ones}, {format_bytes(sum(item.bytes for item in rest))} in all"
