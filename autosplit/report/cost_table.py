"""A model's costs as text: what was profiled, a row per module or node, totals, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosplit.report.costs import CostReport, Row, module_rows, node_rows, readable_depth
from autosplit.report.document import DEFAULT_WIDTH, Column, Section, as_text, column, room_beside
from autosplit.report.words import format_count, plural, shorten
from autosplit.units import format_bytes, format_seconds

READABLE_ROWS = 40
_NARROWEST_NAME = 16


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
    sections = [_header(report), _costs(title, rows, top=top, width=page), _totals(report)]
    if notes := tuple(_notes(report)):
        sections.append(Section("Notes", points=notes))
    return as_text(sections, width=page)


def _header(report: CostReport) -> Section:
    rows = plural(report.rows, "row")
    if report.microbatches > 1:
        rows += f" per microbatch (a batch of {report.batch_rows} in {report.microbatches} microbatches)"
    facts = (
        ("device", f"{report.device}{f': {report.hardware}' if report.hardware else ''}"),
        ("rows", rows),
        ("times", _times(report)),
        ("torch", report.torch),
    )
    return Section(f"Profile of {report.model}", facts=facts)


def _times(report: CostReport) -> str:
    if report.basis == "modelled":
        return "modelled (nothing was measured)"
    counts = [node.samples for node in report.nodes if node.samples is not None]
    if not counts:
        return "measured now: the least of a few runs of the whole model"
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    modelled = sum(node.basis == "modelled" for node in report.nodes)
    return f"measured now: medians of {spread} samples" + (
        f"; {modelled} of {len(report.nodes)} nodes modelled" if modelled else ""
    )


def _costs(title: str, rows: Sequence[Row], *, top: int | None, width: int) -> Section:
    largest = set(sorted(range(len(rows)), key=lambda index: rows[index].share, reverse=True)[:top])
    shown = [row for index, row in enumerate(rows) if index in largest]
    hidden = [row for index, row in enumerate(rows) if index not in largest]
    figures = _figures(shown)
    room = max(room_beside(figures, width=width) or 0, _NARROWEST_NAME)
    name = column("name", shown, lambda row: shorten(_marked(row), width=room), align="left")
    below = [f"and {len(hidden)} more with {sum(row.share for row in hidden):.1%} of the time"] if hidden else []
    return Section(title, columns=(name, *figures), below=(*below, *_legend(shown)))


def _figures(rows: Sequence[Row]) -> list[Column]:
    columns = [
        column("class", rows, lambda row: ", ".join(row.classes), align="left"),
        column("forward", rows, lambda row: format_seconds(row.forward_s)),
        column("backward", rows, lambda row: format_seconds(row.backward_s)),
        column("share", rows, lambda row: f"{row.share:.1%}"),
        column("fwd FLOPs", rows, lambda row: format_count(row.forward_flops)),
        column("bwd FLOPs", rows, lambda row: format_count(row.backward_flops)),
        column("saved", rows, lambda row: format_bytes(row.saved_bytes)),
        column("transient", rows, lambda row: _size(row.transient_bytes)),
        column("output", rows, lambda row: format_bytes(row.output_bytes)),
    ]
    if any(row.peak_bytes is not None for row in rows):
        columns.append(column("peak", rows, lambda row: _size(row.peak_bytes)))
    return columns


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _marked(row: Row) -> str:
    return row.name + (" ~" if row.modelled else "") + (" *" if row.estimated else "")


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    yield "share: of a step, forward and backward; saved: storages, once per row; transient: the largest of a row"
    if any(row.peak_bytes is not None for row in rows):
        yield "peak: the most that the device held for one operation, its results and gradients included"
    if any(row.modelled for row in rows):
        yield "~ times of some of it were not measured: a cost model's, in the measured scale"
    if any(row.estimated for row in rows):
        yield "* FLOPs and bytes of some of it are estimates"


def _totals(report: CostReport) -> Section:
    totals = report.totals
    ranges = [(node.forward_range_s, node.backward_range_s) for node in report.nodes]
    spread = ""
    if all(forward is not None for forward, _ in ranges):
        low, high = (sum(f[end] + b[end] for f, b in ranges if f and b) for end in (0, 1))
        spread = f" (quartiles {format_seconds(low)} to {format_seconds(high)})"
    several = f" of {report.microbatches} microbatches" if report.microbatches > 1 else ""
    times = f"forward {format_seconds(totals.forward_s)}, backward {format_seconds(totals.backward_s)}"
    flops = f"forward {format_count(totals.forward_flops)}, backward {format_count(totals.backward_flops)}"
    buffers = f", buffers {format_bytes(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    facts = (
        ("times", f"{times}{spread}"),
        ("step", f"{format_seconds(totals.step_s)}{several}, one after the other on one device"),
        ("FLOPs", f"{flops}; a step {format_count(totals.step_flops)}"),
        ("parameters", f"{totals.parameters:,} in {format_bytes(totals.parameter_bytes)}{buffers}"),
        ("saved", f"{format_bytes(totals.saved_bytes)} for the backward of a microbatch"),
    )
    return Section("Totals", facts=facts)


def _notes(report: CostReport) -> Iterator[str]:
    yield from report.notes
    reasons = dict.fromkeys(node.why for node in report.nodes if node.why)
    for why in reasons:
        yield f"modelled, not measured: {_first([node.name for node in report.nodes if node.why == why])}: {why}"
    for why in dict.fromkeys(node.estimated for node in report.nodes if node.estimated):
        names = [node.name for node in report.nodes if node.estimated == why]
        yield f"FLOPs and bytes are estimates: {_first(names)}: {why}"


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
