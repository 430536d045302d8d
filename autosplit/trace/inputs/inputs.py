"""The inputs of a call: flattened, named, and with their batch dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.trace.inputs.objects import with_paths
from autosplit.trace.recording.run import FlatInputs

UNTOLD = object()
_INTEGERS = (torch.int64, torch.int32)


def flatten(model: nn.Module, sample: Sample, batch_dims: Any = None) -> FlatInputs:
    """Flatten a call's inputs and tell each tensor's batch dimension.

    ``batch_dims``: None, an int for all tensors, a tuple with one entry per positional input, or a dict by input name.
    An entry is an int, None (no batch dimension), or for a nested input the like nesting of entries.

    A tensor that ``batch_dims`` says nothing of has its batch in its first dimension where that has the batch's size,
    else none. The batch's size is that of the dimensions that ``batch_dims`` names, else that of the first dimension of
    the first tensor, tensors with one row left out where others have more.

    Raises InputError when ``batch_dims`` does not fit the inputs, when the sizes that it tells contradict each other,
    or when there is no batch, or an empty one.
    """
    pairs, spec = with_paths((sample.args, sample.kwargs))
    leaves = tuple(leaf for _, leaf in pairs)
    paths = [path for path, _ in pairs]
    names = tuple(_unique(_input_names(model, paths)))
    told = _all_told(model, batch_dims, paths, names)
    dims = tuple(_dimension(leaf, t, n) for leaf, t, n in zip(leaves, told, names, strict=True))
    flat = FlatInputs(leaves, spec, names, _of_one_size(leaves, dims, told))
    batch_rows(flat)
    return flat


def tokens_per_row(inputs: FlatInputs) -> int | None:
    """Return the length of a row of the first input that is a table of integers; None without one."""
    for position in inputs.tensors():
        leaf = inputs.leaves[position]
        if leaf.dim() == 2 and leaf.dtype in _INTEGERS and inputs.batch_dims[position] == 0:
            return int(leaf.shape[1])
    return None


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
        raise InputError(
            f"batch_dims= names dimensions of different sizes: {listed}; the batch has one size, and an input without "
            "a batch dimension is None there"
        )
    count = rows.pop()
    if count < 1:
        listed = ", ".join(f"{n}: {list(shape)}" for n, (shape, _) in sizes.items())
        raise InputError(f"the batch is empty ({listed}); give at least one row")
    return count


def _dimension(leaf: Any, told: Any, name: str) -> int | None:
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.dim() == 0 or told is None:
        return None
    if told is UNTOLD:
        return 0
    if not isinstance(told, int) or isinstance(told, bool) or not -leaf.dim() <= told < leaf.dim():
        raise InputError(
            f"batch_dims says {told!r} for input {name!r} of shape {list(leaf.shape)}; give a dimension or None"
        )
    return told % leaf.dim()


def _of_one_size(leaves: tuple[Any, ...], dims: tuple[int | None, ...], told: list[Any]) -> tuple[int | None, ...]:
    """Return the batch dimensions, without those that nobody told and whose size is not the batch's."""
    pairs = [(leaf.shape[dim], t) for leaf, dim, t in zip(leaves, dims, told, strict=True) if dim is not None]
    named, more = [size for size, t in pairs if t is not UNTOLD], [size for size, _ in pairs if size != 1]
    rows = next(iter((*named, *more)), 1)
    return tuple(
        None if dim is not None and t is UNTOLD and leaf.shape[dim] != rows else dim
        for leaf, dim, t in zip(leaves, dims, told, strict=True)
    )


def _all_told(model: nn.Module, batch_dims: Any, paths: list[Any], names: tuple[str, ...]) -> list[Any]:
    """Return for every leaf what ``batch_dims`` says of it."""
    if batch_dims is None or isinstance(batch_dims, int):
        return [UNTOLD if batch_dims is None else batch_dims] * len(paths)
    tops = [_top_name(path, _parameter_names(model.forward)) for path in paths]
    if isinstance(batch_dims, dict):
        unknown = sorted(map(str, batch_dims.keys() - {*names, *tops}))
        if unknown:
            known = ", ".join(dict.fromkeys((*tops, *names)))
            raise InputError(f"batch_dims names {', '.join(unknown)}; the inputs are {known}")
        return [
            batch_dims[name] if name in batch_dims else _entry(batch_dims.get(top, UNTOLD), path[2:])
            for path, name, top in zip(paths, names, tops, strict=True)
        ]
    if not isinstance(batch_dims, (tuple, list)):
        raise InputError(
            f"batch_dims={batch_dims!r}: give an int, a tuple with one entry per positional input, or a dict by name"
        )
    count = 1 + max((path[1].idx for path in paths if path[0].idx == 0), default=-1)
    if len(batch_dims) > count:
        raise InputError(f"batch_dims has {len(batch_dims)} entries for {count} positional inputs")
    told = dict(enumerate(batch_dims))
    return [_entry(told.get(path[1].idx, UNTOLD), path[2:]) if path[0].idx == 0 else UNTOLD for path in paths]


def _entry(told: Any, path: Any) -> Any:
    """Follow a path into a nested entry; an int or None holds for everything below it."""
    for step in path:
        if isinstance(told, dict):
            told = told.get(getattr(step, "key", None), UNTOLD)
        elif isinstance(told, (tuple, list)):
            position = getattr(step, "idx", len(told))
            told = told[position] if position < len(told) else UNTOLD
    return told


def _input_names(model: nn.Module, paths: list[Any]) -> Iterator[str]:
    parameters = _parameter_names(model.forward)
    for path in paths:
        name = _top_name(path, parameters)
        for step in path[2:]:
            name += f"_{getattr(step, 'key', getattr(step, 'idx', getattr(step, 'name', 'x')))}"
        yield name


def _top_name(path: Any, parameters: list[str]) -> str:
    """Return the name of the argument that a leaf belongs to."""
    group, first = path[:2]
    if group.idx == 1:
        return str(first.key)
    return parameters[first.idx] if first.idx < len(parameters) else f"arg{first.idx}"


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


def has_uneven_list(sample: Sample) -> bool:
    """Tell whether an input is a list of tensors of different shapes, such as images as they come."""
    lists = [value for value in (*sample.args, *sample.kwargs.values()) if isinstance(value, (list, tuple))]
    return any(
        all(isinstance(item, torch.Tensor) for item in value) and len({tuple(item.shape) for item in value}) > 1
        for value in lists
    )
