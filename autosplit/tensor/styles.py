"""A plan as styles of ``torch.distributed.tensor.parallel.parallelize_module``, by module names."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from autosplit.tensor.axes import Shard as Part
from autosplit.tensor.collectives import Placement
from autosplit.tensor.plan import NodePlan, TensorPlan
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED
from autosplit.trace.graph import TracedGraph


@dataclass(frozen=True)
class Styles:
    """The styles of modules by their names, and why other modules with sharded parameters have none."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def styles_of(traced: TracedGraph, plan: TensorPlan) -> Styles:
    """Return the styles of a plan's linear layers and embeddings.

    Between them values are local tensors, as the styles' default is. What a style cannot say is left out, with the
    reason: parameters that operations take by themselves, and fused ones whose parts are cut each for itself.
    """
    found = Styles()
    graph = {node.name: node for node in traced.graph.nodes}
    after = _takers(plan)
    for name, node_plan in plan.nodes.items():
        node = graph[name]
        for key, (placement, *_) in node_plan.wants.items():
            if not (key.startswith(".") and isinstance(placement, Part) and key.endswith(".weight")):
                continue
            path = key[1:].removesuffix(".weight")
            module = traced.root.get_submodule(path)
            if node.op != "call_module":
                found.left_out[path] = "an operation takes its weight by itself"
            elif not isinstance(module, (nn.Linear, nn.Embedding)):
                found.left_out[path] = f"{type(module).__name__} is neither a linear layer nor an embedding"
            elif not placement.plain:
                found.left_out[path] = f"{placement}: the parts of a fused weight are cut each for itself"
            else:
                found.styles[path] = _style(module, placement, node_plan, after.get(name, ()))
    return found


def _takers(plan: TensorPlan) -> dict[str, tuple[Placement, ...]]:
    """Map nodes to the placements in which their results are taken."""
    found: dict[str, tuple[Placement, ...]] = {}
    for other in plan.nodes.values():
        for key, (want, *_) in other.wants.items():
            found[key] = (*found.get(key, ()), want)
    return found


def _style(module: nn.Module, weight: Part, plan: NodePlan, taken: tuple[Placement, ...]) -> ParallelStyle:
    """Return a layer's style: by columns where its results are in parts, by rows where they are summands."""
    by_table = isinstance(module, nn.Embedding)
    (given, *_) = plan.gives
    if given is PARTIAL:
        source = next((p for key, (p, *_) in plan.wants.items() if not key.startswith(".")), REPLICATED)
        layout = Replicate() if source in (REPLICATED, COPIED) else Shard(-1)
        return RowwiseParallel(input_layouts=layout)
    gathered = not taken or any(want in (REPLICATED, COPIED) for want in taken)
    layout = Replicate() if gathered else Shard(-1)
    return ColwiseParallel(output_layouts=layout) if by_table or weight.dim == 0 else ColwiseParallel()
