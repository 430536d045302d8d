"""Reductions over the batch, rewritten as a row-wise part and a light one.

    logits ─► cross_entropy ─►         logits ─► cross_entropy(reduction="none") ─► weigh_rows ─► ratio ─►
              mean: mixes rows                   name.each                          name.rows     name
                                                 row by row, per microbatch                       once, on [rows, 2]

What a reduction takes need then not be merged: a model's own loss ends the pipeline behind its last layer, not before.
The graph computes the same values on any batch, up to the order of additions; whether rows are independent in the new
nodes is asked by the value probe as of any other node. Left alone are maxima (ties share a gradient among all of
them), reductions that leave every row as large as it is, and whatever is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autosplit.trace import reductions
from autosplit.trace.build import RawGraph
from autosplit.trace.calls import under
from autosplit.trace.graph import INFO, Size, TensorInfo, TracedNode
from autosplit.trace.kinds import function_of
from autosplit.trace.losses import Unreduced, unreduced
from autosplit.trace.sources import free_sources

_ROW, _ONE = Size(1, 0), Size(0, 1)
_ROWS, _EACH = ".rows", ".each"
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "sum": ("input", "dim", "keepdim", "dtype"),
    "mean": ("input", "dim", "keepdim", "dtype"),
    "any": ("input", "dim", "keepdim"),
    "all": ("input", "dim", "keepdim"),
    "count_nonzero": ("input", "dim"),
    "norm": ("input", "p", "dim", "keepdim", "out", "dtype"),
    "vector_norm": ("input", "ord", "dim", "keepdim", "dtype"),
    "var": ("input", "dim", "unbiased", "keepdim", "correction"),
    "std": ("input", "dim", "unbiased", "keepdim", "correction"),
}
_FUNCTIONS = tuple(
    (getattr(scope, name), name)
    for name in _SIGNATURES
    for scope in (torch, torch.Tensor, torch.linalg)
    if hasattr(scope, name) and (scope is not torch.linalg or name == "vector_norm")
)
_WITH_DTYPE = ("sum", "mean", "norm", "vector_norm")
_ADDED = {
    "sum": (reductions.sum_rows, reductions.total),
    "mean": (reductions.mean_rows, reductions.average),
    "batchmean": (reductions.batch_mean_rows, reductions.average),
}
_LOGICAL = {
    "any": (reductions.any_rows, reductions.any_of),
    "all": (reductions.all_rows, reductions.all_of),
}


@dataclass(frozen=True)
class _Halves:
    """Two functions, and their arguments behind (value, rows, batch_dim, dims) and (parts, dims, keepdim)."""

    rows: Callable[..., torch.Tensor]
    whole: Callable[..., torch.Tensor]
    rows_args: tuple[Any, ...]
    whole_args: tuple[Any, ...]
    dtype: torch.dtype
    columns: tuple[Size, ...] = ()


@dataclass(frozen=True)
class _Reduction:
    """What a call reduces: its operand, the dimensions (None: all), whether they stay, and the other options."""

    kind: str
    value: Any
    dims: Any
    keepdim: bool
    options: Mapping[str, Any]


def decompose(raw: RawGraph) -> None:
    """Rewrite the reductions over the batch of a graph whose in-place changes are marked, and sources of fixed size.

    The light part is the node itself: it keeps its name. New are ``<name>.rows`` and, for losses, ``<name>.each``.
    """
    free_sources(raw)
    written = {name for n in raw.graph.nodes if INFO in n.meta for name in n.meta[INFO].writes}
    for node in list(raw.graph.nodes):
        info = node.meta.get(INFO)
        if info is None or node.op not in ("call_function", "call_method") or len(info.tensors) != 1:
            continue
        touched = any(INFO in n.meta and n.meta[INFO].mutated for n in node.all_input_nodes)
        if not (touched or info.random or info.writes or written.intersection(info.reads)):
            _Rewriter(raw, node).rewrite()


def reduced(node: fx.Node, root: torch.nn.Module) -> tuple[str, Any] | None:
    """Return (kind, operand) of a call of a known reduction without a dtype of its own; None for any other node."""
    args = node.args[2:] if node.target is under else node.args
    found = _parsed(function_of(node, root), args, node.kwargs)
    return None if found is None or found.options.get("dtype") is not None else (found.kind, found.value)


def is_decomposed(graph: fx.Graph) -> bool:
    """Tell whether reductions of a graph were taken apart."""
    return any(INFO in node.meta and node.meta[INFO].name.endswith(_ROWS) for node in graph.nodes)


class _Rewriter:
    def __init__(self, raw: RawGraph, node: fx.Node) -> None:
        self.graph, self.root, self.node = raw.graph, raw.root, node
        self.info: TracedNode = node.meta[INFO]
        self.function = function_of(node, raw.root)
        self.ambient = node.args[0] if node.target is under else None
        self.args = node.args[2:] if node.target is under else node.args
        self.rows = next(n for n in raw.graph.nodes if n.op == "placeholder" and INFO not in n.meta)

    def rewrite(self) -> None:
        if any(t.varying_dims for t in self.info.tensors):
            return
        loss = unreduced(self.function, self.args, self.node.kwargs)
        if loss is not None:
            self._loss(loss)
            return
        found = _parsed(self.function, self.args, self.node.kwargs)
        if found is not None and isinstance(found.value, fx.Node) and INFO in found.value.meta:
            self._reduction(found, found.value)

    def _loss(self, loss: Unreduced) -> None:
        value = TensorInfo(loss.sizes, self.info.tensors[0].dtype)
        batch_dim, dims, wide = value.batch_dim, tuple(range(len(value.shape))), _wide(value.dtype)
        if batch_dim is None or (loss.reduction == "batchmean" and batch_dim != 0):
            return
        if loss.counted and loss.reduction == "mean":
            each = self._before(_EACH, loss.function, (), loss.arguments, value)
            given = loss.arguments
            args = (each, given["target"], self.rows, batch_dim, given["ignore_index"], wide)
            made = TensorInfo((_ROW, Size(0, 2)), wide)
            rows = self._before(_ROWS, reductions.weigh_rows, (*args, self._again(given["weight"])), {}, made)
            self._become(reductions.ratio, (rows, value.dtype))
            return
        halves = _Halves(*_ADDED[loss.reduction], (wide,), (value.dtype,), wide)
        if value.shape == (_ROW,):
            rows = self._before(_ROWS, loss.function, (), loss.arguments, value)
            self._become(halves.whole, (rows, dims, False, value.dtype))
        else:
            self._split(self._before(_EACH, loss.function, (), loss.arguments, value), value, dims, False, halves)

    def _reduction(self, found: _Reduction, source: fx.Node) -> None:
        value = source.meta[INFO].tensors[0]
        dims = _dims(found.dims, len(value.shape))
        halves = _halves(found, value.dtype, self.info.tensors[0].dtype)
        if halves is None or dims is None or value.batch_dim not in dims:
            return
        if dims != (value.batch_dim,) or value.shape[value.batch_dim] != _ROW:
            self._split(source, value, dims, found.keepdim, halves)

    def _split(self, source: fx.Node, value: TensorInfo, dims: tuple[int, ...], keepdim: bool, halves: _Halves) -> None:
        """Reduce ``source`` by rows, then the rows."""
        batch_dim = value.batch_dim
        shape = tuple(_ROW if d == batch_dim else _ONE if d in dims else size for d, size in enumerate(value.shape))
        made = TensorInfo((*shape, *halves.columns), halves.dtype)
        args = (source, self.rows, batch_dim, dims, *halves.rows_args)
        rows = self._before(_ROWS, halves.rows, args, {}, made)
        self._become(halves.whole, (rows, dims, keepdim, *halves.whole_args))

    # -- the graph ---------------------------------------------------------------------------------------------
    def _before(
        self, part: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: TensorInfo
    ) -> fx.Node:
        """Put a node before the reduction, in the ambient state of the reduction."""
        target, full = self._called(function, args)
        with self.graph.inserting_before(self.node):
            new = self.graph.create_node(
                "call_function", target, full, dict(kwargs), name=f"{self.node.name}_{part[1:]}"
            )
        new.meta.update(self.node.meta)
        reads = tuple(str(n.target) for n in new.all_input_nodes if n.op == "get_attr" and n.target in self.info.reads)
        new.meta[INFO] = replace(self.info, name=self.info.name + part, tensors=(made,), reads=reads, mutated=False)
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
    """Return what a call of a known reduction asks for; None for another function or an unusual way to call it."""
    kind = next((kind for known, kind in _FUNCTIONS if known is function), None)
    if kind is None or len(args) > len(_SIGNATURES[kind]):
        return None
    names = _SIGNATURES[kind]
    if kind in ("var", "std") and len(args) > 1 and isinstance(args[1], bool):
        names = ("input", "unbiased")
    given = dict(zip(names, args, strict=False))
    for key, option in kwargs.items():
        given[{"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input"}.get(key, key)] = option
    if not given.keys() <= {*_SIGNATURES[kind], *names} or given.get("out") is not None or "input" not in given:
        return None
    value, dims = given.pop("input"), given.pop("dim", None)
    return _Reduction(kind, value, dims, bool(given.pop("keepdim", False)), given)


def _halves(found: _Reduction, source: torch.dtype, made: torch.dtype) -> _Halves | None:
    """Return the two halves of a reduction; None where they would not be exact."""
    kind, options = found.kind, found.options
    if source.is_complex or (kind in _WITH_DTYPE and torch.promote_types(source, made) != made):
        return None
    if kind in _LOGICAL:
        return _Halves(*_LOGICAL[kind], (), (), made)
    wide = _wide(made)
    if kind == "count_nonzero":
        return _Halves(reductions.count_rows, reductions.total, (), (made,), made)
    if kind in ("sum", "mean"):
        return _Halves(*_ADDED[kind], (wide,), (made,), wide)
    if kind in ("norm", "vector_norm"):
        order = options.get("p", options.get("ord", 2))
        order = 2 if order in (None, "fro") else order
        if order not in (1, 2):
            return None
        return _Halves(reductions.norm_rows, reductions.norm_of, (wide, order), (made, order), wide)
    correction = options.get("correction")
    correction = int(options.get("unbiased", True)) if correction is None else correction
    spread = reductions.variance if kind == "var" else reductions.deviation
    return _Halves(reductions.moment_rows, spread, (wide,), (made, correction), wide, (Size(0, 3),))


def _dims(dims: Any, count: int) -> tuple[int, ...] | None:
    """Return the reduced dimensions, all for None; None for what is not known before the model runs."""
    given = range(count) if dims is None or dims in ((), []) else (dims,) if isinstance(dims, int) else dims
    if not all(isinstance(dim, int) for dim in given):
        return None
    return tuple(sorted(dim % count for dim in given))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which torch adds up values of a type."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
