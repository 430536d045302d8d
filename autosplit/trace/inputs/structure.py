"""Nested values: tuples, lists, dicts, dataclasses and other objects that hold tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autosplit.trace.inputs.objects import Structure, attributes_of, is_object, take_apart


def flatten_output(value: Any) -> tuple[list[Any], Structure]:
    """Flatten nested tuples, lists, dicts, dataclasses and objects; also return what rebuilds the structure."""
    return take_apart(value)


_PLAIN = frozenset((int, float, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside nested arguments, slices included."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors inside a value; the kinds that calls take most are told apart without a search."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for part in value:
            _collect(part, found)
    elif kind is dict:
        for part in value.values():
            _collect(part, found)
    elif kind is slice:
        _collect((value.start, value.stop, value.step), found)
    else:
        found += [leaf for leaf in take_apart(value)[0] if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors with one storage share; a sparse or nested tensor is its own storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Field(str):
    """An attribute name in a projection."""


def projections(value: Any, steps: tuple[Any, ...] = ()) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yield every tensor inside a nested value with the steps that lead to it."""
    return _projections(value, steps, ())


def _projections(
    value: Any, steps: tuple[Any, ...], around: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    if isinstance(value, torch.Tensor):
        yield value, steps
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts = list(dict.items(value))
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    elif id(value) not in around and (is_object(value) or _is_dataclass(value)):
        parts = [(Field(name), part) for name, part in attributes_of(value).items()]
    for step, part in parts:
        yield from _projections(part, (*steps, step), (*around, id(value)))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# -- layouts -----------------------------------------------------------------------------------------------------------
Layout = tuple[int, ...] | str | None
GAPS = "gaps"


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the order of a tensor's dimensions in memory; None: it is contiguous, `GAPS`: it is not dense."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else GAPS


def empty_in_layout(layout: Layout, shape: Sequence[Any], **options: Any) -> torch.Tensor:
    """Return an empty tensor whose memory has a layout of `layout_of`."""
    if layout is None:
        return torch.empty(shape, **options)
    if isinstance(layout, str):
        return torch.empty([*shape, 2], **options)[..., 0]
    permuted = torch.empty([shape[dim] for dim in layout], **options)
    return permuted.permute([layout.index(dim) for dim in range(len(layout))])


def one_tensor(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each leaf the position of the first leaf that is the same tensor; its own for other values."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), position) if isinstance(leaf, torch.Tensor) else position
        for position, leaf in enumerate(leaves)
    )
