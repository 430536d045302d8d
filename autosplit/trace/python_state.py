"""What modules hold besides tensors and modules: numbers, text, lists, dicts and plain objects such as configs.

A forward may read and change any of it. It is looked at three levels deep, and each object once.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
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
_WITHOUT_PARTS = frozenset((*_SCALARS, *_OPAQUE, type(None), nn.Parameter, torch.dtype, torch.device))
"""Types of which it is known without a look that there is nothing inside."""
_OWN = frozenset(nn.Module().__dict__)
_OTHER = object()


class Passing:
    """What a call under way in another thread may have put among a module's attributes: no state of the model's."""

    __slots__ = ()


def snapshot(model: nn.Module) -> dict[Place, Any]:
    """Return the plain Python state by the module's path and the attribute's name; what is not plain is left out."""
    seen: set[int] = set()
    return {
        (path, key): plain
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in _OWN and (plain := _plain(value, _DEPTH, seen)) is not _OTHER
    }


def changes(before: dict[Place, Any], after: dict[Place, Any]) -> list[Place]:
    """Return the places whose value is another one now.

    What was None or absent may have been filled: a cache that is made at the first call. So may new keys of a dict.
    """
    return [key for key, value in before.items() if key in after and _differs(value, after[key])]


def signature(value: Any, seen: set[int], other: Callable[[Any], Any] = lambda _: _OTHER) -> Any:
    """Return what tells whether a plain object or container is as it was; None for any other value.

    ``seen`` are the ids of the objects that were looked at already: modules share configs. ``other`` tells parts that
    are no plain values from each other: functions, tensors.
    """
    if isinstance(value, _SCALARS) or value is None or isinstance(value, _OPAQUE):
        return None
    plain = _plain(value, _DEPTH, seen, other)
    return None if plain is _OTHER else _frozen(plain)


def tensors_inside(value: Any, known: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors in a container or plain object.

    ``known`` are those of the objects that were looked at already, by id: modules share configs.
    """
    kind = type(value)
    if kind in _WITHOUT_PARTS or ((kind in _SEQUENCES or kind in _MAPPINGS) and not value):
        return []
    if id(value) not in known:
        known[id(value)] = _tensors_inside(value)
    return known[id(value)]


def _tensors_inside(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    level = [value]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        parts = [part for one in level if not isinstance(one, (*_SCALARS, *_OPAQUE)) for part in _parts(one)]
        found += [part for part in parts if isinstance(part, torch.Tensor)]
        level = [part for part in parts if id(part) not in seen]
        seen |= {id(part) for part in level}
    return found


def _parts(value: Any) -> Iterator[Any]:
    if type(value) in _MAPPINGS and len(value) <= _ENTRIES:
        yield from value.values()
    elif type(value) in _SEQUENCES and len(value) <= _ENTRIES:
        yield from value
    elif is_object(value):
        yield from vars(value).values()


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


def _differs(before: Any, after: Any) -> bool:
    if before is _OTHER or after is _OTHER or before is None:
        return False
    if isinstance(before, dict) and isinstance(after, dict):
        return any(key not in after or _differs(part, after[key]) for key, part in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) != len(after) or any(_differs(a, b) for a, b in zip(before, after, strict=True))
    if type(before) is not type(after):
        return True
    return bool(before != after and before == before)


def _frozen(plain: Any) -> Any:
    if isinstance(plain, dict):
        return tuple((str(key), _frozen(part)) for key, part in plain.items())
    if isinstance(plain, list):
        return tuple(_frozen(part) for part in plain)
    return None if plain is _OTHER else plain
