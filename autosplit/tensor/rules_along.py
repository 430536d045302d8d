"""What operations along dimensions and by indices do to axes; see :mod:`autosplit.tensor.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.tensor.axes import Axis, Incompatible
from autosplit.tensor.follow import Call, Follower, Terms, each, tensors_in


# -- along dimensions --------------------------------------------------------------------------------------------------
def layer_norm(follower: Follower, call: Call, result: Any, one: Tensor, shape: Sequence[int], *rest: Any) -> Terms:
    """Follow a norm over the last dimensions."""
    dims = follower.dims(one)
    call.blocked += dims[-len(shape) :]
    for parameter in tensors_in(*rest):
        for a, b in zip(dims[-len(shape) :], follower.dims(parameter), strict=True):
            follower.unite(call, a, b)
    outer = dims[: -len(shape)]
    for tensor in result:
        if tensor.shape == one.shape:
            follower.enter(tensor, dims)
        elif tensor.ndim == one.ndim:
            follower.enter(tensor, [*outer, *(Axis(1) for _ in shape)])
    return ()


def _chosen(one: Tensor, dim: Any) -> set[int]:
    if dim is None or dim == []:
        return set(range(one.ndim))
    return {d % one.ndim for d in ([dim] if isinstance(dim, int) else dim)}


def _reduced(follower: Follower, result: Any, one: Tensor, along: set[int]) -> None:
    """Give results their axes: what is reduced is gone, of size one, or another axis."""
    dims = follower.dims(one)
    for tensor in (result,) if isinstance(result, Tensor) else result:
        if tensor.ndim == one.ndim:
            same = [d not in along or tensor.shape[d] == one.shape[d] for d in range(one.ndim)]
            follower.enter(tensor, [dims[d] if same[d] else Axis(tensor.shape[d]) for d in range(one.ndim)])
        else:
            follower.enter(tensor, [axis for d, axis in enumerate(dims) if d not in along])


def along(follower: Follower, call: Call, result: Any, one: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow an operation that needs all of some dimensions: those that its ``dim`` names, or all."""
    along = _chosen(one, call.dim)
    call.blocked += [follower.dims(one)[d] for d in along]
    _reduced(follower, result, one, along)
    return ()


def along_linear(follower: Follower, call: Call, result: Any, one: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow a linear operation that needs all of some dimensions."""
    along(follower, call, result, one)
    return each(one)


def total(follower: Follower, call: Call, result: Tensor, one: Tensor, *args: Any, **kwargs: Any) -> Terms:
    """Follow a sum: over parts of a dimension it gives summands."""
    _reduced(follower, result, one, _chosen(one, call.dim))
    return each(one)


def triangle(follower: Follower, call: Call, result: Tensor, one: Tensor, *args: Any) -> Terms:
    """Follow an operation that masks the last two dimensions by their places."""
    call.blocked += follower.dims(one)[-2:]
    return follower.moved(result, follower.dims(one), one)


# -- by indices --------------------------------------------------------------------------------------------------------
def embedding(follower: Follower, call: Call, result: Tensor, table: Tensor, tokens: Tensor, *args: Any) -> Terms:
    """Rows of a table: a rank that has some of them, in one run, gives zeros for others."""
    if not follower.rows_in_parts or not follower.dims(table)[0].found().is_atom:
        call.blocked.append(follower.dims(table)[0])
    return follower.moved(result, [*follower.dims(tokens), follower.dims(table)[1]], table)


def gather(follower: Follower, call: Call, result: Tensor, one: Tensor, dim: int, index: Tensor, **_: Any) -> Terms:
    """Follow a choice along one dimension."""
    dims = follower.dims(index)
    for d, axis in enumerate(follower.dims(one)):
        if d == dim % one.ndim or axis.size != dims[d].size:
            call.blocked += [axis, dims[d]]
        else:
            follower.unite(call, axis, dims[d])
    return follower.moved(result, dims, one)


def index_select(follower: Follower, call: Call, result: Tensor, one: Tensor, dim: int, index: Tensor) -> Terms:
    """Follow a choice of slices."""
    dims = [*follower.dims(one)]
    call.blocked.append(dims[dim])
    dims[dim] = Axis(result.shape[dim])
    return follower.moved(result, dims, one)


def index(follower: Follower, call: Call, result: Tensor, one: Tensor, indices: Sequence[Tensor | None]) -> Terms:
    """The dimensions that are indexed go; those of the indices stand in the place of the first."""
    used = [place for place, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[-1] + 1)) or any(i.dtype == torch.bool for i in indices if i is not None):
        raise Incompatible
    dims = follower.dims(one)
    call.blocked += [dims[place] for place in used]
    given = [index for index in indices if index is not None]
    before, behind = dims[: used[0]], dims[used[-1] + 1 :]
    shape = result.shape[len(before) : result.ndim - len(behind)]
    if len(given) == 1:
        call.blocked += follower.dims(given[0])
        middle = follower.dims(given[0])
    else:
        call.blocked += [axis for index in given for axis in follower.dims(index)]
        middle = [Axis(size) for size in shape]
    return follower.moved(result, [*before, *middle, *behind], one)


def index_add(
    follower: Follower, call: Call, result: Tensor, one: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any
) -> Terms:
    """Follow sums into chosen slices."""
    dims = follower.dims(one)
    for d, (a, b) in enumerate(zip(dims, follower.dims(source), strict=True)):
        if d == dim % one.ndim:
            call.blocked += [a, b]
        else:
            follower.unite(call, a, b)
    return follower.moved(result, dims, one, source)
