"""The inputs of a call: flattened, named, and with their batch dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.trace.run import FlatInputs

UNTOLD = object()


def flatten(model: nn.Module, sample: Sample, batch_dims: Any = None) -> FlatInputs:
    """Flatten a call's inputs and tell each tensor's batch dimension.

    ``batch_dims``: None (the first dimension of every tensor; a leading 1 beside a larger batch is no batch), an int
    for all tensors, a tuple with one entry per positional input, or a dict by input name; entries are ints or None.

    Raises InputError when the sizes contradict each other or the batch is empty.
    """
    pairs, spec = pytree.tree_flatten_with_path((sample.args, sample.kwargs))
    leaves = tuple(leaf for _, leaf in pairs)
    names = tuple(_unique(_input_names(model, [path for path, _ in pairs])))
    told = [_told(batch_dims, path, name) for (path, _), name in zip(pairs, names, strict=True)]
    dims = tuple(_dimension(leaf, t, n) for leaf, t, n in zip(leaves, told, names, strict=True))
    flat = FlatInputs(leaves, spec, names, _without_broadcast(leaves, dims, told))
    batch_rows(flat)
    return flat


def batch_rows(flat: FlatInputs) -> int:
    """Return the number of rows of the batch; raise InputError when inputs disagree, have none, or are empty."""
    sizes = {
        name: (tuple(leaf.shape), dim)
        for leaf, dim, name in zip(flat.leaves, flat.batch_dims, flat.names, strict=True)
        if dim is not None
    }
    rows = {shape[dim] for shape, dim in sizes.values()}
    if not rows:
        raise InputError(
            "no input has a batch dimension; give at least one tensor of rows, or say which by batch_dims="
        )
    if len(rows) > 1:
        listed = ", ".join(f"{n}: {list(shape)} (dim {dim})" for n, (shape, dim) in sizes.items())
        example = ", ".join("0" if i == 0 else "None" for i in range(len(sizes)))
        raise InputError(
            f"the inputs' batch sizes are ambiguous: {listed}; say which dimension is the batch by batch_dims=, for "
            f"example batch_dims=({example}) (None: no batch dimension)"
        )
    count = rows.pop()
    if count < 1:
        listed = ", ".join(f"{n}: {list(shape)}" for n, (shape, _) in sizes.items())
        raise InputError(f"the batch is empty ({listed}); give at least one row")
    return count


def alternatives(flat: FlatInputs) -> Iterator[FlatInputs]:
    """Yield the same inputs with some of the batched tensors taken as not batched, fewest first."""
    batched = [i for i, dim in enumerate(flat.batch_dims) if dim is not None]
    for count in range(1, len(batched)):
        for chosen in combinations(batched, count):
            dims = tuple(None if i in chosen else dim for i, dim in enumerate(flat.batch_dims))
            yield FlatInputs(flat.leaves, flat.spec, flat.names, dims)
        if len(batched) > 4:
            return


def _dimension(leaf: Any, told: Any, name: str) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    if told is UNTOLD:
        return 0 if leaf.dim() else None
    if told is None:
        return None
    if not isinstance(told, int) or not -leaf.dim() <= told < leaf.dim():
        raise InputError(
            f"batch_dims says {told!r} for input {name!r} of shape {list(leaf.shape)}; give a dimension or None"
        )
    return told % leaf.dim()


def _without_broadcast(
    leaves: tuple[Any, ...], dims: tuple[int | None, ...], told: list[Any]
) -> tuple[int | None, ...]:
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    if sizes <= {1}:
        return dims
    return tuple(
        None if dim is not None and t is UNTOLD and leaf.shape[dim] == 1 else dim
        for leaf, dim, t in zip(leaves, dims, told, strict=True)
    )


def _told(batch_dims: Any, path: Any, name: str) -> Any:
    if batch_dims is None:
        return UNTOLD
    if isinstance(batch_dims, int):
        return batch_dims
    group, first = path[0].idx, path[1]
    if isinstance(batch_dims, dict):
        for key in (name, getattr(first, "key", None)):
            if key in batch_dims:
                return batch_dims[key]
        return UNTOLD
    if isinstance(batch_dims, (tuple, list)):
        if group == 0 and first.idx < len(batch_dims):
            return batch_dims[first.idx]
        return UNTOLD
    raise InputError(
        f"batch_dims={batch_dims!r}: give an int, a tuple with one entry per positional input, or a dict by name"
    )


def _input_names(model: nn.Module, paths: list[Any]) -> Iterator[str]:
    parameters = _parameter_names(model.forward)
    for path in paths:
        group, first, *rest = path
        if group.idx == 1:
            name = str(first.key)
        else:
            name = parameters[first.idx] if first.idx < len(parameters) else f"arg{first.idx}"
        for step in rest:
            name += f"_{getattr(step, 'key', getattr(step, 'idx', getattr(step, 'name', 'x')))}"
        yield name


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _unique(names: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        fresh, number = name, 1
        while fresh in seen:
            fresh, number = f"{name}_{number}", number + 1
        seen.add(fresh)
        yield fresh
