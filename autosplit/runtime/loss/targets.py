"""Targets of a training step, cut into microbatches as the batch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autosplit.errors import InputError
from autosplit.runtime.loss.outputs import Shape
from autosplit.runtime.ops import rows_along
from autosplit.trace.inputs.structure import flatten_output


def split_target(target: Any, sizes: Sequence[int], *, outputs: Sequence[Shape] = ()) -> list[Any]:
    """Cut every tensor of a target into microbatches; what is no tensor, and what has no dimension, goes to all.

    ``outputs`` are the model's: a target of an output's shape, or of that shape without its dimension of classes, has
    its batch where the output has it. Any other has it in its first dimension, else in the only one of that size.

    Raises InputError when a tensor's batch is another one.
    """
    rows = sum(sizes)
    leaves, rebuild = flatten_output(target)
    pieces: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            _check_plain(leaf)
            pieces.append([leaf] * len(sizes))
        else:
            pieces.append(list(rows_along(leaf, sizes, _batch_dim(leaf, rows, outputs))))
    if not pieces:
        return [target] * len(sizes)
    return [rebuild(list(parts)) for parts in zip(*pieces, strict=True)]


def _batch_dim(target: torch.Tensor, rows: int, outputs: Sequence[Shape]) -> int:
    shape = tuple(target.shape)
    for output in outputs:
        if output.sizes == shape:
            return output.batch_dim
    for output in outputs:
        for classes in range(len(output.sizes)):
            if classes != output.batch_dim and output.without(classes) == shape:
                return output.batch_dim - (classes < output.batch_dim)
    if shape[0] == rows or (shape[0] and shape[0] % rows == 0 and _gives(outputs, rows, shape[0] // rows)):
        return 0
    fitting = [dim for dim, size in enumerate(shape) if size == rows]
    if len(fitting) == 1:
        return fitting[0]
    raise InputError(
        f"the target has shape {list(shape)}, the batch {rows} rows; give one target row per batch row, and what has "
        "no batch by functools.partial(loss_fn, ...), or say by batch_dims= which dimension of the inputs is the batch"
    )


def _gives(outputs: Sequence[Shape], rows: int, entries: int) -> bool:
    """Tell whether a row of an output may have that many entries with a target each, as tokens have."""
    return not outputs or any(output.elements % (rows * entries) == 0 for output in outputs)


def _check_plain(leaf: Any) -> None:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        raise InputError(f"the target holds a numpy array of shape {list(leaf.shape)}; give a tensor")
    held = leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    if any(isinstance(value, torch.Tensor) for value in held):
        raise InputError(
            f"the target is a {type(leaf).__name__}, whose tensors cannot be cut into microbatches; give a tensor, or "
            "a tuple, list, dict or dataclass of them"
        )
