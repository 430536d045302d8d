"""A plan as text: the header, the stages, the boundaries and what they amount to.

Partition of Model        what was planned, on what, from measured or modelled times
Schedule                  who does what when, where that is not plain and small enough
Stages                    one row per stage and table: times, memory
Boundaries                one row per value that crosses a cut
Prediction                imbalance, bubble, step time, proof, node classes, memory
Notes                     what else the planner has to say
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tabulate import tabulate

from autosplit.planning.plan import Plan
from autosplit.planning.records import Boundary, StagePlan
from autosplit.units import format_bytes, format_seconds

DEFAULT_WIDTH = 120
NARROWEST_WIDTH = 80
"""What the memory table needs; a narrower page gets lines of this width."""
NARROWEST_MODULES = 24
BOUNDARY_ROWS = 24
GRID_ROWS = 16
_PLAIN_SCHEDULES = ("gpipe", "1f1b", "forward")
COLLAPSED_SHARE = 0.5
HINDERED_SHARE = 0.1
_GAP = "  "


@dataclass(frozen=True)
class _Column:
    """One column of a table: its title, its cells from top to bottom, and on which side they line up."""

    title: str
    cells: tuple[str, ...]
    align: str = "right"

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def render(plan: Plan, *, width: int | None = None) -> str:
    """Return the partition report of ``plan`` as text.

    Lines are at most ``width`` columns wide (120 when None) where that is 80 or more. Bytes are in binary units; times
    are per microbatch where the table says so and per step elsewhere.
    """
    page = max(width or DEFAULT_WIDTH, NARROWEST_WIDTH)
    sections = [
        _wrap(_header(plan), width=page),
        *_grid(plan, width=page),
        _stages(plan, width=page),
        _boundaries(plan, width=page),
        _wrap(_prediction(plan), width=page),
    ]
    if plan.whole:
        sections.append(_wrap(["Whole modules", *(f"  - {text}" for text in plan.whole)], width=page))
    if plan.notes:
        sections.append(_wrap(["Notes", *(f"  - {note}" for note in plan.notes)], width=page))
    return "\n\n".join("\n".join(section) for section in sections)


def summarise_modules(names: Iterable[str]) -> str:
    """Return module names as one short line: numbered neighbours become ranges, ``h.0, h.1, h.2`` is ``h.0-h.2``."""
    return ", ".join(_module_ranges(names))


def _covers(plan: Plan) -> list[list[str]]:
    """Return each stage's modules: the largest subtrees that no other stage shares, ``(part)`` where one is shared."""
    owners: dict[str, set[int]] = {}
    for stage in plan.stages:
        for path in stage.modules:
            for prefix in _prefixes(path):
                owners.setdefault(prefix, set()).add(stage.index)
    return [list(dict.fromkeys(_largest_own(path, owners=owners) for path in stage.modules)) for stage in plan.stages]


def _prefixes(path: str) -> list[str]:
    """Return a module and those that hold it, the outermost first: ``a.b`` gives ``a``, ``a.b``."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _largest_own(path: str, *, owners: Mapping[str, set[int]]) -> str:
    whole = (prefix for prefix in _prefixes(path) if len(owners[prefix]) == 1)
    return next(whole, f"{path} (part)")


def _module_ranges(names: Iterable[str]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(|.*\.)(0|[1-9][0-9]*)", name)
        if match is None:
            numbers[name] = []
        else:
            numbers.setdefault(match[1], []).append(int(match[2]))
    return [text for name, found in numbers.items() for text in (_ranges(name, found) if found else [name or "(root)"])]


def _ranges(prefix: str, numbers: list[int]) -> list[str]:
    parent = prefix[:-1].rpartition(".")[2]
    last = f"{parent}." if parent else ""
    texts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        texts.append(f"{prefix}{found[0]}" + (f"-{last}{found[-1]}" if len(found) > 1 else ""))
    return texts


def _fit_modules(names: Iterable[str], *, width: int) -> str:
    """Return as many modules as ``width`` columns hold, and how many are left out."""
    parts = _module_ranges(names)
    for count in range(len(parts), 0, -1):
        left = len(parts) - count
        text = ", ".join(parts[:count]) + (f", +{left} more" if left else "")
        if len(text) <= width:
            return text
    tail = f", +{len(parts) - 1} more" if len(parts) > 1 else ""
    return (_shorten(parts[0], width=width - len(tail)) + tail) if parts else "-"


def _shorten(text: str, *, width: int) -> str:
    """Return ``text`` without its start when it is longer than ``width``: the end of a dotted name tells more."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _grid(plan: Plan, *, width: int) -> list[list[str]]:
    """Return the schedule's grid: none for GPipe and 1F1B, which everybody knows, or where it is too large."""
    if plan.schedule in _PLAIN_SCHEDULES and not plan.actions:
        return []
    lines = str(plan.schedule_for(len(plan.microbatch_rows))).splitlines()
    small = len(lines) <= GRID_ROWS and max(map(len, lines)) <= width
    return [["Schedule (a row per device; 2F0 is stage 2, forward, microbatch 0)", *lines]] if small else []


def _shares(plan: Plan) -> bool:
    """Tell whether stages are not simply one per device, in order."""
    return any(stage.lane != stage.index for stage in plan.stages)


def _header(plan: Plan) -> list[str]:
    each = f", up to {plan.virtual_stages} stages on each" if plan.virtual_stages > 1 else ""
    own = " (from an action file)" if plan.actions else ""
    times = "measured node times" if plan.measured else "modelled node times (nothing was measured)"
    return [
        f"Partition of {plan.fingerprint.model}",
        f"  devices    {len(plan.devices)}: {_repeats(plan.devices)}{each}",
        f"  chunks     {_microbatches(plan)}",
        f"  schedule   {plan.schedule}{own}, optimizer {plan.optimizer}",
        f"  basis      {times}, torch {plan.fingerprint.torch}",
        f"  traced     {_traced(plan)}",
    ]


def _traced(plan: Plan) -> str:
    """Say how the model was followed, and how much of it stayed whole."""
    ways = {
        "recorded": "run and recorded",
        "captured": "captured by dynamo",
        "module tree": "no graph can follow it: its own Python runs, module by module",
    }
    kept = f", {_plural(len(plan.whole), 'module')} whole" if plan.whole else ""
    return ways[plan.rung] + kept


def _repeats(names: Sequence[str]) -> str:
    counts = [(name, len(list(run))) for name, run in groupby(names)]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts)


def _microbatches(plan: Plan) -> str:
    rows = plan.microbatch_rows
    sizes = ", ".join(f"{len(list(run))} x {_plural(size, 'row')}" for size, run in groupby(rows))
    used = "" if len(rows) == plan.chunks else f", {len(rows)} used"
    return f"{plan.chunks}{used}: {sizes} (a batch of {_plural(sum(rows), 'row')})"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _stages(plan: Plan, *, width: int) -> list[str]:
    """Return two tables with one row per stage: one of all columns would need about 160 columns of text."""
    index = _column(plan, "stage", lambda stage: str(stage.index))
    place = (lambda stage: f"{stage.lane}: {stage.device}") if _shares(plan) else (lambda stage: stage.device)
    device = _column(plan, "device", place, align="left")
    times = _time_columns(plan)
    basis = "measured" if plan.measured else "modelled"
    room = width - _table_width([index, device, *times]) - len(_GAP)
    covers = _covers(plan)
    modules = _column(plan, "modules", lambda stage: _fit_modules(covers[stage.index], width=room), align="left")
    aside = [] if room >= NARROWEST_MODULES else _modules_below(covers, width=width)
    return [
        f"Stages (forward, backward and what a stage sends: per microbatch, {basis})",
        *_table([index, device, *([] if aside else [modules]), *times]),
        *aside,
        "",
        "Memory per stage when its device is fullest, and the device's peak"
        if _shares(plan)
        else "Memory per stage over a step",
        *_table([index, *_memory_columns(plan)]),
        *_wrap(_buffers(plan), width=width),
    ]


def _modules_below(covers: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return the modules as lines of their own, for a page on which the table has no room for them."""
    lines = [f"  stage {index}: {_fit_modules(names, width=width - 16)}" for index, names in enumerate(covers)]
    return ["modules", *lines]


def _buffers(plan: Plan) -> list[str]:
    sizes = [(stage.index, stage.memory.buffer_bytes) for stage in plan.stages if stage.memory.buffer_bytes]
    listed = ", ".join(f"{format_bytes(size)} on stage {index}" for index, size in sizes)
    return [f"and buffers: {listed}"] if sizes else []


def _column(plan: Plan, title: str, cell: Callable[[StagePlan], str], *, align: str = "right") -> _Column:
    return _Column(title=title, cells=tuple(cell(stage) for stage in plan.stages), align=align)


def _time_columns(plan: Plan) -> list[_Column]:
    columns = [
        _column(plan, "params", lambda stage: _format_count(stage.parameters)),
        _column(plan, "forward", lambda stage: format_seconds(stage.forward_s)),
        _column(plan, "backward", lambda stage: format_seconds(stage.backward_s)),
    ]
    if any(stage.recompute != "never" for stage in plan.stages):
        columns.append(_column(plan, "recompute", lambda stage: stage.recompute, align="left"))
    if any(stage.replicas > 1 for stage in plan.stages):
        columns.append(_column(plan, "replicas", lambda stage: str(stage.replicas)))
    return [*columns, _column(plan, "sends", lambda stage: _sends(plan, stage), align="left")]


def _memory_columns(plan: Plan) -> list[_Column]:
    columns = [
        _column(plan, "params", lambda stage: format_bytes(stage.memory.parameter_bytes)),
        _column(plan, "grads", lambda stage: format_bytes(stage.memory.gradient_bytes)),
        _column(plan, "optim", lambda stage: format_bytes(stage.memory.optimizer_bytes)),
        _column(plan, "activ", lambda stage: format_bytes(stage.memory.activation_bytes)),
        _column(plan, "transient", lambda stage: format_bytes(stage.memory.transient_bytes)),
        _column(plan, "peak", lambda stage: format_bytes(stage.memory.peak_bytes)),
    ]
    if any(stage.memory.capacity_bytes is not None for stage in plan.stages):
        columns.append(_column(plan, "capacity", _capacity))
    return columns


def _capacity(stage: StagePlan) -> str:
    return "-" if stage.memory.capacity_bytes is None else format_bytes(stage.memory.capacity_bytes)


def _sends(plan: Plan, stage: StagePlan) -> str:
    """Return what leaves the stage with every microbatch, one transfer per consumer, and where it goes."""
    out = [item for item in plan.boundaries if item.producer == stage.index and not item.per_step and item.consumers]
    if not out:
        return "-"
    consumers = {consumer for item in out for consumer in item.consumers}
    return f"{format_bytes(sum(item.bytes * len(item.consumers) for item in out))} to {_numbers(consumers)}"


def _numbers(found: Iterable[int]) -> str:
    return ", ".join(_ranges("", sorted(found)))


def _format_count(count: int) -> str:
    """Return a number of elements with three significant digits: ``"1.24 M"``."""
    size = float(count)
    for unit in ("", " k", " M", " G"):
        if size < 999.5:
            return f"{size:.0f}" if not unit else f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f}{unit}"
        size /= 1000
    return f"{size:.2f} T"


def _boundaries(plan: Plan, *, width: int) -> list[str]:
    """Return the boundary table: all of them, or the largest in model order and a line that counts the rest."""
    if not plan.boundaries:
        return ["Boundaries: none"]
    largest = sorted(plan.boundaries, key=lambda item: item.bytes, reverse=True)[:BOUNDARY_ROWS]
    shown = [item for item in plan.boundaries if item in largest]
    columns = [
        _Column("from", tuple("input" if item.producer < 0 else str(item.producer) for item in shown)),
        _Column("to", tuple(_numbers(item.consumers) or "output" for item in shown), align="left"),
        _Column("size", tuple(format_bytes(item.bytes) for item in shown)),
        _Column("sent per", tuple("step" if item.per_step else "microbatch" for item in shown), align="left"),
    ]
    room = width - _table_width(columns) - len(_GAP)
    value = _Column("value", tuple(_shorten(item.value, width=room) for item in shown), align="left")
    return ["Boundaries", *_table([value, *columns]), *_hidden(plan.boundaries, shown=shown)]


def _hidden(boundaries: Sequence[Boundary], *, shown: Sequence[Boundary]) -> list[str]:
    rest = [item for item in boundaries if item not in shown]
    if not rest:
        return []
    return [f"and {len(rest)} smaller ones, {format_bytes(sum(item.bytes for item in rest))} in all"]


def _prediction(plan: Plan) -> list[str]:
    unit = "device" if _shares(plan) else "stage"
    totals = [0.0] * (1 + max(stage.lane for stage in plan.stages))
    for stage in plan.stages:
        totals[stage.lane] += stage.forward_s + stage.backward_s
    mean = sum(totals) / len(totals)
    slowest = totals.index(max(totals))
    ratio = f"{max(totals) / mean:.2f}" if mean else "1.00"
    steps = plan.objective == "step_time"
    step = f"step       {format_seconds(plan.step_s)}, bubble {plan.bubble:.1%}"
    bottleneck = f"bottleneck {format_seconds(plan.bottleneck_s)} per microbatch"
    return [
        "Prediction",
        f"  {step}, {_proof(plan)}" if steps else f"  {step}",
        f"  imbalance  {ratio} (slowest {unit} over the mean; the slowest is {unit} {slowest})",
        f"  {bottleneck}" if steps else f"  {bottleneck}, {_proof(plan)}",
        *_classes(plan),
        f"  memory     {_memory_verdict(plan)}",
    ]


def _proof(plan: Plan) -> str:
    bound = f"lower bound {format_seconds(plan.lower_bound_s)}"
    if plan.status == "optimal":
        return f"{bound}: optimal"
    if plan.lower_bound_s <= 0:
        return "no lower bound is known"
    return f"{bound}: at most {plan.gap:.1%} above the optimum"


def _classes(plan: Plan) -> list[str]:
    """Return the share of FLOPs per class, and what a large ``full`` share means for the pipeline."""
    shares = ", ".join(f"{name} {plan.class_flops.get(name, 0.0):.1%}" for name in ("micro", "full", "shared"))
    lines = [f"  classes    {shares} of the forward FLOPs"]
    full = plan.class_flops.get("full", 0.0)
    if full < HINDERED_SHARE:
        return lines
    state = "has collapsed" if full >= COLLAPSED_SHARE else "is held back"
    count = 1 + max(stage.lane for stage in plan.stages)
    stages = _plural(count, "device" if _shares(plan) else "stage")
    limit = 1 / (full + (1 - full) / count)
    return [
        *lines,
        f"  pipeline   The pipeline {state}: {full:.0%} of the work mixes rows of the batch and runs once, on merged "
        f"values, outside the microbatches; {stages} can be at most {limit:.2f} times as fast as one.",
    ]


def _holder(plan: Plan, stage: StagePlan) -> str:
    return f"device {stage.lane}" if _shares(plan) else f"stage {stage.index}"


def _memory_verdict(plan: Plan) -> str:
    """Return whether the plan fits, with the numbers of the stage that is nearest to its device's capacity."""
    known = [(stage, stage.memory.capacity_bytes) for stage in plan.stages if stage.memory.capacity_bytes is not None]
    if not known:
        worst = max(plan.stages, key=lambda stage: stage.memory.peak_bytes)
        peak = f"the largest peak is {format_bytes(worst.memory.peak_bytes)} on {_holder(plan, worst)}"
        return f"not judged: no capacity is known (memory_limit= sets one), {peak}"
    tightest, capacity = max(known, key=lambda pair: pair[0].memory.peak_bytes / max(pair[1], 1))
    numbers = (
        f"{_holder(plan, tightest)} needs {format_bytes(tightest.memory.peak_bytes)}, "
        f"{tightest.device} has {format_bytes(capacity)}"
    )
    if plan.verdict == "fits":
        return f"fits; the tightest is {numbers}"
    if plan.verdict == "borderline":
        return f"borderline: {numbers}"
    return f"DOES NOT FIT: {numbers}; more devices, more chunks or a smaller batch need less"


def _table_width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _table(columns: Sequence[_Column]) -> list[str]:
    titles = [column.title for column in columns]
    rules = ["-" * column.width for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    align = [column.align for column in columns]
    text = tabulate([titles, rules, *rows], tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def _wrap(lines: Iterable[str], *, width: int) -> list[str]:
    """Break lines that are too long; the rest goes below their own text, so that the labels stay in the margin."""
    wrapped: list[str] = []
    for line in lines:
        label = re.match(r"  (?:- |\S+ +)", line)
        indent = " " * label.end() if label else ""
        wrapped += textwrap.wrap(line, width=width, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped
