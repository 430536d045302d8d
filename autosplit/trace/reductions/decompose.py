"""Reductions over the batch, rewritten as a row-wise part and a light one.

    logits ─► cross_entropy ─►         logits ─► cross_entropy(reduction="none") ─► weigh_rows ─► ratio ─►
              mean: mixes rows                   name.each                          name.rows     name
                                                 row by row, per microbatch                       once, on [rows, 2]

What a reduction takes need then not be merged: a model's own loss ends the pipeline behind its last layer, not before.
The graph computes the same values on any batch, up to the order of additions; whether rows are independent in the new
nodes is asked by the value probe as of any other node. Taken apart are sums, means and torch's losses. Every other
reduction runs on merged values, and so does one that leaves every row as large as it is, or whose operand is changed in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autosplit.trace.graph import INFO, Size, TensorInfo, TracedNode
from autosplit.trace.recording.build import RawGraph
from autosplit.trace.recording.recording import under
from autosplit.trace.reductions.losses import LossCall, class_weights
from autosplit.trace.rows.kinds import arguments, function_of

_ROW, _ONE = Size(1, 0), Size(0, 1)
_ROWS, _EACH = ".rows", ".each"
_SIGNATURE = ("input", "dim", "keepdim", "dtype")
_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input"}
_KINDS = {torch.sum: "sum", torch.Tensor.sum: "sum", torch.mean: "mean", torch.Tensor.mean: "mean"}


# -- the two halves: what every row gives, and what makes the whole value of that; importable by name ----------------
# value [rows * k, ...] ─► sum_rows(value) [rows, 1, ...] ─► total(...)          rows: per microbatch; total: once
#
# In ``dims`` the batch dimension is one of the reduced ones. A row's part keeps them all with size 1, the batch
# dimension with one entry per row, so that the same ``dims`` reduce it further.
def sum_rows(value: torch.Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Sum over all of ``dims`` but the rows."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.sum(inner, keepdim=True, dtype=dtype).squeeze(batch_dim + 1)


def mean_rows(
    value: torch.Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Average over all of ``dims`` but the rows; all rows have equally many values."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.mean(inner, keepdim=True, dtype=dtype).squeeze(batch_dim + 1)


def batch_mean_rows(
    value: torch.Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Sum over all of ``dims`` but the first; average over the entries of that one that belong to one row."""
    return sum_rows(value, rows, batch_dim, dims, dtype) / (value.shape[0] // rows)


def weigh_rows(
    each: torch.Tensor,
    target: torch.Tensor,
    rows: int,
    batch_dim: int,
    ignore_index: int,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[rows, 2]``: the sum of each row's losses, and what torch's mean divides by.

    That is the number of targets that are not ignored, or the sum of their class weights.
    """
    counts = class_weights(target, ignore_index, weight)
    dims = tuple(range(each.dim()))
    sums = [sum_rows(value, rows, batch_dim, dims, dtype).reshape(rows) for value in (each, counts)]
    return torch.stack(sums, -1)


def total(parts: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """Add up what the rows gave."""
    return parts.sum(dims, keepdim=keepdim).to(dtype)


def average(parts: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """Average the rows' averages: all rows have equally many values."""
    return parts.mean(dims, keepdim=keepdim).to(dtype)


def ratio(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide the sum of the first column by the sum of the second."""
    return (parts[:, 0].sum() / parts[:, 1].sum(dtype=torch.float64)).to(dtype)


def _by_row(value: torch.Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
    """Split the batch dimension into rows and what belongs to one row; return also what to reduce then."""
    parts = value.unflatten(batch_dim, (rows, value.shape[batch_dim] // rows))
    return parts, [dim + (dim > batch_dim) for dim in dims if dim != batch_dim] + [batch_dim + 1]


_HALVES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (sum_rows, total),
    "mean": (mean_rows, average),
    "batchmean": (batch_mean_rows, average),
}


# -- the rewriting -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Reduction:
    """What a call reduces: its operand, the dimensions (None: all), and whether they stay."""

    kind: str
    value: Any
    dims: Any
    keepdim: bool
    dtype: torch.dtype | None


def decompose(raw: RawGraph, *, device: torch.device | None = None) -> None:
    """Rewrite the reductions over the batch of a graph whose in-place changes are marked, and sources of fixed size.

    ``device``: the one that it was recorded on, where the model's tensors may lie elsewhere by now; None: theirs.

    The light part is the node itself: it keeps its name. New are ``<name>.rows`` and, for losses, ``<name>.each``.
    """
    free_sources(raw, {parameter.device for parameter in raw.root.parameters()} if device is None else {device})
    written = {name for n in raw.graph.nodes if INFO in n.meta for name in n.meta[INFO].writes}
    for node in list(raw.graph.nodes):
        info = node.meta.get(INFO)
        if info is None or node.op not in ("call_function", "call_method") or len(info.tensors) != 1:
            continue
        touched = any(INFO in n.meta and n.meta[INFO].mutated for n in node.all_input_nodes)
        if not (touched or info.random or info.writes or written.intersection(info.reads)):
            _Rewriter(raw, node).rewrite()


def is_decomposed(graph: fx.Graph) -> bool:
    """Tell whether reductions of a graph were taken apart."""
    return any(INFO in node.meta and node.meta[INFO].name.endswith(_ROWS) for node in graph.nodes)


class _Rewriter:
    def __init__(self, raw: RawGraph, node: fx.Node) -> None:
        self.graph, self.root, self.node = raw.graph, raw.root, node
        self.info: TracedNode = node.meta[INFO]
        self.function = function_of(node, raw.root)
        self.ambient = node.args[0] if node.target is under else None
        self.args = arguments(node)
        self.rows = next(n for n in raw.graph.nodes if n.op == "placeholder" and INFO not in n.meta)

    def rewrite(self) -> None:
        if any(t.varying_dims for t in self.info.tensors):
            return
        loss = LossCall.of(self.function, self.args, self.node.kwargs)
        if loss is not None:
            self._loss(loss)
            return
        reduction = _parsed(self.function, self.args, self.node.kwargs)
        if reduction is not None and isinstance(reduction.value, fx.Node) and INFO in reduction.value.meta:
            self._reduction(reduction, reduction.value)

    def _loss(self, loss: LossCall) -> None:
        probabilities = loss.by_class and _is_differentiable(loss.named["target"])
        sizes = loss.shape(_sizes_of, probabilities=probabilities) if loss.in_parts else None
        if sizes is None:
            return
        value = TensorInfo(sizes, self.info.tensors[0].dtype)
        batch_dim, dims, wide = value.batch_dim, tuple(range(len(value.shape))), _wide(value.dtype)
        first = batch_dim == 0 and value.shape[:1] == (_sizes_of(loss.first) or ())[:1]
        if batch_dim is None or (loss.reduction == "batchmean" and not first):
            return
        if loss.by_class and not probabilities and loss.reduction == "mean":
            each = self._before(_EACH, loss.function, (), loss.unreduced(), value)
            args = (each, loss.named["target"], self.rows, batch_dim, loss.named["ignore_index"], wide)
            info = TensorInfo((_ROW, Size(0, 2)), wide)
            rows = self._before(_ROWS, weigh_rows, (*args, self._again(loss.weight)), {}, info)
            self._become(ratio, (rows, value.dtype))
        elif value.shape == (_ROW,):
            rows = self._before(_ROWS, loss.function, (), loss.unreduced(), value)
            self._become(_HALVES[loss.reduction][1], (rows, dims, False, value.dtype))
        else:
            each = self._before(_EACH, loss.function, (), loss.unreduced(), value)
            self._split(each, value, _Reduction(loss.reduction, each, dims, keepdim=False, dtype=None), value.dtype)

    def _reduction(self, reduction: _Reduction, source: fx.Node) -> None:
        value, dtype = source.meta[INFO].tensors[0], self.info.tensors[0].dtype
        dims = _dims(reduction.dims, len(value.shape))
        if value.dtype.is_complex or torch.promote_types(value.dtype, dtype) != dtype:
            return  # the halves would not be exact
        if dims is None or value.batch_dim not in dims:
            return
        if dims != (value.batch_dim,) or value.shape[value.batch_dim] != _ROW:
            self._split(source, value, replace(reduction, dims=dims), dtype)
        elif value.shape == (_ROW,) and reduction.dtype is None:
            self._become(_HALVES[reduction.kind][1], (source, dims, reduction.keepdim, dtype))

    def _split(self, source: fx.Node, value: TensorInfo, reduction: _Reduction, dtype: torch.dtype) -> None:
        """Reduce ``source`` by rows, then the rows."""
        by_row, whole = _HALVES[reduction.kind]
        batch_dim, wide = value.batch_dim, _wide(dtype)
        sizes = enumerate(value.shape)
        shape = tuple(_ROW if d == batch_dim else _ONE if d in reduction.dims else size for d, size in sizes)
        args = (source, self.rows, batch_dim, reduction.dims, wide)
        rows = self._before(_ROWS, by_row, args, {}, TensorInfo(shape, wide))
        self._become(whole, (rows, reduction.dims, reduction.keepdim, dtype))

    # -- the graph ---------------------------------------------------------------------------------------------
    def _before(
        self, suffix: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], info: TensorInfo
    ) -> fx.Node:
        """Put a node before the reduction, in the ambient state of the reduction."""
        target, full = self._called(function, args)
        with self.graph.inserting_before(self.node):
            new = self.graph.create_node(
                "call_function", target, full, dict(kwargs), name=f"{self.node.name}_{suffix[1:]}"
            )
        new.meta.update(self.node.meta)
        reads = tuple(str(n.target) for n in new.all_input_nodes if n.op == "get_attr" and n.target in self.info.reads)
        new.meta[INFO] = replace(self.info, name=self.info.name + suffix, tensors=(info,), reads=reads, mutated=False)
        return new

    def _become(self, function: Any, args: tuple[Any, ...]) -> None:
        """Make the node the light half of itself."""
        old = list(self.node.all_input_nodes)
        target, full = self._called(function, args)
        self.node.op, self.node.target = "call_function", target
        self.node.args, self.node.kwargs = full, {}
        self.node.meta[INFO] = replace(self.info, reads=())
        for operand in old:
            if operand.op == "get_attr" and not operand.users:
                self.graph.erase_node(operand)

    def _called(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if self.ambient is None:
            return function, args
        held = f"_object_{function.__name__}"
        self.root.__dict__[held] = function
        with self.graph.inserting_before(self.node):
            return under, (self._again(self.ambient), self.graph.get_attr(held), *args)

    def _again(self, attribute: Any) -> Any:
        """Return a parameter, buffer or constant as a node of its own: every use is one."""
        if not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
            return attribute
        with self.graph.inserting_before(self.node):
            return self.graph.get_attr(str(attribute.target))


def _parsed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Reduction | None:
    """Return what a sum or a mean reduces; None for another function or an unusual way to call it."""
    kind = next((kind for known, kind in _KINDS.items() if known is function), None)
    named = dict(zip(_SIGNATURE, args, strict=False)) | {_SPELLINGS.get(k, k): v for k, v in kwargs.items()}
    if kind is None or len(args) > len(_SIGNATURE) or not named.keys() <= {*_SIGNATURE, "out"}:
        return None
    if "input" not in named or named.get("out") is not None:
        return None
    return _Reduction(kind, named["input"], named.get("dim"), bool(named.get("keepdim")), named.get("dtype"))


def _dims(dims: Any, count: int) -> tuple[int, ...] | None:
    """Return the reduced dimensions, all for None; None for what is not known before the model runs."""
    reduced = range(count) if dims is None or dims in ((), []) else (dims,) if isinstance(dims, int) else dims
    if not all(isinstance(dim, int) for dim in reduced):
        return None
    return tuple(sorted(dim % count for dim in reduced))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which torch adds up values of a type."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sizes_of(value: Any) -> tuple[Size, ...] | None:
    """Return the sizes of an operand that the recording knows; None for a constant or a number."""
    return value.meta[INFO].tensors[0].shape if isinstance(value, fx.Node) and INFO in value.meta else None


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, fx.Node) and INFO in value.meta and value.meta[INFO].tensors[0].differentiable


# -- sources of a fixed size -------------------------------------------------------------------------------------------
_TYPED = {
    torch.Tensor.new_zeros: 0,
    torch.Tensor.new_ones: 0,
    torch.Tensor.new_empty: 0,
    torch.Tensor.new_full: 0,
    torch.Tensor.type_as: 1,
}
"""Where a method has the operand that gives no more than its type."""


def free_sources(raw: RawGraph, devices: set[torch.device]) -> None:
    """Give sources of a fixed size, and casts, a constant to take their type from; on one device they lie there.

    With ``x.new_zeros((h, w))`` and ``table.type_as(x)`` a mask or a table over positions would seem to depend on the
    batch, and with it all that it is added to.
    """
    for node in list(raw.graph.nodes) if len(devices) == 1 else ():
        info = node.meta.get(INFO)
        position = _TYPED.get(function_of(node, raw.root)) if info is not None and node.op != "placeholder" else None
        if position is None or (position == 0 and info.tensors[0].varying_dims):
            continue
        position += 2 if node.target is under else 0
        typed = node.args[position]
        if isinstance(typed, fx.Node) and INFO in typed.meta:
            dtype = typed.meta[INFO].tensors[0].dtype
            name = f"_constant_{str(dtype).removeprefix('torch.')}"
            raw.root.__dict__[name] = torch.zeros((), dtype=dtype, device=next(iter(devices)))
            with raw.graph.inserting_before(node):
                node.update_arg(position, raw.graph.get_attr(name))
