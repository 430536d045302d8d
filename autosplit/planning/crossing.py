"""What crosses between the stages of a cut, and how long what is shared by all microbatches travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    consumers: dict[str, set[int]] = {}
    for node, feeding in wires.sources.items():
        stage = stage_of[node.meta[INFO].name]
        for source in feeding:
            consumers.setdefault(source.meta[INFO].name, set()).add(stage)
    for node in traced.graph.nodes:
        info = node.meta.get(INFO)
        if info is None:
            continue
        producer = -1 if node.op == "placeholder" else stage_of[info.name]
        others = tuple(sorted(consumers.get(info.name, set()) - {producer}))
        once = info.node_class is not NodeClass.MICRO
        if others and not (producer >= 0 and once and info.node_class is NodeClass.FULL):
            size = costs.input_bytes[info.name] if producer < 0 else costs.nodes[info.name].output_bytes
            yield Boundary(value=info.name, producer=producer, consumers=others, bytes=size, per_step=once)
    for state in costs.state.values():
        stages = sorted({stage_of[name] for name in state.uses})
        if len(stages) > 1:
            yield Boundary(
                value=state.name, producer=stages[0], consumers=tuple(stages[1:]), bytes=state.bytes, per_step=True
            )


def sent_s(boundaries: Sequence[Boundary], costs: Profile, options: Options) -> float:
    """Return how long shared values travel, there and back; copies of parameters are in the partition's step."""
    return 2 * sum(
        link_seconds(options, boundary.bytes) * len(boundary.consumers)
        for boundary in boundaries
        if boundary.per_step and boundary.producer >= 0 and boundary.value not in costs.state
    )
