"""Nested values: tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree


def flatten_output(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Flatten nested tuples, lists, dicts and dataclasses; also return the function that rebuilds the structure."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        names = [f.name for f in dataclasses.fields(value)]
        parts = [flatten_output(getattr(value, name)) for name in names]

        def rebuild(leaves: list[Any], template: Any = value) -> Any:
            copy = object.__new__(type(template))
            copy.__dict__.update(template.__dict__)
            rest = iter(leaves)
            for name, (flat, build) in zip(names, parts, strict=True):
                object.__setattr__(copy, name, build([next(rest) for _ in flat]))
            return copy

        return [leaf for flat, _ in parts for leaf in flat], rebuild
    if isinstance(value, torch.Tensor):
        return [value], lambda flat: flat[0]
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_plain_dataclass)
    if leaves == [value] or (len(leaves) == 1 and leaves[0] is value):
        return [value], lambda flat: flat[0]
    parts = [flatten_output(leaf) if _is_plain_dataclass(leaf) else ([leaf], lambda f: f[0]) for leaf in leaves]

    def rebuild_tree(flat: list[Any]) -> Any:
        rest = iter(flat)
        return pytree.tree_unflatten([build([next(rest) for _ in part]) for part, build in parts], spec)

    return [leaf for flat, _ in parts for leaf in flat], rebuild_tree


def _is_plain_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))


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
        leaves = pytree.tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            _collect(leaves, found)


class Field(str):
    """An attribute name in a projection."""


def projections(value: Any, steps: tuple[Any, ...] = ()) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yield every tensor inside a nested value with the steps that lead to it."""
    if isinstance(value, torch.Tensor):
        yield value, steps
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from projections(part, (*steps, key))
    elif isinstance(value, (list, tuple)):
        for position, part in enumerate(value):
            yield from projections(part, (*steps, position))
    elif _is_plain_dataclass(value):
        for f in dataclasses.fields(value):
            yield from projections(getattr(value, f.name), (*steps, Field(f.name)))
