"""Caches that modules keep in their attributes and buffers: state of a group, as a cache that is an input is.

plain       module.keys = torch.cat([module.keys, new])              the module's own
recorded    forward begins with the group's values in the modules, and what it has changed is an output
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.inputs.objects import leaves_of, mapped

_TABLES = frozenset(("_parameters", "_buffers", "_modules", *HOOK_TABLES))
Spaces = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]
"""The attributes and the buffers of modules, by their paths."""


class Deleted(enum.Enum):
    """Stands for an attribute that is not there, or that a call deletes."""

    DELETED = 0


class Kept:
    """What the modules of a model keep from call to call of one group, by path and name; what is not there is theirs.

    Its class takes it apart like any cache.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = dict(values or {})


@contextlib.contextmanager
def taken(model: nn.Module, usual: dict[str, Any]) -> Iterator[Kept]:
    """Take what calls have left in a model out of it, and leave there what has become of it, as calls would have.

    ``usual`` is what modules had before they kept anything, filled here. They have that meanwhile, so that generations
    are recorded once. After an exception they have what they had, but for tensors that were written in place.
    """
    spaces = _spaces(model)
    now = {key: _get(spaces, key) for key in usual if key.partition(":")[0] in spaces}
    left = {key: value for key, value in now.items() if _is_another(usual[key], value)}
    kept = Kept(mapped(lambda leaf: leaf.detach() if getattr(leaf, "requires_grad", False) else leaf, left))
    for key in left:
        _put(spaces, key, usual[key])
    try:
        yield kept
        left = kept.values
        usual |= {key: _get(spaces, key) for key in left if key not in usual}
    finally:
        for key, value in left.items():
            _put(spaces, key, value)


@contextlib.contextmanager
def kept_apart(model: nn.Module, before: Kept) -> Iterator[Kept]:
    """Run a model with values of a group in its modules, and fill what it yields with those that it leaves there.

    Only tensors, numbers and containers of tensors are values of a group; the modules have their own again at the end.
    """
    spaces, after = _spaces(model), Kept()
    own = {path: (dict(attributes), dict(buffers)) for path, (attributes, buffers) in spaces.items()}
    for key, value in before.values.items():
        _put(spaces, key, value)
    first = {path: (dict(attributes), dict(buffers)) for path, (attributes, buffers) in spaces.items()}
    try:
        yield after
        after.values.update(before.values)
        for path, tables in spaces.items():
            for table, earlier in zip(tables, first[path], strict=True):
                for name, value in table.items():
                    if name not in _TABLES and _is_another(earlier.get(name), value):
                        after.values[f"{path}:{name}"] = value
                for name in earlier.keys() - table.keys() - _TABLES:
                    after.values[f"{path}:{name}"] = Deleted.DELETED
    finally:
        for key in after.values.keys() | before.values.keys():
            path, _, name = key.partition(":")
            for table, earlier in zip(spaces[path], own[path], strict=True):
                if name in earlier:
                    table[name] = earlier[name]
                else:
                    table.pop(name, None)


def buffers_of(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of buffers as values of a group, by their names in the model."""
    values = {}
    for name in names:
        path, _, last = name.rpartition(".")
        values[f"{path}:{last}"] = model.get_buffer(name).clone()
    return values


def _spaces(model: nn.Module) -> Spaces:
    return {path: (vars(module), module._buffers) for path, module in model.named_modules()}


def _get(spaces: Spaces, key: str) -> Any:
    path, _, name = key.partition(":")
    attributes, buffers = spaces[path]
    return buffers[name] if name in buffers else attributes.get(name, Deleted.DELETED)


def _put(spaces: Spaces, key: str, value: Any) -> None:
    path, _, name = key.partition(":")
    attributes, buffers = spaces[path]
    table = buffers if name in buffers else attributes
    if value is Deleted.DELETED:
        table.pop(name, None)
    else:
        table[name] = value


def _is_another(before: Any, now: Any) -> bool:
    """Tell whether a call has changed an attribute in a way that is a group's: tensors and numbers."""
    if now is before:
        return False
    if _is_number(now) and _is_number(before):
        return bool(now != before)
    return any(isinstance(leaf, torch.Tensor) for value in (before, now) for leaf in leaves_of(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
