"""In which dimension is the batch? Tried out, where the first dimension of every input does not do.

A *reading* gives every input tensor a batch dimension or none. All batch dimensions of a reading have one size. A
reading holds when the model can be recorded under it; the value probe then tells how much of the work has independent
rows. So a reading that holds is never wrong: one that is not what the caller means has less work that runs by rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, zip_longest
from typing import Protocol, TypeVar

import torch
from torch import fx, nn

from autosplit.errors import InputError
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.inputs import batch_rows
from autosplit.trace.kinds import rearranges
from autosplit.trace.recording import FirstCall, Refusal, Unexpected
from autosplit.trace.run import FlatInputs

ENOUGH = 0.5
"""Part of the work that runs by rows in a good reading; below it, others are tried."""
ALIKE = 0.05
"""Readings are equally good when the parts that mix rows are nearer than this."""
_PER_SIZE = 12
_SEVERAL = 6
"""Readings that are tried when the plain one could be recorded, or when the model's own Python was in the way."""
_CONTRACTED = frozenset(
    "linear matmul mm bmm baddbmm einsum scaled_dot_product_attention invoke grouped_mm _grouped_mm".split()
)


@dataclass(frozen=True)
class Shares:
    """Parts of the work, 0 to 1: what runs by rows, and what mixes them; the rest has no rows."""

    by_rows: float
    mixed: float


class Tried(Protocol):
    """What came of a reading: the inputs under it, and the parts of the work."""

    @property
    def flat(self) -> FlatInputs:
        """The inputs with the batch dimensions that were tried."""

    @property
    def shares(self) -> Shares:
        """Which parts of the work run by rows and mix rows."""


Attempt = TypeVar("Attempt", bound=Tried)


def readings(flat: FlatInputs) -> Iterator[FlatInputs]:
    """Yield other readings of the same inputs, the likely ones first.

    Sizes take turns in the order in which the inputs have them; for each, as many inputs with a batch dimension as
    possible come first.
    """
    tensors = [i for i in flat.tensors() if flat.leaves[i].dim()]
    shapes = [tuple(flat.leaves[i].shape) for i in tensors]
    firsts = [shape[dim] for dim in range(max(map(len, shapes), default=0)) for shape in shapes if dim < len(shape)]
    seen = {flat.batch_dims}
    by_size = [islice(_assignments(shapes, size), _PER_SIZE) for size in dict.fromkeys(firsts) if size > 1]
    for dims in (dims for turn in zip_longest(*by_size) for dims in turn if dims is not None):
        by_leaf = dict(zip(tensors, dims, strict=True))
        found = tuple(by_leaf.get(i) for i in range(len(flat.leaves)))
        if found not in seen:
            seen.add(found)
            yield FlatInputs(flat.leaves, flat.spec, flat.names, found)


def _assignments(shapes: Sequence[tuple[int, ...]], size: int) -> Iterator[tuple[int | None, ...]]:
    """Yield the ways to take dimensions of one size as batch, those that use the most inputs and early ones first."""
    options = [[*(dim for dim, length in enumerate(shape) if length == size), None] for shape in shapes]
    found = islice(product(*options), 4096)
    ranked = sorted(found, key=lambda dims: (sum(d is None for d in dims), sum(d or 0 for d in dims)))
    return (dims for dims in ranked if any(dim is not None for dim in dims))


def best(
    flat: FlatInputs,
    attempt: Callable[[FlatInputs, bool], Attempt],
    *,
    told: bool,
    before: Mapping[str, int | None] | None = None,
) -> Attempt:
    """Return what the attempt gives under the reading that holds best.

    Args:
        flat: the inputs in their plain reading.
        attempt: records under a reading, with atoms or without; raises what stands against it.
        told: the reading is the caller's own; no other is tried.
        before: the reading of an earlier call, by input name: it stays while it holds.

    Raises InputError where two readings are equally good, else what ``attempt`` raises under the plain one.
    """
    kept = _like(flat, before or {})
    if kept is not None and not told:
        with contextlib.suppress(Exception):  # whatever it is, the search below finds it again
            return attempt(kept, False)
    plain, first = _plain(flat, attempt, told)
    if plain is not None and (told or plain.shares.by_rows >= ENOUGH):
        return plain
    found: list[Attempt] = []
    limit = 0 if told else _SEVERAL if plain is not None or isinstance(first, Refusal) else None
    for other in islice(readings(flat), limit):
        with contextlib.suppress(Exception):  # any failure only says that this reading is wrong
            found.append(attempt(other, False))
            if plain is not None and found[-1].shares.by_rows >= ENOUGH:
                return found[-1]
    if plain is not None:
        return plain
    good = [other for other in found if other.shares.by_rows >= ENOUGH]
    least = min((other.shares.mixed for other in good), default=0.0)
    alike = [other for other in good if other.shares.mixed <= least + ALIKE]
    if len(alike) > 1:
        listed = "; or ".join(_text(other.flat) for other in alike)
        raise InputError(f"the inputs' batch dimensions are ambiguous: {listed}; say which by batch_dims=") from first
    if alike or len(found) == 1:
        return (alike or found)[0]
    assert first is not None
    if isinstance(first, Unexpected):
        with contextlib.suppress(Exception):  # the first failure says more
            return attempt(flat, True)
    raise first


def _plain(
    flat: FlatInputs, attempt: Callable[[FlatInputs, bool], Attempt], told: bool
) -> tuple[Attempt | None, Exception | None]:
    """Try the plain reading; a refusal of a module's own Python is no sign against it: then with atoms."""
    try:
        batch_rows(flat)
        return attempt(flat, False), None
    except FirstCall:
        raise
    except Exception as error:
        if not (told or isinstance(error, Refusal)):
            return None, error
        first = error
    try:
        return attempt(flat, True), None
    except Exception as second:
        return None, second if isinstance(first, Refusal) and isinstance(second, Refusal) else first


def _like(flat: FlatInputs, before: Mapping[str, int | None]) -> FlatInputs | None:
    """Return the inputs in the reading of an earlier call; None where it does not fit, or is the plain one."""
    known = {n: d for n, d in before.items() if n in flat.names}
    leaves = dict(zip(flat.names, flat.leaves, strict=True))
    if any(
        d is not None and not (isinstance(leaves[n], torch.Tensor) and d < leaves[n].dim()) for n, d in known.items()
    ):
        return None
    sizes = {leaves[name].shape[dim] for name, dim in known.items() if dim is not None}
    dims = tuple(
        known[name] if name in known else dim if dim is not None and leaf.shape[dim] in sizes else None
        for name, leaf, dim in zip(flat.names, flat.leaves, flat.batch_dims, strict=True)
    )
    return replace(flat, batch_dims=dims) if len(sizes) == 1 and dims != flat.batch_dims else None


def _text(flat: FlatInputs) -> str:
    pairs = ((flat.names[i], flat.batch_dims[i]) for i in flat.tensors())
    return f"{', '.join(f'{name}: {dim}' for name, dim in pairs)} ({batch_rows(flat)} rows)"


def shares(graph: TracedGraph, model: nn.Module) -> Shares:
    """Return the parts of the work, for a few rows."""
    work = {NodeClass.FULL: 0.0, NodeClass.MICRO: 0.0, NodeClass.SHARED: 0.0}
    for info, amount in work_of(graph, model, rows=8):
        work[info.node_class] += amount
    total = max(1.0, sum(work.values()))
    return Shares(work[NodeClass.MICRO] / total, work[NodeClass.FULL] / total)


def work_of(graph: TracedGraph, model: nn.Module, *, rows: int) -> Iterator[tuple[TracedNode, float]]:
    """Yield the operations with a rough count of their multiplications, without a profile."""
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
