"""A recording as stages alone, with weights of their own, for minibatches of which each has other versions.

What a step does once for all its microbatches (shared values, tied parameters, what mixes rows) a stream does in the
stage that comes first to it, or last, so that it uses that stage's version of the weights:

    of a step      once: shared values ─► cells of all microbatches ─► once: what mixes rows
    of a stream    stage 0: shared values, tied parameters ─► ... ─► last stage: what mixes rows

Stages read the weights of stand-ins of the model's modules, which share all else with them. A stand-in holds the
version that is computed with; the model's own parameters are the newest, which the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import fx, nn

from autosplit.errors import InputError
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.recorded import Recorded
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lower.layout import homes_of, tensor_operands
from autosplit.runtime.lower.once import emit_setup
from autosplit.runtime.lower.replicas import Replicas, check_cells, replicated, stand_in
from autosplit.runtime.lower.split import Lowered, lower, owners
from autosplit.runtime.ops import OUT, alias, on_lane
from autosplit.trace.graph import INFO, NodeClass, Size, TensorInfo, TracedGraph, TracedNode


class Ways(NamedTuple):
    """For each stage, in order: the stages whose values it takes, and those that take its values."""

    sources: list[list[int]]
    users: list[list[int]]


Places = list[list[tuple[nn.Module, str]]]
"""Where stand-ins of modules hold a parameter: by replica, modules and attributes."""


@dataclass(frozen=True)
class StreamProgram:
    """A recording as a stream runs it.

    Attributes:
        lowered: its stages.
        replicas: what runs the stages' further replicas.
        lanes: those of each stage's replicas.
        setup: makes what comes before a minibatch's first cell: its rows are cut into microbatches.
        alone: whether a minibatch is one microbatch.
        places: by name, the stage of a parameter, and where each replica reads it.
    """

    lowered: Lowered
    replicas: tuple[Replicas, ...]
    lanes: list[list[Lane]]
    setup: Callable[..., Any]
    places: dict[str, tuple[int, Places]]
    alone: bool
    orders: dict[Any, Any] = field(default_factory=dict)
    """What calls keep."""

    @cached_property
    def ways(self) -> Ways:
        """How values go; the last stage also takes what earlier ones give the loss."""
        stages = self.lowered.layout.stages
        sources = [set(stage.received) for stage in stages]
        sources[-1] |= {number for number, stage in enumerate(stages[:-1]) if stage.sent.get(OUT)}
        users = [[t for t, taken in enumerate(sources) if s in taken] for s in range(len(sources))]
        return Ways(list(map(sorted, sources)), users)


def stream_program(
    model: nn.Module,
    recorded: Recorded,
    plan: Plan,
    *,
    alone: bool,
    compiled: Mapping[str, Any] | None,
) -> StreamProgram:
    """Lower a recording for a stream; ``alone``: for minibatches that are one microbatch each.

    Raises InputError where a minibatch of several microbatches needs what only a whole batch gives.
    """
    traced = recorded.traced
    stages = len(recorded.lowered.stages)
    stage_of = assign(DataflowIndex(traced), plan.stage_of(), stages=stages)
    every = [[lane, *(r.lanes[i] for r in recorded.replicas if i in r.lanes)] for i, lane in enumerate(recorded.lanes)]
    counts = [stage.replicas for stage in plan.stages]
    _check_replicas(traced, stage_of, every, counts)
    if not alone:
        _check_parts(traced)
    traced, stage_of = in_stages(traced, stage_of, alone=alone)
    traced = replace(traced, root=stand_in(traced.root, {}))
    lanes = recorded.lanes
    lowered = lower(
        traced,
        stage_of,
        [lane.device for lane in lanes],
        recompute=recorded.lowered.recompute,
        compiled=compiled,
    )
    parts = {f"stage{i}": on_lane(run, lanes[i]) for i, run in enumerate(lowered.runs)}
    check_cells(lowered, counts)
    replicas = replicated(lowered, stage_of, every, compiled=compiled)
    roots = [traced.root, *(r.lowered.traced.root for r in replicas)]
    for twins in zip(*(root.modules() for root in roots), strict=True):
        for twin in twins:
            twin.__dict__["_buffers"] = twins[0]._buffers
    replicas = tuple(replace(r, places=dict.fromkeys(r.lanes, ())) for r in replicas)  # lanes put them there
    setup = partial(emit_setup, lowered, parts)
    return StreamProgram(lowered, replicas, every, setup, _places(model, lowered, roots), alone)


def _check_replicas(
    traced: TracedGraph, stage_of: Mapping[str, int], lanes: Sequence[Sequence[Lane]], counts: Sequence[int]
) -> None:
    """Raise InputError for replicas on several devices, and for what they would change in no order."""
    for stage, stage_lanes in enumerate(lanes):
        if len({lane.device for lane in stage_lanes}) > 1:
            raise InputError(
                f"the replicas of stage {stage} are on several devices, and a stream keeps the versions of a stage's "
                "weights on one; give them one device, or leave replicas out"
            )
    for _, info in traced.compute_nodes():
        if info.writes and info.node_class is not NodeClass.MICRO and counts[stage_of[info.name]] > 1:
            raise InputError(
                f"{info.name} changes {info.writes[0]!r}, which replicas of a stage would do in no order; give stage "
                f"{stage_of[info.name]} one device"
            )


def _check_parts(traced: TracedGraph) -> None:
    for _, info in traced.compute_nodes():
        if info.node_class is NodeClass.SHARED and (info.random or info.writes):
            does = "draws random numbers" if info.random else f"changes {info.writes[0]!r}"
            raise InputError(
                f"{info.name} {does} once for a whole batch, and a stream runs it for each microbatch; give "
                "staleness='stash' or 'vertical', which do not cut minibatches, or chunks=1"
            )


def in_stages(traced: TracedGraph, stage_of: Mapping[str, int], *, alone: bool) -> tuple[TracedGraph, dict[str, int]]:
    """Return the recording with every node in a stage's cells, tied parameters as values that their homes make.

    Nodes that mix rows are such only where a minibatch is one microbatch.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    stages = dict(stage_of)
    tied, homes = dict[str, fx.Node](), homes_of(traced, stage_of)
    for node in traced.graph.nodes:
        if node.op == "get_attr" and node.target in homes:
            copies[node] = tied.setdefault(node.target, _as_value(graph, traced, str(node.target)))
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        info = node.meta.get(INFO)
        if info is not None and node.op != "placeholder" and (alone or info.node_class is NodeClass.SHARED):
            copies[node].meta[INFO] = replace(info, node_class=NodeClass.MICRO)
    for name, node in tied.items():
        stages[node.meta[INFO].name] = homes[name]
    changed = replace(traced, graph=graph, tied=(), homes={})
    for node, info in changed.compute_nodes():
        for operand in tensor_operands(node):
            if INFO in operand.meta and operand.op != "placeholder":
                assert stages[operand.meta[INFO].name] <= stages[info.name], f"{info.name} comes before its operand"
    return changed, stages


def _as_value(graph: fx.Graph, traced: TracedGraph, name: str) -> fx.Node:
    """Add a node that makes a value of a parameter."""
    parameter = traced.root.get_parameter(name)
    node = graph.call_function(alias, (graph.get_attr(name),))
    sizes = tuple(Size(0, size) for size in parameter.shape)
    info = TensorInfo(sizes, parameter.dtype)
    node.meta[INFO] = TracedNode(f"{name}#tied", "", NodeClass.MICRO, (info,), reads=(name,))
    return node


def _places(model: nn.Module, lowered: Lowered, roots: Sequence[nn.Module]) -> dict[str, tuple[int, Places]]:
    """Return the stage of each parameter that stages use, by its first name, and where they read it below ``roots``."""
    root, stage_of = lowered.traced.root, owners(lowered.traced.root, lowered)
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    located: dict[str, tuple[int, Places]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if name in stage_of and id(parameter) in first:
            parent, _, attribute = name.rpartition(".")
            _, places = located.setdefault(first[id(parameter)], (stage_of[name], [[] for _ in roots]))
            for holders, each in zip(places, roots, strict=True):
                holders.append((each.get_submodule(parent), attribute))
    for stage, region in enumerate(lowered.stages):
        for leaf in region.leaves():
            name = first.get(id(leaf), "a buffer or an attribute of a module")
            if name not in located or located[name][0] != stage:
                raise InputError(
                    f"stage {stage} computes gradients of {name}, which is no parameter of that stage alone, so that "
                    "it has no version per minibatch; register it as a parameter, or call requires_grad_(False)"
                )
    return located
