"""A rough count of the work of a recording's operations, made without a profile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import fx, nn

from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.rows.kinds import rearranges

_CONTRACTED = frozenset(
    "linear matmul mm bmm baddbmm einsum scaled_dot_product_attention invoke grouped_mm _grouped_mm".split()
)


def rough_work(graph: TracedGraph, model: nn.Module, *, rows: int) -> Iterator[tuple[TracedNode, float]]:
    """Yield the operations with a rough count of their multiplications at a number of rows."""
    weights = {name: p.numel() / max(1, p.shape[0]) for name, p in model.named_parameters() if p.dim() > 1}
    for node, info in graph.compute_nodes():
        if info.tensors and not rearranges(node, graph.root):
            made = max(math.prod(tensor.shape_at(rows)) for tensor in info.tensors)
            yield info, made * _products(node, info, weights)


def _products(node: fx.Node, info: TracedNode, weights: Mapping[str, float]) -> float:
    """Return how many multiplications go into one value of a layer, or of a product of two tensors."""
    name = getattr(node.target, "__name__", str(node.target)).strip("_")
    if node.op == "call_module" or name.startswith("conv"):
        return max(1.0, sum(weights.get(read, 0.0) for read in info.reads))
    operands = [n.meta[INFO].tensors for n in node.all_input_nodes if INFO in n.meta]
    if name in _CONTRACTED and operands and operands[0] and operands[0][0].shape:
        return float(operands[0][0].shape[-1].at(8))
    return 1.0
