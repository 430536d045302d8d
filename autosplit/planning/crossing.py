"""What crosses between the stages of a cut, and how long what is shared by all microbatches travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from autosplit.options import Options
from autosplit.planning.apply import Wires
from autosplit.planning.formulate import link_seconds
from autosplit.planning.records import Boundary
from autosplit.profile.types import Profile
from autosplit.trace.graph import INFO, NodeClass, TracedGraph


def boundaries_of(
    traced: TracedGraph, costs: Profile, stage_of: Mapping[str, int], *, wires: Wires | None = None
) -> Iterator[Boundary]:
    """Yield the values that cross a cut, in model order: of inputs, of operations, then parameters with copies."""
    wires = wires or Wires(traced)
    values = (node for node in traced.graph.nodes if INFO in node.meta)
    yield from _crossing(values, costs, stage_of, wires)
    for state in costs.state.values():
        stages = sorted({stage_of[name] for name in state.uses})
        if len(stages) > 1:
            yield Boundary(
                value=state.name, producer=stages[0], consumers=tuple(stages[1:]), bytes=state.bytes, per_step=True
            )


def _crossing(
    values: Iterable[fx.Node], costs: Profile, stage_of: Mapping[str, int], wires: Wires
) -> Iterator[Boundary]:
    for node in values:
        info = node.meta[INFO]
        producer = -1 if node.op == "placeholder" else stage_of[info.name]
        stages = {stage_of[user.meta[INFO].name] for user in wires.consumers.get(node, ())}
        others = tuple(sorted(stages - {producer}))
        once = info.node_class is not NodeClass.MICRO
        if others and not (producer >= 0 and once and info.node_class is NodeClass.FULL):
            size = costs.input_bytes[info.name] if producer < 0 else costs.nodes[info.name].output_bytes
            yield Boundary(value=info.name, producer=producer, consumers=others, bytes=size, per_step=once)


def cut_sent_s(wires: Wires, costs: Profile, stage_of: Mapping[str, int], options: Options) -> float:
    """Return what `sent_s` does of a cut's boundaries, from those alone that are sent once per step."""
    values = (node for node, info in wires.traced.compute_nodes() if info.node_class is NodeClass.SHARED)
    return sent_s(tuple(_crossing(values, costs, stage_of, wires)), costs, options)


def sent_s(boundaries: Sequence[Boundary], costs: Profile, options: Options) -> float:
    """Return how long shared values travel, there and back; copies of parameters are in the partition's step."""
    return 2 * sum(
        link_seconds(options, boundary.bytes) * len(boundary.consumers)
        for boundary in boundaries
        if boundary.per_step and boundary.producer >= 0 and boundary.value not in costs.state
    )
