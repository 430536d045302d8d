"""A model's costs as text: what was profiled, a row per module or node, totals, and what the figures rest on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from autosplit.report.costs import CostReport, Row, module_rows, node_rows, readable_depth
from autosplit.units import format_bytes, format_seconds

DEFAULT_WIDTH = 120
READABLE_ROWS = 40
_NARROWEST_NAME = 16
_TITLES = "class,forward,backward,share,fwd FLOPs,bwd FLOPs,saved,transient,output".split(",")
_PEAK = "peak"


def render_costs(
    report: CostReport,
    *,
    width: int | None = None,
    depth: int | None = None,
    nodes: bool = False,
    top: int | None = None,
) -> str:
    """Return the report as text, at most ``width`` columns wide where that is possible.

    One row per module down to ``depth`` (None: as deep as 40 rows allow), or per node. ``top`` shows only the rows that
    take the most time, in model order.
    """
    page = width or DEFAULT_WIDTH
    if nodes:
        title, rows = "Costs by node", node_rows(report)
    else:
        depth = readable_depth(report, most=READABLE_ROWS) if depth is None else depth
        title, rows = f"Costs by module, to depth {depth}", module_rows(report, depth=depth)
    sections = [_wrapped(_header(report), page), [title, *_table(rows, top=top, width=page)], _totals(report)]
    if notes := list(_notes(report)):
        sections.append(_wrapped(["Notes", *(f"  - {note}" for note in notes)], page))
    return "\n\n".join("\n".join(section) for section in sections)


def _header(report: CostReport) -> list[str]:
    rows = "1 row" if report.rows == 1 else f"{report.rows} rows"
    if report.microbatches > 1:
        rows += f" per microbatch (a batch of {report.batch_rows} in {report.microbatches} microbatches)"
    return [
        f"Profile of {report.model}",
        f"  device     {report.device}{f': {report.hardware}' if report.hardware else ''}",
        f"  rows       {rows}",
        f"  times      {_times(report)}",
        f"  torch      {report.torch}",
    ]


def _times(report: CostReport) -> str:
    if report.basis == "modelled":
        return "modelled (nothing was measured)"
    counts = [node.samples for node in report.nodes if node.samples is not None]
    if not counts:
        return "measured now: the least of a few runs of the whole model"
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    modelled = sum(node.basis == "modelled" for node in report.nodes)
    return f"measured {'in an earlier run' if report.cached else 'now'}: medians of {spread} samples" + (
        f"; {modelled} of {len(report.nodes)} nodes modelled" if modelled else ""
    )


def _table(rows: Sequence[Row], *, top: int | None, width: int) -> list[str]:
    count = len(rows) if top is None else top
    largest = sorted(range(len(rows)), key=lambda index: rows[index].share, reverse=True)[:count]
    shown = [row for index, row in enumerate(rows) if index in set(largest)]
    hidden = [row for index, row in enumerate(rows) if index not in set(largest)]
    titles, cells = list(_TITLES), [_cells(row) for row in shown]
    if any(row.peak_bytes is not None for row in shown):
        titles.append(_PEAK)
        cells = [[*line, _size(row.peak_bytes)] for line, row in zip(cells, shown, strict=True)]
    room = width - sum(2 + max(map(len, column)) for column in zip(titles, *cells, strict=True))
    names = [_shorten(_marked(row), width=max(room, _NARROWEST_NAME)) for row in shown]
    header = ["name", *titles]
    lines = [header, ["-" * max(map(len, column)) for column in zip(header, *_joined(names, cells), strict=True)]]
    align = ("left", "left", *("right",) * (len(titles) - 1))
    text = tabulate([*lines, *_joined(names, cells)], tablefmt="plain", colalign=align, disable_numparse=True)
    found = [line.rstrip() for line in text.splitlines()]
    if hidden:
        found.append(f"and {len(hidden)} more with {sum(row.share for row in hidden):.1%} of the time")
    return [*found, *_legend(shown)]


def _joined(names: Iterable[str], cells: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[name, *rest] for name, rest in zip(names, cells, strict=True)]


def _cells(row: Row) -> list[str]:
    return [
        ", ".join(row.classes),
        format_seconds(row.forward_s),
        format_seconds(row.backward_s),
        f"{row.share:.1%}",
        format_flops(row.forward_flops),
        format_flops(row.backward_flops),
        format_bytes(row.saved_bytes),
        _size(row.transient_bytes),
        format_bytes(row.output_bytes),
    ]


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _marked(row: Row) -> str:
    return row.name + (" ~" if row.modelled else "") + (" *" if row.estimated else "")


def _legend(rows: Sequence[Row]) -> list[str]:
    lines = ["share: of a step, forward and backward; saved: storages, once per row; transient: the largest of a row"]
    if any(row.peak_bytes is not None for row in rows):
        lines.append("peak: the most that the device held for one operation, its results and gradients included")
    if any(row.modelled for row in rows):
        lines.append("~ times of some of it were not measured: a cost model's, in the measured scale")
    if any(row.estimated for row in rows):
        lines.append("* FLOPs and bytes of some of it are estimates")
    return lines


def _totals(report: CostReport) -> list[str]:
    totals = report.totals
    ranges = [(node.forward_range_s, node.backward_range_s) for node in report.nodes]
    spread = ""
    if all(forward is not None for forward, _ in ranges):
        low, high = (sum(f[end] + b[end] for f, b in ranges if f and b) for end in (0, 1))
        spread = f" (quartiles {format_seconds(low)} to {format_seconds(high)})"
    several = f" of {report.microbatches} microbatches" if report.microbatches > 1 else ""
    times = f"forward {format_seconds(totals.forward_s)}, backward {format_seconds(totals.backward_s)}"
    buffers = f", buffers {format_bytes(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    return [
        "Totals",
        f"  times      {times}{spread}",
        f"  step       {format_seconds(totals.step_s)}{several}, one after the other on one device",
        f"  FLOPs      forward {format_flops(totals.forward_flops)}, backward {format_flops(totals.backward_flops)}; "
        f"a step {format_flops(totals.step_flops)}",
        f"  parameters {totals.parameters:,} in {format_bytes(totals.parameter_bytes)}{buffers}",
        f"  saved      {format_bytes(totals.saved_bytes)} for the backward of a microbatch",
    ]


def _notes(report: CostReport) -> Iterable[str]:
    yield from report.notes
    modelled = [node for node in report.nodes if node.why]
    for why in dict.fromkeys(node.why for node in modelled):
        names = [node.name for node in modelled if node.why == why]
        yield f"modelled, not measured: {_first(names)}: {why}"
    estimated = [node for node in report.nodes if node.estimated]
    for why in dict.fromkeys(node.estimated for node in estimated):
        names = [node.name for node in estimated if node.estimated == why]
        yield f"FLOPs and bytes are estimates: {_first(names)}: {why}"


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def format_flops(count: float) -> str:
    """Return floating-point operations with three significant digits: ``"1.24 G"``."""
    size = float(count)
    for unit in ("", " k", " M", " G", " T", " P"):
        if size < 999.5:
            return f"{size:.0f}" if not unit else f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}{unit}"
        size /= 1000
    return f"{size:.3g} E"


def _shorten(text: str, *, width: int) -> str:
    """Return ``text`` without its start when it is longer than ``width``: the end of a dotted name tells more."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    found: list[str] = []
    for line in lines:
        indent = " " * (4 if line.startswith("  - ") else 13)
        found += textwrap.wrap(line, width=width, subsequent_indent=indent, break_on_hyphens=False)
    return found
