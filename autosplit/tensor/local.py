"""A node on one rank's parts: which of its arguments are sizes of what is sharded, and what they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from autosplit.tensor.axes import Shard
from autosplit.trace.graph import TracedGraph
from autosplit.trace.recording.draw_rules import with_plain_numbers
from autosplit.trace.recording.recording import by_name, under
from autosplit.trace.rows.kinds import function_of
from autosplit.trace.scope import runs_only

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def local_shape(shape: Sequence[int], shard: Shard | None, ranks: int) -> list[int]:
    """Return the shape of a rank's part of a tensor."""
    return [size // ranks if shard is not None and dim == shard.dim else size for dim, size in enumerate(shape)]


def local_arguments(
    node: fx.Node, root: nn.Module, *, ndim: int, source: Shard | None, result: Shard | None, ranks: int
) -> Arguments:
    """Return a node's arguments for a rank's parts.

    ``source`` is how its first operand, of ``ndim`` dimensions, is sharded, ``result`` how its first result is.
    """
    function = function_of(node, root)
    name = getattr(function, "__name__", "") if node.op != "call_module" else ""
    rule = _RULES.get(name)
    first = 2 if node.target is under else 0
    if rule is None or not (source or result):
        return node.args, dict(node.kwargs)
    args, kwargs = rule(node.args[first:], dict(node.kwargs), ndim, source, result, ranks)
    return (*node.args[:first], *args), kwargs


def _part(value: Any, ranks: int) -> Any:
    """Return a size or an offset on a rank: negative ones count from the end, -1 and nodes are as they were."""
    if not isinstance(value, int) or value == -1:
        return value
    return -(-value // ranks) if value < 0 else value // ranks


def _sizes(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    """View, reshape and expand: the sizes are those of the result."""
    nested = len(args) == 2 and isinstance(args[1], (list, tuple))
    sizes = [*(args[1] if nested else args[1:])]
    if result is not None and result.dim < len(sizes):
        sizes[result.dim] = _part(sizes[result.dim], ranks)
    return (args[0], tuple(sizes)) if nested else (args[0], *sizes), kwargs


def _unflatten(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % ndim
    sizes = [*(kwargs["sizes"] if "sizes" in kwargs else args[2])]
    if result is not None and dim <= result.dim < dim + len(sizes):
        sizes[result.dim - dim] = _part(sizes[result.dim - dim], ranks)
    return (args[0], dim, tuple(sizes)), {}


def _split(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    named = next((name for name in ("split_size_or_sections", "split_size", "split_sizes") if name in kwargs), None)
    sizes = kwargs[named] if named else args[1]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % ndim
    if source is not None and dim == source.dim:
        sizes = [_part(n, ranks) for n in sizes] if isinstance(sizes, (list, tuple)) else _part(sizes, ranks)
    return (args[0], sizes, dim), {}


def _getitem(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    index = args[1]
    items = [*index] if isinstance(index, tuple) else [index]
    dim = 0
    for position, item in enumerate(items):
        if item is None:
            continue
        if item is Ellipsis:
            dim = ndim - sum(other is not None and other is not Ellipsis for other in items[position + 1 :])
            continue
        if isinstance(item, slice) and source is not None and dim == source.dim:
            items[position] = slice(_part(item.start, ranks), _part(item.stop, ranks), item.step)
        dim += 1
    return (args[0], tuple(items) if isinstance(index, tuple) else items[0]), kwargs


def _narrow(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    if source is not None and not kwargs and args[1] % ndim == source.dim:
        args = (args[0], args[1], _part(args[2], ranks), _part(args[3], ranks))
    return args, kwargs


def _repeated(args: Any, kwargs: Any, ndim: int, source: Shard | None, result: Shard | None, ranks: int) -> Arguments:
    """The copies are what is sharded where the source is not."""
    if source is None and "repeats" in kwargs:
        kwargs["repeats"] = _part(kwargs["repeats"], ranks)
    elif source is None:
        args = (args[0], _part(args[1], ranks), *args[2:])
    return args, kwargs


_RULES: dict[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _sizes),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "unflatten": _unflatten,
    "getitem": _getitem,
    "narrow": _narrow,
    "repeat_interleave": _repeated,
}


def run_module(stateless: Stateless, state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a module on tensors that stand for its parameters and buffers."""
    return functional_call(stateless.module, dict(state), args, kwargs)


class Stateless:
    """A module whose own parameters are not used: a graph that has it has none of them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


@dataclass(frozen=True)
class Lookup:
    """Rows that a node looks up: of ``tokens``, in ``table`` (None: the module's own)."""

    tokens: Any
    table: fx.Node | None
    padding: int | None


def lookup_of(node: fx.Node, root: nn.Module) -> Lookup | None:
    """Return what a node looks up in a table, or None where it does not, or where the whole table must be at hand."""
    function = function_of(node, root)
    if type(function) is nn.Embedding and node.op == "call_module":
        tokens = node.args[0] if node.args else node.kwargs["input"]
        plain = not (function.max_norm or function.scale_grad_by_freq or function.sparse)
        return Lookup(tokens, None, function.padding_idx) if plain else None
    if node.target is not F.embedding:
        return None
    named = signature(F.embedding).bind(*node.args, **node.kwargs).arguments
    table = named["weight"]
    if not isinstance(table, fx.Node) or any(named.get(n) for n in ("max_norm", "scale_grad_by_freq", "sparse")):
        return None
    return Lookup(named["input"], table, named.get("padding_idx"))


@dataclass(frozen=True)
class Linear:
    """A product of ``value`` [..., in] with a parameter [out, in], and a parameter that is added to it, or None.

    Both are named as operands; ``layer`` is the module that does it, or None.
    """

    value: fx.Node
    weight: str
    bias: str | None
    layer: nn.Linear | None

    def trained(self, root: nn.Module) -> bool:
        """Tell whether the weight wants a gradient."""
        return bool(attrgetter(self.weight[1:])(root).requires_grad)


def linear_of(node: fx.Node, root: nn.Module) -> Linear | None:
    """Return what a node multiplies, or None where it does not, or does something else too."""
    layer = function_of(node, root)
    if node.op == "call_module":  # by its class: hooks may differ from rank to rank
        plain = isinstance(layer, nn.Linear) and getattr(layer.forward, "__func__", None) is nn.Linear.forward
        if not plain or layer._parameters.keys() != {"weight", "bias"}:
            return None
        bias = None if layer.bias is None else f".{node.target}.bias"
        return Linear(node.all_input_nodes[0], f".{node.target}.weight", bias, layer)
    if node.target is not F.linear or len(node.args) < 2 or not node.kwargs.keys() <= {"bias"}:
        return None
    operands: Any = (*node.args, *node.kwargs.values(), None)
    value, weight, bias = operands[:3]
    if any(getattr(state, "op", "") != "get_attr" for state in (weight, bias) if state is not None):
        return None
    return Linear(value, f".{weight.target}", None if bias is None else f".{bias.target}", None)


def draws_in_parts(traced: TracedGraph, *, plain: bool) -> set[str]:
    """Return the nodes whose numbers are drawn for a whole tensor, of which ranks take their parts, by stable names.

    ``plain``: the plain model's numbers, of any operation; else those of a seed, of dropout alone.
    """
    if plain:
        return {info.name for info in with_plain_numbers(info for _, info in traced.compute_nodes())}
    return {info.name for node, info in traced.compute_nodes() if is_dropout(node, traced.root)}


def is_dropout(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node is torch's dropout of elements."""
    layer = function_of(node, root)
    return layer is F.dropout or (isinstance(layer, nn.Dropout) and runs_only(layer, nn.Dropout.forward))


class DropoutInPart(nn.Module):
    """Dropout of a rank's elements: the mask is that of the whole tensor, drawn as it is there, and the rank's part."""

    def __init__(self, layer: Any, dim: int, runs: Sequence[range], size: int) -> None:
        """``runs`` are the elements along a dimension of ``size``; ``layer`` is the model's, or ``F.dropout``."""
        super().__init__()
        self._layer, self._dim, self._runs, self._size = (layer,), dim, runs, size

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take what ``F.dropout`` does."""
        value, p, training, _ = by_name(F.dropout, args, kwargs).values()
        if isinstance(layer := self._layer[0], nn.Dropout):
            p, training = layer.p, layer.training
        if not training or not p:
            return F.dropout(value, p, training)
        shape = (*value.shape[: self._dim], self._size, *value.shape[self._dim + 1 :])
        kept = F.dropout(value.new_ones(shape), p).bool()
        kept = torch.cat([kept.narrow(self._dim, run.start, len(run)) for run in self._runs], self._dim)
        return value * kept * (1 / (1 - p) if p < 1 else 0.0)


def embedding_rows(tokens: Tensor, table: Tensor, first: int, total: int, padding: int | None) -> Tensor:
    """Return the rows of tokens from a part of a table, which begins at row ``first`` of ``total`` ones.

    Zeros for tokens of other parts; tokens that the whole table lacks are refused as by it.
    """
    rows = tokens - first
    others = (tokens >= 0) & (tokens < total) & ((rows < 0) | (rows >= table.shape[0]))
    local = -1 if padding is None else padding % total - first
    values = F.embedding(rows.where(~others, 0), table, local if 0 <= local < table.shape[0] else None)
    return torch.where(others.unsqueeze(-1), 0, values)
