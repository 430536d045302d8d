"""What Python values are made of, and how two contents of something that holds values differ."""

from __future__ import annotations

import array
import copy
import functools
import gc
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import nn

ENTRIES = 4096
"""The most parts of a value that is looked into."""
ATOMIC = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
CACHED = type(functools.lru_cache(int))
ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, itertools.repeat)
ITERATORS += (type(iter([])), type(iter(())), type(iter(range(0))))
WRAPPERS = (functools.partial, types.MethodType, staticmethod, classmethod, CACHED)
"""What calls another function."""
STATES = (np.ndarray, bytearray, array.array)
"""What has a state, and no parts."""
_LIBRARIES = frozenset("torch builtins logging functools weakref abc typing threading".split())
_NOT_OBJECTS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
GONE: Any = object()
"""Stands for a value that is no more."""


def is_object(value: Any) -> bool:
    """Tell whether a value is a plain object with attributes of its own, such as a config."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] in _LIBRARIES or isinstance(value, _NOT_OBJECTS):
        return False
    space = getattr(value, "__dict__", None)
    return bool(isinstance(space, dict) or slot_names(kind)) and len(space or ()) <= ENTRIES


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in slots of its classes, and have values."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in slot_names(kind) if hasattr(value, name)}


@functools.lru_cache(maxsize=1024)
def slot_names(kind: Any) -> list[str]:
    """Return the names of the slots of a class."""
    kinds = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    return sorted({n for each in kinds for n, m in vars(each).items() if isinstance(m, types.MemberDescriptorType)})


def is_apart(value: Any, modules: Collection[int]) -> bool:
    """Tell whether a value is a module with nothing of a model, whose ``modules`` are told by their ids.

    One that holds modules of the model is its wrapper, or its pipe.
    """
    return isinstance(value, nn.Module) and not any(id(module) in modules for module in value.modules())


def parts_of(value: Any, modules: Collection[int]) -> list[tuple[Any, Any]] | None:
    """Return what a value is made of, by key or position; None for what has no parts, or too many to be looked at.

    A module has parts where it has nothing of the ``modules``, which are told by their ids.
    """
    parts: list[tuple[Any, Any]] | None = None
    if isinstance(value, _CONTAINERS):
        if len(value) > ENTRIES:
            return None
        parts = [*(value.items() if isinstance(value, dict) else enumerate(value))]
    elif isinstance(value, functools.partial):
        parts = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return [("func", value.__func__), ("self", getattr(value, "__self__", None))]
    elif isinstance(value, CACHED):
        return [("func", value.__wrapped__)]
    elif isinstance(value, types.FunctionType):
        return [*_closure(value), *defaults_of(value).items(), *vars(value).items()]
    if is_object(value) or is_apart(value, modules):
        parts = [*(parts or ()), *getattr(value, "__dict__", {}).items(), *slots_of(value).items()]
    return parts


def referent(value: Any) -> Any:
    """Return what a weak reference, a proxy or a view of a dict stands for, None where it is gone; else the value."""
    if isinstance(value, types.MappingProxyType):
        return gc.get_referents(value)[0]
    if type(value) in weakref.ProxyTypes:
        try:
            return value.__init__.__self__
        except ReferenceError:
            return None
    return value() if isinstance(value, weakref.ref) else value


def _closure(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of a function's closure that have values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, content) for name, cell in cells for content in cell_content(cell)]


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return a function's code, and its defaults by the names of its parameters."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {"__code__": code, **dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def cell_content(cell: types.CellType) -> list[Any]:
    """Return the value of a closure's variable in a list; an empty one where it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, set or frozenset, or a content, of changed parts; itself where none is another, or has none."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if not isinstance(value, (tuple, list, set, frozenset)):
        return value
    changed = [change(item) for item in value]
    if all(map(operator.is_, changed, value)):
        return value
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def swapped(value: Any, others: Mapping[int, Any]) -> Any:
    """Return what comes in the place of a value, told by its id; a tuple or frozenset with other parts is a new one."""
    if id(value) in others or not isinstance(value, (tuple, frozenset)):
        return others.get(id(value), value)
    return with_parts(value, lambda item: swapped(item, others))


def values_of(content: Any) -> Iterable[Any]:
    """Return the values of a content; the state of a generator or an array has none."""
    return content.values() if isinstance(content, dict) else () if isinstance(content, bytes) else content


def stand_in(value: Any) -> Any:
    """Return a copy of an iterator, or an empty one of a cache."""
    if type(value) is CACHED:
        return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    return copy.deepcopy(value) if type(value) is itertools.cycle else copy.copy(value)


def is_small(value: Any) -> bool:
    """Tell whether a container or an array has few enough entries or bytes to be compared from call to call."""
    if isinstance(value, STATES):
        return (value if isinstance(value, np.ndarray) else memoryview(value)).nbytes <= 8 * ENTRIES
    return not isinstance(value, Sized) or len(value) <= ENTRIES


def position(value: Any) -> Any:
    """Return what tells where an iterator is."""
    if type(value) not in ITERATORS:
        return [position(item) for item in value] if type(value) in (tuple, list) else repr(value)
    return position(value.__reduce__())


def is_same(before: Any, after: Any) -> bool:
    """Tell whether a value is the same object as before, or an equal number or text."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    return isinstance(before, ATOMIC) and repr(before) == repr(after)


def is_same_content(before: Any, after: Any) -> bool:
    """Tell whether what holds values has the same objects in the same order, or an equal state."""
    if isinstance(after, dict):
        before, after = [*before, *before.values()], [*after, *after.values()]
    if isinstance(after, (list, tuple, deque)):
        return len(before) == len(after) and all(map(operator.is_, before, after))
    return bool(before == after)


def difference(before: Any, after: Any) -> dict[Any, Any]:
    """Return what of a content is another value now, by key or position; what is gone is `GONE`."""
    if is_same_content(before, after):
        return {}
    if isinstance(before, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    elif not isinstance(before, dict):
        return {None: after}
    changed = {k: v for k, v in after.items() if k not in before or not is_same(before[k], v)}
    return changed | {key: GONE for key in before if key not in after}


def applied(content: Any, changes: Mapping[Any, Any]) -> Any:
    """Return a content with changes made to it."""
    if not isinstance(content, (dict, list)):
        return changes[None]
    keyed = dict(enumerate(content)) if isinstance(content, list) else dict(content)
    for key, value in changes.items():
        put(keyed, key, value)
    return list(keyed.values()) if isinstance(content, list) else keyed


def put(content: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of a dict, or delete it where its value is `GONE`."""
    if value is GONE:
        content.pop(key, None)
    else:
        content[key] = value
