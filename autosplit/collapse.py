"""Warnings of kinds of call that hardly are a pipeline, with the cause and the way out."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn

from autosplit.errors import listed
from autosplit.options import Options
from autosplit.planning.request import sizes_of
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.rows.kinds import batch_norms, called, function_of, rearranges

MOST_OUTSIDE = 0.3
"""The part of the work that may run once per step before that is a collapse."""
OWN_PYTHON = "its own Python runs, module by module, since {}"
_NAMED = 3
_WAY_OUT = "compute row by row, or in the loss_fn of train_step, what need not see all rows"
_WAYS_OUT = {
    r"\(\w*dynamic": "a dynamically quantised layer scales its input by the range of all rows: quantise weights alone, "
    "or each row by itself, as torchao's Int8WeightOnlyConfig and Int8DynamicActivationInt8WeightConfig do",
    r"\(\w*(batch_norm|BatchNorm)": "batch norm takes statistics over all rows: batch_norm='micro' takes them over "
    "each microbatch, of norms whose running statistics are buffers (track_running_stats=True)",
}
"""What helps, by a pattern in what is said of the first operations that see the whole batch."""
_CONTRACTED = frozenset(
    "linear matmul mm bmm baddbmm einsum scaled_dot_product_attention invoke grouped_mm _grouped_mm".split()
)


class Collapses:
    """Warns once per kind of call, and keeps what it said for the report."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options = model, options
        self._seen: dict[Any, str | None] = {}
        self._told_of_norms = options.batch_norm is not None

    @property
    def _overlaps(self) -> bool:
        return len(self.options.devices) > 1 and self.options.chunks > 1

    def found(self) -> list[str]:
        """Return what was warned of, each once."""
        return list(dict.fromkeys(filter(None, self._seen.values())))

    def check(self, kind: Any, graph: TracedGraph, rows: int) -> None:
        """Warn where a recording is no pipeline: one microbatch, or much of the work outside of the microbatches."""
        if not self._overlaps:
            return
        sizes = sizes_of(rows, self.options.chunks, graph.min_rows, like=self.options.microbatches)
        told = self.options.batch_dims is not None
        what = _one_microbatch(graph, rows) if len(sizes) == 1 else _outside(graph, self.model, rows, told=told)
        self.note(kind, what)

    def check_norms(self, graph: TracedGraph, sizes: Sequence[int]) -> None:
        """Warn once, before a call runs, where batch norms take their statistics over microbatches unasked."""
        if self._told_of_norms or len(sizes) == 1 or not (norms := batch_norms(graph, NodeClass.MICRO)):
            return
        self._told_of_norms = True
        layers = list(dict.fromkeys(node.meta[INFO].module for node in norms))
        behind = set(norms)
        behind.update(n for n in graph.graph.nodes if not behind.isdisjoint(n.all_input_nodes))
        work = dict(_rough_work(graph, self.model, rows=sum(sizes)))
        share = sum(work.get(node, 0.0) for node in behind) / sum(work.values())
        warnings.warn(
            f"{len(layers)} batch norm layer{'s' * (len(layers) > 1)} of {type(self.model).__name__} "
            f"({listed(layers, most=_NAMED)}) normalise each microbatch ({max(sizes)} of {sum(sizes)} rows) by itself: "
            "outputs, loss and gradients are not the plain model's. batch_norm='full' gives the plain model's, and "
            f"runs {share:.0%} of the work on the whole batch, where nothing overlaps; batch_norm='micro' is what runs "
            "now, without this warning",
            UserWarning,
            stacklevel=2,
        )

    def note(self, kind: Any, what: str | None) -> None:
        """Keep what was found at the first call of a kind, and warn of it where stages could overlap."""
        if kind in self._seen:
            return
        said = what and f"The pipeline of {type(self.model).__name__} has collapsed: {what}"
        self._seen[kind] = said
        if said is not None and self._overlaps:
            warnings.warn(said, UserWarning, stacklevel=2)

    def of_group(self, reason: str) -> None:
        """Keep why rows of a generation were not in groups, for the report."""
        self._seen["group", reason] = f"all rows of a generation were one group, with one lane at work: {reason}"


def _one_microbatch(graph: TracedGraph, rows: int) -> str:
    least = f"; this model needs {graph.min_rows} rows in each" if graph.min_rows > 1 else ""
    return (
        f"the batch of {rows} row{'s' * (rows > 1)} is one microbatch, and stages run one after the other{least}: "
        "give a larger batch"
    )


def _outside(graph: TracedGraph, model: nn.Module, rows: int, *, told: bool) -> str | None:
    """Return how much of the work runs once per step, where, why, and what to do; None where that is little."""
    work = [(node.meta[INFO], amount) for node, amount in _rough_work(graph, model, rows=rows) if amount]
    total = sum(amount for _, amount in work)
    parts = dict.fromkeys(NodeClass, 0.0)
    modules: Counter[str] = Counter()
    for info, amount in work:
        parts[info.node_class] += amount / total
        if info.node_class is not NodeClass.MICRO:
            modules[".".join(info.module.split(".")[:2]) or "the root"] += amount / total  # type: ignore[assignment]
    full, shared = parts[NodeClass.FULL], parts[NodeClass.SHARED]
    if full + shared <= MOST_OUTSIDE:
        return None
    named = ", ".join(f"{module} {share:.0%}" for module, share in modules.most_common(_NAMED))
    said = []
    causes = _causes(graph)
    if full:
        said.append(f"{full:.0%} of the work runs once per step, on the whole batch, from {causes} on")
    if shared:
        said.append(f"{shared:.0%} of the work runs once per step: it depends on no row")
    if full:
        way_out = next((text for pattern, text in _WAYS_OUT.items() if re.search(pattern, causes)), _WAY_OUT)
        if not told and way_out is _WAY_OUT:
            way_out += f"; where the first dimension, of size {rows}, is not the batch, say by batch_dims= which is"
    else:
        way_out = "give a larger batch, or say by batch_dims= where it is"
    return f"{'; '.join(said)}. By module: {named}. What helps: {way_out}"


def _causes(graph: TracedGraph) -> str:
    """Name the first operations that see the whole batch."""
    full = {node: info for node, info in graph.compute_nodes() if info.node_class is NodeClass.FULL}
    first = {node: info for node, info in full.items() if full.keys().isdisjoint(node.all_input_nodes)}
    return listed(_place(node, info, graph.root) for node, info in first.items())


def _place(node: fx.Node, info: TracedNode, root: nn.Module) -> str:
    target = called(node, root)[0] or type(function_of(node, root)).__name__
    return f"{info.module or 'the root'} ({', '.join(filter(None, (target, info.source, info.whole)))})"


def _rough_work(graph: TracedGraph, model: nn.Module, *, rows: int) -> Iterator[tuple[fx.Node, float]]:
    """Yield the operations with a rough count of their multiplications at a number of rows."""
    weights = {name: p.numel() / max(1, p.shape[0]) for name, p in model.named_parameters() if p.dim() > 1}
    for node, info in graph.compute_nodes():
        if info.tensors and not rearranges(node, graph.root):
            elements = max(math.prod(tensor.shape_at(rows)) for tensor in info.tensors)
            yield node, elements * _products(node, info, weights)


def _products(node: fx.Node, info: TracedNode, weights: Mapping[str, float]) -> float:
    """Return how many multiplications go into one value of a layer, or of a product of two tensors."""
    name = getattr(node.target, "__name__", str(node.target)).strip("_")
    if node.op == "call_module" or name.startswith("conv"):
        return max(1.0, sum(weights.get(read, 0.0) for read in info.reads))
    operands = [n.meta[INFO].tensors for n in node.all_input_nodes if INFO in n.meta]
    if name in _CONTRACTED and operands and operands[0] and operands[0][0].shape:
        return float(operands[0][0].shape[-1].at(8))
    return 1.0
