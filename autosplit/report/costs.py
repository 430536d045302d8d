"""What a model costs, as one document and as text: every node with its times, work and bytes, and what they rest on.

node      name, class, times and their ranges, FLOPs, saved, transient and output bytes, share of a step
row       nodes of one module taken together: times and FLOPs add up, saved storages count once, transients do not
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from autosplit.errors import listed
from autosplit.planning.plan.fields import FrozenFields
from autosplit.profile.stage_trace.stage_graph import users_of
from autosplit.profile.types import Profile
from autosplit.report.document import DEFAULT_WIDTH, Column, Section, as_text, column, room_beside
from autosplit.report.words import format_count, shorten, size_words
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.units import format_bytes, format_seconds, plural

OUTPUT = ""
"""Among the users of a node: the model's caller."""
READABLE_ROWS = 40
_NARROWEST_NAME = 16

Basis = Literal["measured", "modelled"]


class NodeCost(FrozenFields):
    """One node, for one microbatch (``full`` and ``shared`` nodes: for one step).

    Attributes:
        module: path of the module in whose forward it runs.
        node_class: how often it runs: ``micro``, ``full`` or ``shared``.
        share: of the time of a step, forward and backward.
        basis: whether its times were measured; ``why`` says why they were not where the others were.
        estimated: why its FLOPs and bytes are estimates, or "".
        forward_range_s, backward_range_s: quartiles of the samples; None where nothing was measured.
        saved: bytes by storage; equal numbers in two nodes are one storage.
        users: nodes that read its result; "" stands for the model's caller.
    """

    name: str
    module: str
    node_class: str
    forward_s: float
    backward_s: float
    share: float = 0.0
    basis: Basis
    why: str = ""
    estimated: str = ""
    forward_range_s: tuple[float, float] | None = None
    backward_range_s: tuple[float, float] | None = None
    samples: int | None = None
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    forward_flops: int
    backward_flops: int
    saved: dict[int, int]
    forward_transient_bytes: int
    backward_transient_bytes: int
    output_bytes: int
    users: tuple[str, ...]


class Totals(FrozenFields):
    """The model as a whole: times and FLOPs of all nodes once, and of a step with all its microbatches."""

    forward_s: float
    backward_s: float
    step_s: float
    forward_flops: int
    backward_flops: int
    step_flops: int
    saved_bytes: int
    parameters: int
    parameter_bytes: int
    buffer_bytes: int


class CostReport(FrozenFields):
    """What `autosplit profile` says: ``model_validate_json`` reads what ``model_dump_json`` wrote.

    Attributes:
        device: what the times are for; ``hardware`` is its name where they were measured.
        rows: batch rows of the microbatch; ``batch_rows`` those of the batch of ``microbatches``.
    """

    version: int = 3
    model: str
    device: str
    hardware: str = ""
    basis: Basis
    torch: str
    rows: int
    microbatches: int
    batch_rows: int
    totals: Totals
    nodes: tuple[NodeCost, ...]


def cost_report(
    model: nn.Module, traced: TracedGraph, profile: Profile, *, sizes: Sequence[int], hardware: str = ""
) -> CostReport:
    """Return the costs of a profiled recording for a step of microbatches of these sizes."""
    nodes = [_node(node, info, profile) for node, info in traced.compute_nodes()]
    times = [len(sizes) if node.node_class == NodeClass.MICRO.value else 1 for node in nodes]
    seconds = [count * (node.forward_s + node.backward_s) for count, node in zip(times, nodes, strict=True)]
    flops = [count * (node.forward_flops + node.backward_flops) for count, node in zip(times, nodes, strict=True)]
    step_s, whole = sum(seconds), Row("", tuple(nodes))
    shares = [own_s / step_s if step_s else 0.0 for own_s in seconds]
    parameters = list(model.parameters())
    return CostReport(
        model=type(model).__name__,
        device=profile.times.device,
        hardware=hardware,
        basis="measured" if profile.measured else "modelled",
        torch=str(torch.__version__),
        rows=profile.rows,
        microbatches=len(sizes),
        batch_rows=sum(sizes),
        totals=Totals(
            forward_s=whole.total("forward_s"),
            backward_s=whole.total("backward_s"),
            step_s=step_s,
            forward_flops=whole.total("forward_flops"),
            backward_flops=whole.total("backward_flops"),
            step_flops=sum(flops),
            saved_bytes=whole.saved_bytes,
            parameters=sum(parameter.numel() for parameter in parameters),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        ),
        nodes=tuple(n.model_copy(update={"share": share}) for n, share in zip(nodes, shares, strict=True)),
    )


def _node(node: fx.Node, info: TracedNode, profile: Profile) -> NodeCost:
    cost, sample = profile.nodes[info.name], profile.times.nodes.get(info.name)
    figures = vars(cost) | ({} if sample is None else vars(sample)) | {"estimated": cost.estimated or ""}
    return NodeCost(
        **{name: value for name, value in figures.items() if name in NodeCost.model_fields},
        module=info.module,
        node_class=info.node_class.value,
        basis="modelled" if sample is None else "measured",
        why=profile.modelled.get(info.name, ""),
        forward_flops=cost.forward_flops,
        backward_flops=cost.backward_flops,
        users=tuple(dict.fromkeys(OUTPUT if n.op == "output" else n.meta[INFO].name for n in users_of(node))),
    )


# -- as text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Some nodes taken together."""

    name: str
    nodes: tuple[NodeCost, ...]

    def total(self, figure: str) -> Any:
        """Return the sum of a figure over the nodes."""
        return sum(getattr(node, figure) for node in self.nodes)

    def largest(self, figure: str) -> int | None:
        """Return the maximum of a figure over all nodes, forward and backward; None if no node has it."""
        sizes = [getattr(node, f"{phase}_{figure}") for node in self.nodes for phase in ("forward", "backward")]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def saved_bytes(self) -> int:
        """What the nodes save for the backward; a storage that several save counts once."""
        return sum({storage: size for node in self.nodes for storage, size in node.saved.items()}.values())

    @property
    def output_bytes(self) -> int:
        """The results that leave the row."""
        inside = {node.name for node in self.nodes}
        return sum(node.output_bytes for node in self.nodes if not inside.issuperset(node.users))


def module_rows(report: CostReport, *, depth: int) -> list[Row]:
    """Return a row for every module down to ``depth`` (0: the model), each with what runs in it and below it."""
    groups: dict[str, list[NodeCost]] = defaultdict(list)
    for node in report.nodes:
        path = ".".join(node.module.split(".")[:depth])
        groups[path or f"({report.model})"].append(node)
    return [Row(path, tuple(nodes)) for path, nodes in groups.items()]


def readable_depth(report: CostReport, *, most: int = READABLE_ROWS) -> int:
    """Return the greatest depth at which there are at most ``most`` rows, and at which more is told than above it."""
    deepest = max(node.module.count(".") + 1 for node in report.nodes)
    counts = [len(module_rows(report, depth=depth)) for depth in range(deepest + 1)]
    fitting = [depth for depth, count in enumerate(counts) if count <= most]
    return next(depth for depth in fitting if counts[depth] == counts[fitting[-1]])


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
        title, rows = "Costs by node", [Row(node.name, (node,)) for node in report.nodes]
    else:
        depth = readable_depth(report) if depth is None else depth
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
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    modelled = sum(node.basis == "modelled" for node in report.nodes)
    return f"measured now: medians of {spread} samples" + (
        f"; {modelled} of {len(report.nodes)} nodes modelled" if modelled else ""
    )


def _costs(title: str, rows: Sequence[Row], *, top: int | None, width: int) -> Section:
    largest = set(sorted(range(len(rows)), key=lambda index: rows[index].total("share"), reverse=True)[:top])
    shown = [row for index, row in enumerate(rows) if index in largest]
    hidden = [row for index, row in enumerate(rows) if index not in largest]
    figures = _figures(shown)
    room = max(room_beside(figures, width=width) or 0, _NARROWEST_NAME)

    def marked(row: Row) -> str:
        text = row.name + " ~" * any(n.why for n in row.nodes) + " *" * any(n.estimated for n in row.nodes)
        return shorten(text, width=room)

    name = column("name", shown, marked, align="left")
    share = sum(row.total("share") for row in hidden)
    below = [f"and {len(hidden)} more with {share:.1%} of the time"] if hidden else []
    return Section(title, columns=(name, *figures), below=(*below, *_legend(shown)))


def _figures(rows: Sequence[Row]) -> list[Column]:
    columns = [
        column("class", rows, lambda row: ", ".join(dict.fromkeys(n.node_class for n in row.nodes)), align="left"),
        column("forward", rows, lambda row: format_seconds(row.total("forward_s"))),
        column("backward", rows, lambda row: format_seconds(row.total("backward_s"))),
        column("share", rows, lambda row: f"{row.total('share'):.1%}"),
        column("fwd FLOPs", rows, lambda row: format_count(row.total("forward_flops"))),
        column("bwd FLOPs", rows, lambda row: format_count(row.total("backward_flops"))),
        column("saved", rows, lambda row: format_bytes(row.saved_bytes)),
        column("transient", rows, lambda row: size_words(row.largest("transient_bytes"))),
        column("output", rows, lambda row: format_bytes(row.output_bytes)),
    ]
    if any(row.largest("peak_bytes") is not None for row in rows):
        columns.append(column("peak", rows, lambda row: size_words(row.largest("peak_bytes"))))
    return columns


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    yield "share: of a step, forward and backward; saved: storages, once per row; transient: the largest of a row"
    if any(row.largest("peak_bytes") is not None for row in rows):
        yield "peak: the most that the device held for one operation, its results and gradients included"


def _totals(report: CostReport) -> Section:
    totals = report.totals
    several = f" of {report.microbatches} microbatches" if report.microbatches > 1 else ""
    times = f"forward {format_seconds(totals.forward_s)}, backward {format_seconds(totals.backward_s)}"
    flops = f"forward {format_count(totals.forward_flops)}, backward {format_count(totals.backward_flops)}"
    buffers = f", buffers {format_bytes(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    facts = (
        ("times", times),
        ("step", f"{format_seconds(totals.step_s)}{several}, one after the other on one device"),
        ("FLOPs", f"{flops}; a step {format_count(totals.step_flops)}"),
        ("parameters", f"{totals.parameters:,} in {format_bytes(totals.parameter_bytes)}{buffers}"),
        ("saved", f"{format_bytes(totals.saved_bytes)} for the backward of a microbatch"),
    )
    return Section("Totals", facts=facts)


def _notes(report: CostReport) -> Iterator[str]:
    for why in dict.fromkeys(node.why for node in report.nodes if node.why):
        names = (node.name for node in report.nodes if node.why == why)
        yield f"~ modelled, not measured: {listed(names, most=1)}: {why}"
    for why in dict.fromkeys(node.estimated for node in report.nodes if node.estimated):
        names = (node.name for node in report.nodes if node.estimated == why)
        yield f"* FLOPs and bytes are estimates: {listed(names, most=1)}: {why}"
