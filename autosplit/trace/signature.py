"""What a recording depends on: two calls of equal signature run the same program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosplit.trace.calls import Ambient
from autosplit.trace.record import CONTAINERS

_SHORT = 32
_OWN = frozenset(nn.Module().__dict__)
Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Key:
    """A call's signature: all but the shapes, and the shapes; the first of ``rest`` are the modes."""

    rest: Any
    shapes: Shapes


@dataclass(frozen=True)
class Kind:
    """A recording's signature: shapes without the rows, and where the rows were."""

    rest: Any
    shapes: Shapes
    batch_dims: tuple[int | None, ...]


def key_of(model: nn.Module, leaves: Sequence[Any], spec: Any) -> Key:
    """Return a call's signature from the flattened inputs and their structure.

    It covers grad mode and autocast; each module's type, mode and plain attributes; the parameters' dtypes and ties;
    the inputs' structure, shapes, dtypes, devices and constants.
    """
    modes: list[Any] = [Ambient.current()]
    structure: list[Any] = []
    ties: dict[int, int] = {}
    for module in model.modules():
        kind = type(module)
        modes.append(module.training)
        if isinstance(module, CONTAINERS) or not kind.__module__.startswith("torch.nn"):
            structure.append(len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks))
        structure.append(kind)
        for parameter in module._parameters.values():
            if parameter is not None:
                structure += (parameter.dtype, ties.setdefault(id(parameter), len(ties)))
        if not kind.__module__.startswith("torch.nn"):
            for key, value in module.__dict__.items():
                if key in _OWN:
                    continue
                if isinstance(value, (bool, int, float, str)):
                    structure.append((type(value), value))
                elif value is None or callable(value) or isinstance(value, torch.Tensor):
                    structure.append(id(value))
                elif type(value) in (list, tuple, dict, set) and _is_plain(value):
                    structure.append(repr(value))
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            structure.append(module.p)
    shapes = tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in leaves)
    kinds = tuple((v.dtype, v.device) if isinstance(v, torch.Tensor) else (type(v), repr(v)) for v in leaves)
    return Key((tuple(modes), tuple(structure), spec, kinds), shapes)


def _is_plain(value: Any) -> bool:
    """Tell whether a container is short and holds nothing but numbers, text and None."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return len(value) <= _SHORT and all(part is None or isinstance(part, (bool, int, float, str)) for part in parts)


def rows_of(shapes: Shapes, dims: Sequence[int | None]) -> int:
    """Return the batch size, or 0 when the inputs disagree or are empty."""
    rows = {shape[d] for shape, d in zip(shapes, dims, strict=True) if shape is not None and d is not None}
    return rows.pop() if len(rows) == 1 else 0


def without_rows(shapes: Shapes, dims: Sequence[int | None]) -> Shapes:
    """Return the shapes with -1 where the rows are."""
    return tuple(
        shape if shape is None or d is None or d >= len(shape) else (*shape[:d], -1, *shape[d + 1 :])
        for shape, d in zip(shapes, dims, strict=True)
    )
