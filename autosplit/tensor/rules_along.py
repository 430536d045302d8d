"""What operations along dimensions and by indices do to axes; see :mod:`autosplit.tensor.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.tensor.axes import Axis, Incompatible
from autosplit.tensor.follow import Call, Follower, Terms, each, tensors_in


# -- along dimensions --------------------------------------------------------------------------------------------------
def layer_norm(follower: Follower, call: Call, result: Any, x: Tensor, shape: Sequence[int], *rest: Any) -> Terms:
    """Follow a norm over the last dimensions."""
    dims = follower.dims(x)
    call.blocked += dims[-len(shape) :]
    for parameter in tensors_in(*rest):
        for a, b in zip(dims[-len(shape) :], follower.dims(parameter), strict=True):
            follower.unite(call, a, b)
    outer = dims[: -len(shape)]
    for tensor in result:
        if tensor.shape == x.shape:
            follower.enter(tensor, dims)
        elif tensor.ndim == x.ndim:
            follower.enter(tensor, [*outer, *(Axis(1) for _ in shape)])
    return ()


def chosen(x: Tensor, dim: Any) -> set[int]:
    """Return the dimensions of a tensor that an argument names: one, several, or all."""
    if dim is None or dim == [] or not x.ndim:
        return set(range(x.ndim))
    return {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}


def _reduced(follower: Follower, result: Any, x: Tensor, along: set[int]) -> None:
    """Give results their axes: what is reduced is gone, of size one, or another axis."""
    dims = follower.dims(x)
    for tensor in (result,) if isinstance(result, Tensor) else result:
        if tensor.ndim == x.ndim:
            same = [d not in along or tensor.shape[d] == x.shape[d] for d in range(x.ndim)]
            follower.enter(tensor, [dims[d] if same[d] else Axis(tensor.shape[d]) for d in range(x.ndim)])
        else:
            follower.enter(tensor, [axis for d, axis in enumerate(dims) if d not in along])


def along(follower: Follower, call: Call, result: Any, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow an operation that needs all of some dimensions: those that its ``dim`` names, or all."""
    along = chosen(x, call.dim)
    call.blocked += [follower.dims(x)[d] for d in along]
    _reduced(follower, result, x, along)
    return ()


def along_linear(follower: Follower, call: Call, result: Any, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow a linear operation that needs all of some dimensions."""
    along(follower, call, result, x)
    return each(x)


def total(follower: Follower, call: Call, result: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow a sum: over parts of a dimension it gives summands."""
    _reduced(follower, result, x, chosen(x, call.dim))
    return each(x)


def triangle(follower: Follower, call: Call, result: Tensor, x: Tensor, *args: Any) -> Terms:
    """Follow an operation that masks the last two dimensions by their places."""
    call.blocked += follower.dims(x)[-2:]
    return follower.moved(result, follower.dims(x), x)


# -- by indices --------------------------------------------------------------------------------------------------------
def embedding(follower: Follower, call: Call, result: Tensor, table: Tensor, tokens: Tensor, *args: Any) -> Terms:
    """Rows of a table: a rank that has some of them, in one run, gives zeros for others."""
    if not follower.rows_in_parts or not follower.dims(table)[0].found().is_atom:
        call.blocked.append(follower.dims(table)[0])
    return follower.moved(result, [*follower.dims(tokens), follower.dims(table)[1]], table)


def gather(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int, index: Tensor, **_: Any) -> Terms:
    """Follow a choice along one dimension."""
    dims = follower.dims(index)
    for d, axis in enumerate(follower.dims(x)):
        if d == dim % x.ndim or axis.size != dims[d].size:
            call.blocked += [axis, dims[d]]
        else:
            follower.unite(call, axis, dims[d])
    return follower.moved(result, dims, x)


def index_select(follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int, index: Tensor) -> Terms:
    """Follow a choice of slices."""
    dims = [*follower.dims(x)]
    call.blocked += [dims[dim], *follower.dims(index)]
    dims[dim] = Axis(result.shape[dim])
    return follower.moved(result, dims, x)


def index(follower: Follower, call: Call, result: Tensor, x: Tensor, indices: Sequence[Tensor | None]) -> Terms:
    """The dimensions that are indexed go; those of the indices stand in the place of the first."""
    used = [d for d, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[-1] + 1)) or any(i.dtype == torch.bool for i in indices if i is not None):
        raise Incompatible
    dims = follower.dims(x)
    call.blocked += [dims[d] for d in used]
    present = [index for index in indices if index is not None]
    before, behind = dims[: used[0]], dims[used[-1] + 1 :]
    shape = result.shape[len(before) : result.ndim - len(behind)]
    if len(present) == 1:
        call.blocked += follower.dims(present[0])
        middle = follower.dims(present[0])
    else:
        call.blocked += [axis for index in present for axis in follower.dims(index)]
        middle = [Axis(size) for size in shape]
    return follower.moved(result, [*before, *middle, *behind], x)


def index_add(
    follower: Follower, call: Call, result: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any
) -> Terms:
    """Follow sums into chosen slices."""
    dims = follower.dims(x)
    call.blocked += follower.dims(index)
    for d, (a, b) in enumerate(zip(dims, follower.dims(source), strict=True)):
        if d == dim % x.ndim:
            call.blocked += [a, b]
        else:
            follower.unite(call, a, b)
    return follower.moved(result, dims, x, source)
