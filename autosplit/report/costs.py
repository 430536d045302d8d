"""What a model costs, as one document: every node with its times, work and bytes, and where the figures come from.

node      name, class, times and their ranges, FLOPs, saved, transient and output bytes, share of a step
row       nodes of one module taken together: times and FLOPs add up, saved storages count once, transients do not
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import fx, nn

from autosplit.profile.node_costs.assumptions import ROUTED_RUN
from autosplit.profile.node_costs.module_costs import ModuleCosts, Seen
from autosplit.profile.types import NodeProfile, Profile
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode

VERSION = 2
OUTPUT = ""
"""Among the users of a node: the model's caller."""
WHOLE = "module"
"""The class of what runs by its own Python: how often in a step, only a plan says."""
_BACKWARD_FLOPS = 2
"""FLOPs of a backward over those of its forward: a matrix product has two in its backward."""
_CLOCK_S = 1e-9

Basis = Literal["measured", "modelled"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NodeCost(_Record):
    """One node, for one microbatch (``full`` and ``shared`` nodes: for one step).

    Attributes:
        module: path of the module in whose forward it runs.
        node_class: how often it runs: ``micro``, ``full`` or ``shared``.
        share: of the time of a step, forward and backward.
        basis: whether its times were measured; ``why`` says why they were not where the others were.
        estimated: why its FLOPs and bytes are estimates, or "".
        forward_range_s, backward_range_s: quartiles of the samples; None where nothing was measured.
        saved: bytes by storage; equal numbers in two nodes are one storage.
        forward_transient_bytes, backward_transient_bytes: None where they are not known.
        users: nodes that read its result; "" stands for the model's caller.
    """

    name: str
    module: str
    node_class: str
    forward_s: float
    backward_s: float
    share: float
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
    forward_transient_bytes: int | None
    backward_transient_bytes: int | None
    output_bytes: int
    users: tuple[str, ...]


class Totals(_Record):
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


class CostReport(_Record):
    """What `autosplit profile` says: ``model_validate_json`` reads what ``model_dump_json`` wrote.

    Attributes:
        device: what the times are for; ``hardware`` is its name where they were measured.
        rows: batch rows of the microbatch; ``batch_rows`` those of the batch of ``microbatches``.
        notes: what else holds: assumptions, and where figures are rough.
    """

    version: int = VERSION
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
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Some nodes taken together; transients and the device's own peaks are the largest of theirs, None: unknown."""

    name: str
    classes: tuple[str, ...]
    nodes: int
    forward_s: float
    backward_s: float
    share: float
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    transient_bytes: int | None
    peak_bytes: int | None
    output_bytes: int
    modelled: bool
    estimated: bool


def cost_report(
    traced: TracedGraph,
    profile: Profile,
    *,
    model: str,
    torch: str,
    sizes: Sequence[int],
    hardware: str = "",
) -> CostReport:
    """Return the costs of a profiled recording for a step of microbatches of these sizes."""
    infos = [(node, info) for node, info in traced.compute_nodes()]
    step_s = sum(_step_s(info, profile.nodes[info.name], len(sizes)) for _, info in infos)
    nodes = tuple(_node(node, info, profile, step_s=step_s, microbatches=len(sizes)) for node, info in infos)
    return CostReport(
        model=model,
        device=profile.device,
        hardware=hardware,
        basis="measured" if profile.measured else "modelled",
        torch=torch,
        rows=profile.rows,
        microbatches=len(sizes),
        batch_rows=sum(sizes),
        totals=_totals(nodes, profile, step_s=step_s, microbatches=len(sizes)),
        nodes=nodes,
    )


def node_rows(report: CostReport) -> list[Row]:
    """Return a row for every node."""
    return [_row(node.name, [node]) for node in report.nodes]


def module_rows(report: CostReport, *, depth: int) -> list[Row]:
    """Return a row for every module down to ``depth`` (0: the model), each with what runs in it and below it."""
    groups: dict[str, list[NodeCost]] = {}
    for node in report.nodes:
        path = ".".join(node.module.split(".")[:depth])
        groups.setdefault(path or f"({report.model})", []).append(node)
    return [_row(path, nodes) for path, nodes in groups.items()]


def readable_depth(report: CostReport, *, most: int) -> int:
    """Return the greatest depth at which there are at most ``most`` rows, and at which more is told than above it."""
    counts = [1]
    for depth in range(1, 1 + max(node.module.count(".") + 1 for node in report.nodes)):
        counts.append(len(module_rows(report, depth=depth)))
    fitting = [depth for depth, count in enumerate(counts) if count <= most]
    return next(depth for depth in fitting if counts[depth] == counts[fitting[-1]])


def _row(name: str, nodes: Sequence[NodeCost]) -> Row:
    inside = {node.name for node in nodes}
    saved = {storage: size for node in nodes for storage, size in node.saved.items()}
    transients = [size for n in nodes for size in (n.forward_transient_bytes, n.backward_transient_bytes)]
    peaks = [size for node in nodes for size in (node.forward_peak_bytes, node.backward_peak_bytes)]
    leaving = [node for node in nodes if not inside.issuperset(node.users)]
    return Row(
        name=name,
        classes=tuple(dict.fromkeys(node.node_class for node in nodes)),
        nodes=len(nodes),
        forward_s=sum(node.forward_s for node in nodes),
        backward_s=sum(node.backward_s for node in nodes),
        share=sum(node.share for node in nodes),
        forward_flops=sum(node.forward_flops for node in nodes),
        backward_flops=sum(node.backward_flops for node in nodes),
        saved_bytes=sum(saved.values()),
        transient_bytes=max((size for size in transients if size is not None), default=None),
        peak_bytes=max((size for size in peaks if size is not None), default=None),
        output_bytes=sum(node.output_bytes for node in leaving),
        modelled=any(node.why for node in nodes),
        estimated=any(node.estimated for node in nodes),
    )


def _node(node: fx.Node, info: TracedNode, profile: Profile, *, step_s: float, microbatches: int) -> NodeCost:
    found, sample = profile.nodes[info.name], profile.samples.get(info.name)
    return NodeCost(
        name=info.name,
        module=info.module,
        node_class=info.node_class.value,
        forward_s=found.forward_s,
        backward_s=found.backward_s,
        share=_step_s(info, found, microbatches) / step_s if step_s else 0.0,
        basis="measured" if sample is not None else "modelled",
        why=profile.modelled.get(info.name, ""),
        estimated=profile.estimated.get(info.name, ""),
        forward_range_s=None if sample is None else sample.forward_range_s,
        backward_range_s=None if sample is None else sample.backward_range_s,
        samples=None if sample is None else sample.samples,
        forward_peak_bytes=None if sample is None else sample.forward_peak_bytes,
        backward_peak_bytes=None if sample is None else sample.backward_peak_bytes,
        forward_flops=found.forward_flops,
        backward_flops=found.backward_flops,
        saved=dict(found.saved),
        forward_transient_bytes=found.forward_transient_bytes,
        backward_transient_bytes=found.backward_transient_bytes,
        output_bytes=found.output_bytes,
        users=tuple(dict.fromkeys(_users(node))),
    )


def _users(node: fx.Node) -> Iterable[str]:
    for user in node.users:
        if user.op == "output":
            yield OUTPUT
        elif isinstance(info := user.meta.get(INFO), TracedNode):
            yield info.name
        else:
            yield from _users(user)


def _step_s(info: TracedNode, node: NodeProfile, microbatches: int) -> float:
    return _times(info.node_class.value, microbatches) * (node.forward_s + node.backward_s)


def _times(node_class: str, microbatches: int) -> int:
    return microbatches if node_class == NodeClass.MICRO.value else 1


def _totals(nodes: Sequence[NodeCost], profile: Profile, *, step_s: float, microbatches: int) -> Totals:
    saved: Mapping[int, int] = {storage: size for node in nodes for storage, size in node.saved.items()}
    states = list(profile.state.values())
    return Totals(
        forward_s=sum(node.forward_s for node in nodes),
        backward_s=sum(node.backward_s for node in nodes),
        step_s=step_s,
        forward_flops=sum(node.forward_flops for node in nodes),
        backward_flops=sum(node.backward_flops for node in nodes),
        step_flops=sum(_times(n.node_class, microbatches) * (n.forward_flops + n.backward_flops) for n in nodes),
        saved_bytes=sum(saved.values()),
        parameters=sum(state.elements for state in states if state.is_parameter),
        parameter_bytes=sum(state.bytes for state in states if state.is_parameter),
        buffer_bytes=sum(state.bytes for state in states if not state.is_parameter),
    )


# -- a model that no graph can follow ---------------------------------------------------------------------------------


def tree_report(
    model: nn.Module, costs: ModuleCosts, *, torch: str, rows: int, device: str, hardware: str, reason: str
) -> CostReport:
    """Return what every module took by itself, without the modules inside it; ``reason`` says why there is no graph."""
    kind = type(model).__name__
    names = {path: path or f"({kind})" for path in costs.modules}
    whole_s = costs.of("").forward_s + costs.of("").backward_s
    nodes = tuple(_tree_node(path, costs, names, whole_s=whole_s) for path in _called(costs))
    parameters, buffers = list(model.parameters()), list(model.buffers())
    forward_flops = costs.of("").flops
    return CostReport(
        model=kind,
        device=device,
        hardware=hardware,
        basis="measured" if costs.measured else "modelled",
        torch=torch,
        rows=rows,
        microbatches=1,
        batch_rows=rows,
        totals=Totals(
            forward_s=costs.of("").forward_s,
            backward_s=costs.of("").backward_s,
            step_s=whole_s,
            forward_flops=forward_flops,
            backward_flops=_BACKWARD_FLOPS * forward_flops,
            step_flops=(1 + _BACKWARD_FLOPS) * forward_flops,
            saved_bytes=costs.saved_below(""),
            parameters=sum(parameter.numel() for parameter in parameters),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        ),
        nodes=nodes,
        notes=(f"no graph can follow this model, its own Python ran: {reason}", ROUTED_RUN),
    )


def _called(costs: ModuleCosts) -> list[str]:
    """Return the modules that ran, in the order of their first calls; the model itself comes first."""
    found = [(seen.first, path) for path, seen in costs.modules.items() if seen.first is not None]
    return [path for _, path in sorted(found)]


def _tree_node(path: str, costs: ModuleCosts, names: dict[str, str], *, whole_s: float) -> NodeCost:
    seen, inside = costs.of(path), list(_directly_inside(path, costs))
    forward_s = _own(seen.forward_s, [part.forward_s for part in inside])
    backward_s = _own(seen.backward_s, [part.backward_s for part in inside])
    flops = max(0, seen.flops - sum(part.flops for part in inside))
    return NodeCost(
        name=names[path],
        module=path,
        node_class=WHOLE,
        forward_s=forward_s,
        backward_s=backward_s,
        share=(forward_s + backward_s) / whole_s if whole_s else 0.0,
        basis="measured" if costs.measured else "modelled",
        forward_flops=flops,
        backward_flops=_BACKWARD_FLOPS * flops,
        saved={list(names).index(path): seen.saved_bytes} if seen.saved_bytes else {},
        forward_transient_bytes=None,
        backward_transient_bytes=None,
        output_bytes=seen.output_bytes,
        users=(names[_around(path, costs)] if path else OUTPUT,),
    )


def _own(seconds: float, inside: Sequence[float]) -> float:
    """Return a module's time without that of the modules inside it: no less than the clock can tell."""
    left = seconds - sum(inside)
    return left if left > _CLOCK_S else 0.0


def _directly_inside(path: str, costs: ModuleCosts) -> Iterator[Seen]:
    return (seen for inner, seen in costs.modules.items() if inner and _around(inner, costs) == path)


def _around(path: str, costs: ModuleCosts) -> str:
    """Return the nearest module around a path that was called itself: a list of modules is not."""
    while path:
        path = path.rpartition(".")[0]
        if path in costs.modules:
            return path
    return ""
