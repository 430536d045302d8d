"""What modules hold besides tensors and modules: numbers, text, lists, dicts and plain objects such as configs.

A forward may read and change any of it. It is looked at three levels deep, and each object once.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Place = tuple[str, str]
_DEPTH = 3
_ENTRIES = 4096
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict)
_SCALARS = (bool, int, float, complex, str, bytes)
_LIBRARIES = frozenset("torch builtins logging functools weakref abc typing threading".split())
_OPAQUE = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
_OTHER = object()


def signature(value: Any, seen: set[int], other: Callable[[Any], Any] = lambda _: _OTHER) -> Any:
    """Return what tells whether a plain object or container is as it was; None for any other value.

    ``seen`` are the ids of the objects that were looked at already: modules share configs. ``other`` tells parts that
    are no plain values from each other: functions, tensors.
    """
    if isinstance(value, _SCALARS) or value is None or isinstance(value, _OPAQUE):
        return None
    plain = _plain(value, _DEPTH, seen, other)
    return None if plain is _OTHER else _frozen(plain)


def is_object(value: Any) -> bool:
    """Tell whether a value is a plain object with attributes of its own."""
    kind = type(value)
    return (
        kind.__module__.partition(".")[0] not in _LIBRARIES
        and not isinstance(value, _OPAQUE)
        and isinstance(getattr(value, "__dict__", None), dict)
        and len(vars(value)) <= _ENTRIES
    )


def _plain(value: Any, depth: int, seen: set[int], other: Callable[[Any], Any] = lambda _: _OTHER) -> Any:
    if isinstance(value, _SCALARS) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= _ENTRIES and value.dtype != object else _OTHER
    if depth == 0 or id(value) in seen:
        return _OTHER
    if type(value) in _SEQUENCES and len(value) <= _ENTRIES:
        seen.add(id(value))
        parts = value if type(value) in (list, tuple, deque) else sorted(value, key=repr)
        return [_plain(part, depth - 1, seen, other) for part in parts]
    if type(value) in _MAPPINGS and len(value) <= _ENTRIES:
        seen.add(id(value))
        return {key: _plain(part, depth - 1, seen, other) for key, part in value.items()}
    if is_object(value):
        seen.add(id(value))
        return {key: _plain(part, depth - 1, seen, other) for key, part in vars(value).items()}
    return other(value)


def _frozen(plain: Any) -> Any:
    if isinstance(plain, dict):
        return tuple((str(key), _frozen(part)) for key, part in plain.items())
    if isinstance(plain, list):
        return tuple(_frozen(part) for part in plain)
    return None if plain is _OTHER else plain
