"""What operations do to axes, one rule per aten operation; see :mod:`autosplit.tensor.follow`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autosplit.tensor import rules_along as along
from autosplit.tensor.axes import Axis, Incompatible, cut, product, row, split
from autosplit.tensor.follow import Call, Follower, Terms, each, tensors_in

Rule = Callable[..., Terms]


def rules() -> dict[str, Rule]:
    """Return the rules by the names of aten operations; "pointwise" is for all that torch marks so."""
    table: dict[str, Rule] = {"pointwise": _pointwise, "attention": _attention}
    table |= dict.fromkeys(("add", "sub", "add_", "sub_", "rsub"), _sum)
    table |= dict.fromkeys(("mul", "mul_", "neg"), _product)
    table |= dict.fromkeys(("div", "div_"), _quotient)
    table |= dict.fromkeys("_to_copy clone detach alias lift_fresh contiguous real imag _conj".split(), _copy)
    table |= {"where": _where, "masked_fill": _masked_fill, "constant_pad_nd": _pad, "expand": _expand}
    table |= dict.fromkeys("zeros_like ones_like empty_like full_like rand_like randn_like".split(), _pointwise)
    table |= dict.fromkeys(("native_dropout", "bernoulli", "bernoulli_", "frac"), _pointwise)
    table |= dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view)
    table |= {"t": _t, "transpose": _transpose, "permute": _permute, "unsqueeze": _unsqueeze, "squeeze": _squeeze}
    table |= {"slice": _slice, "select": _select, "unbind": _unbind, "cat": _cat, "stack": _stack, "repeat": _repeat}
    table |= dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _split)
    table |= {"mm": _mm, "bmm": _bmm, "addmm": _addmm, "baddbmm": _baddbmm, "mv": _mv, "_grouped_mm": _grouped}
    table |= {"convolution": _convolution, "embedding": along.embedding, "native_layer_norm": along.layer_norm}
    table |= dict.fromkeys("_softmax _log_softmax cumprod logcumsumexp topk sort".split(), along.along)
    table |= dict.fromkeys("amax amin argmax argmin max min prod any all logsumexp".split(), along.along)
    table |= dict.fromkeys("var std var_mean linalg_vector_norm".split(), along.along)
    table |= dict.fromkeys(("cumsum", "mean"), along.along_linear)
    table |= {"sum": along.total, "gather": along.gather, "index": along.index, "index_select": along.index_select}
    table |= {"index_add": along.index_add, "tril": along.triangle, "triu": along.triangle, "glu": _glu}
    table |= {"_fused_rms_norm": along.layer_norm}
    return table


# -- element by element ------------------------------------------------------------------------------------------------
def _broadcast(follower: Follower, call: Call, result: Any, operands: Sequence[Any]) -> None:
    """Unite the dimensions that lie over each other, and give them to all results."""
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    dims = []
    for d in range(1, results[0].ndim + 1):
        size = results[0].shape[-d]
        over = [follower.dims(t)[-d] for t in operands if t.ndim >= d and t.shape[-d] == size]
        dims.append(follower.unite(call, *over) if over and size != 1 else Axis(size))
    for tensor in results:
        if id(tensor) not in {id(t) for t in operands}:
            follower.enter(tensor, dims[::-1])


def _pointwise(follower: Follower, call: Call, result: Any, *args: Any, **kwargs: Any) -> Terms:
    flat = [item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, list) else [value])]
    _broadcast(follower, call, result, tensors_in(*flat))
    return ()


def _sum(follower: Follower, call: Call, result: Any, x: Any, other: Any, *, alpha: Any = 1) -> Terms:
    _broadcast(follower, call, result, tensors_in(x, other))
    return () if any(value != 0 for value in (x, other) if not isinstance(value, Tensor)) else each(x, other)


def _product(follower: Follower, call: Call, result: Any, x: Any, other: Any = 1) -> Terms:
    _broadcast(follower, call, result, tensors_in(x, other))
    return (tuple(id(value) for value in tensors_in(x, other)),)


def _quotient(follower: Follower, call: Call, result: Any, x: Any, other: Any, *, rounding_mode: Any = None) -> Terms:
    _broadcast(follower, call, result, tensors_in(x, other))
    return each(x) if rounding_mode is None else ()


def _copy(follower: Follower, call: Call, result: Any, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    _broadcast(follower, call, result, [x])
    return each(x) if result.is_floating_point() else ()


def _where(follower: Follower, call: Call, result: Any, condition: Tensor, x: Any, other: Any) -> Terms:
    _broadcast(follower, call, result, tensors_in(condition, x, other))
    return () if any(value != 0 for value in (x, other) if not isinstance(value, Tensor)) else each(x, other)


def _masked_fill(follower: Follower, call: Call, result: Any, x: Tensor, mask: Tensor, value: Any) -> Terms:
    _broadcast(follower, call, result, [x, mask])
    return each(x) if not isinstance(value, Tensor) and value == 0 else ()


def _expand(follower: Follower, call: Call, result: Any, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    _broadcast(follower, call, result, [x])
    call.expands = True
    return each(x)


# -- views -------------------------------------------------------------------------------------------------------------
def _view(follower: Follower, call: Call, result: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    dims, old, new = [], [*follower.dims(x)], [*result.shape]
    if 0 in result.shape or result.dtype != x.dtype:
        raise Incompatible
    while old or new:
        group, sizes = old[:1], new[:1]
        old, new = old[1:], new[1:]
        while math.prod(axis.size for axis in group) != math.prod(sizes):
            if math.prod(axis.size for axis in group) < math.prod(sizes):
                group.append(old.pop(0))
            else:
                sizes.append(new.pop(0))
        if len(sizes) == 1:
            dims.append(product(group))
            continue
        try:
            dims += split(group, sizes)
        except Incompatible:
            call.blocked += group
            dims += [Axis(size) for size in sizes]
    return follower.moved(result, dims, x)


def _t(follower: Follower, call: Call, result: Tensor, x: Tensor) -> Terms:
    return follower.moved(result, follower.dims(x)[::-1], x)


def _transpose(follower: Follower, call: Call, result: Tensor, x: Tensor, first: int, second: int) -> Terms:
    dims = [*follower.dims(x)]
    dims[first], dims[second] = dims[second], dims[first]
    return follower.moved(result, dims, x)


def _permute(follower: Follower, call: Call, result: Tensor, x: Tensor, order: Sequence[int]) -> Terms:
    return follower.moved(result, [follower.dims(x)[dim] for dim in order], x)


def _unsqueeze(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int) -> Terms:
    dims = [*follower.dims(x)]
    dims.insert(dim % result.ndim, Axis(1))
    return follower.moved(result, dims, x)


def _squeeze(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: Any = None) -> Terms:
    gone = {d for d in along.chosen(x, dim) if x.shape[d] == 1}
    return follower.moved(result, [axis for d, axis in enumerate(follower.dims(x)) if d not in gone], x)


def _slice(
    follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int = 0, start: Any = None, *rest: Any
) -> Terms:
    dims = [*follower.dims(x)]
    first, last, step = slice(start, *rest or (None,)).indices(x.shape[dim])
    if step != 1 or last <= first:
        call.blocked.append(dims[dim])
        dims[dim] = Axis(result.shape[dim])
    else:
        dims[dim] = _cut(call, dims[dim], first, last)
    return follower.moved(result, dims, x)


def _cut(call: Call, axis: Axis, start: int, stop: int) -> Axis:
    try:
        return cut(axis, start, stop)
    except Incompatible:
        call.blocked.append(axis)
        return Axis(stop - start)


def _select(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int, index: int) -> Terms:
    dims = [*follower.dims(x)]
    call.blocked.append(dims.pop(dim))
    return follower.moved(result, dims, x)


def _unbind(follower: Follower, call: Call, result: Any, x: Tensor, dim: int = 0) -> Terms:
    dims = [*follower.dims(x)]
    call.blocked.append(dims.pop(dim))
    for tensor in result:
        follower.enter(tensor, dims)
    return each(x)


def _split(follower: Follower, call: Call, result: Any, x: Tensor, sizes: Any, dim: int = 0) -> Terms:
    start = 0
    for tensor in result:
        dims = [*follower.dims(x)]
        dims[dim] = _cut(call, dims[dim], start, start + tensor.shape[dim])
        follower.enter(tensor, dims)
        start += tensor.shape[dim]
    return each(x)


def _cat(follower: Follower, call: Call, result: Tensor, parts: Sequence[Tensor], dim: int = 0) -> Terms:
    parts = [tensor for tensor in parts if tensor.ndim == result.ndim]
    dims: list[Axis] = []
    along = dim % result.ndim
    for d in range(result.ndim):
        axes = [follower.dims(tensor)[d] for tensor in parts]
        dims.append(row(axes) if d == along else follower.unite(call, *axes))
    return follower.moved(result, dims, *parts)


def _stack(follower: Follower, call: Call, result: Tensor, parts: Sequence[Tensor], dim: int = 0) -> Terms:
    dims = [follower.unite(call, *axes) for axes in zip(*map(follower.dims, parts), strict=True)]
    dims.insert(dim % result.ndim, Axis(len(parts)))
    return follower.moved(result, dims, *parts)


def _repeat(follower: Follower, call: Call, result: Tensor, x: Tensor, repeats: Sequence[int]) -> Terms:
    dims = [Axis(1)] * (result.ndim - x.ndim) + follower.dims(x)
    call.expands = True
    return follower.moved(result, [product([Axis(n), axis]) for n, axis in zip(repeats, dims, strict=True)], x)


def _pad(follower: Follower, call: Call, result: Tensor, x: Tensor, pad: Sequence[int], value: Any = 0) -> Terms:
    dims = [*follower.dims(x)]
    for d in range(len(pad) // 2):
        if pad[2 * d] or pad[2 * d + 1]:
            call.blocked.append(dims[-1 - d])
            dims[-1 - d] = Axis(result.shape[-1 - d])
    follower.enter(result, dims)
    return each(x) if value == 0 else ()


def _glu(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int = -1) -> Terms:
    dims = [*follower.dims(x)]
    half = x.shape[dim] // 2
    dims[dim] = follower.unite(call, _cut(call, dims[dim], 0, half), _cut(call, dims[dim], half, 2 * half))
    follower.enter(result, dims)
    return ()


# -- products ----------------------------------------------------------------------------------------------------------
def _mm(follower: Follower, call: Call, result: Tensor, x: Tensor, two: Tensor) -> Terms:
    left, right = follower.dims(x), follower.dims(two)
    follower.unite(call, left[-1], right[-2])
    batch = [follower.unite(call, a, b) for a, b in zip(left[:-2], right[:-2], strict=True)]
    follower.enter(result, [*batch, left[-2], right[-1]])
    return ((id(x), id(two)),)


_bmm = _mm


def _addmm(follower: Follower, call: Call, result: Tensor, bias: Tensor, x: Tensor, two: Tensor, **_: Any) -> Terms:
    terms = _mm(follower, call, result, x, two)
    dims = follower.dims(result)
    for d in range(1, bias.ndim + 1):
        if bias.shape[-d] == result.shape[-d]:
            follower.unite(call, dims[-d], follower.dims(bias)[-d])
    return (*terms, *each(bias))


_baddbmm = _addmm


def _mv(follower: Follower, call: Call, result: Tensor, x: Tensor, two: Tensor) -> Terms:
    left, right = follower.dims(x), follower.dims(two)
    follower.unite(call, left[1], right[0])
    follower.enter(result, left[:1])
    return ((id(x), id(two)),)


def _grouped(follower: Follower, call: Call, result: Tensor, x: Tensor, two: Tensor, *rest: Any) -> Terms:
    """Rows of tokens, group by group, with a matrix per group."""
    if (x.ndim, two.ndim) == (3, 3):
        return _mm(follower, call, result, x, two)
    if (x.ndim, two.ndim) != (2, 3) or any(bias is not None for bias in rest[1:2]):
        raise Incompatible
    left, right = follower.dims(x), follower.dims(two)
    follower.unite(call, left[1], right[1])
    call.blocked += [left[0], right[0]]
    follower.enter(result, [left[0], right[2]])
    return ((id(x), id(two)),)


def _convolution(
    follower: Follower, call: Call, result: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any
) -> Terms:
    if rest[-1] != 1 or rest[-3]:
        raise Incompatible
    source, kernel = follower.dims(x), follower.dims(weight)
    follower.unite(call, source[1], kernel[1])
    call.blocked += [*source[2:], *kernel[2:]]
    follower.enter(result, [source[0], kernel[0], *map(Axis, result.shape[2:])])
    if bias is not None:
        follower.unite(call, kernel[0], follower.dims(bias)[0])
    return ((id(x), id(weight)), *each(bias))


def _attention(
    follower: Follower, call: Call, result: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> Terms:
    """Queries of one head of keys may be several: heads are the product of both then."""
    q, k, v = map(follower.dims, (query, key, value))
    follower.unite(call, q[-1], k[-1])
    follower.unite(call, k[-2], v[-2])
    call.blocked += [q[-1], k[-2], q[-2]]
    dims = []
    for a, b, c in zip(q[:-2], k[:-2], v[:-2], strict=True):
        follower.unite(call, b, c)
        if a.size != b.size:
            if a.size % b.size:
                raise Incompatible
            follower.unite(call, a, product([b, Axis(a.size // b.size)]))
        else:
            follower.unite(call, a, b)
        dims.append(a)
    follower.enter(result, [*dims, q[-2], v[-1]])
    call.blocked += follower.dims(mask)[-2:] if mask is not None else []
    for d in range(3, (mask.ndim if mask is not None else 0) + 1):
        if mask.shape[-d] == q[-d].size:
            follower.unite(call, q[-d], follower.dims(mask)[-d])
    return each(value)
