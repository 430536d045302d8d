"""Where Python state lives that a forward may change, read and put back.

modules                attributes, tables of parameters, buffers, children and hooks, classes
what they hold         lists, dicts, sets, plain objects, arrays, random generators, iterators, three levels deep
functions of the user  the globals that they name, their closures, defaults, own attributes; classes, their methods

Code of installed packages is not followed: what it keeps outside of the modules is its own matter.

``torch.nn.modules.module._global_*_hooks`` are private; torch has no public ones. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Place = tuple[str, str]
"""A module's path and the attribute or table where something is; outside of modules "" and what holds it."""
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_TABLES = tuple(f"_global{table}" for table in HOOK_TABLES)
_CLASS = "__class__"
_DEPTH = 3
ENTRIES = 4096
_ARRAY_BYTES = 1 << 24
_INSTALLED = ("site-packages", "dist-packages")
_ATOMIC = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
_CACHED = type(functools.lru_cache(int))
ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, itertools.repeat)
ITERATORS += (type(iter([])), type(iter(())), type(iter(range(0))))
_WRAPPED = (staticmethod, classmethod, types.MethodType)
_LIBRARIES = frozenset("torch builtins logging functools weakref abc typing threading".split())
_NOT_OBJECTS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)


def is_object(value: Any) -> bool:
    """Tell whether a value is a plain object with attributes of its own, such as a config."""
    return (
        type(value).__module__.partition(".")[0] not in _LIBRARIES
        and not isinstance(value, _NOT_OBJECTS)
        and isinstance(getattr(value, "__dict__", None), dict)
        and len(vars(value)) <= ENTRIES
    )


def is_apart(value: Any, modules: Collection[int]) -> bool:
    """Tell whether a value is a module with nothing of a model, whose ``modules`` are told by their ids.

    One that holds modules of the model is its wrapper, or its pipe.
    """
    return isinstance(value, nn.Module) and not any(id(module) in modules for module in value.modules())


@dataclass(frozen=True)
class Holder:
    """One thing that holds Python values; ``read`` returns a copy of its content, ``write`` gives it a content back.

    A content is a dict or a list of values, or the state of a generator or an array.
    """

    place: Place
    read: Callable[[], Any]
    write: Callable[[Any], None]
    of_hook: bool = False
    """Whether it was found by way of a hook."""


class Holders:
    """All holders of some modules and of what their code names, and the tensors that are in them."""

    def __init__(self, models: Iterable[nn.Module], functions: Iterable[Callable[..., Any]] = ()) -> None:
        self.found: list[Holder] = []
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}
        """Tensors outside of the tables of parameters and buffers, and where they are, by id."""
        self.stands: dict[int, tuple[Any, Any]] = {}
        """Iterators and caches by id, each with the one that stands for it."""
        self._seen: dict[int, Any] = {}
        self._classes: set[type] = set()
        self._installed: dict[str, bool] = {}
        self._of_hook = False
        modules = {id(m): (path, m) for model in models for path, m in model.named_modules()}
        self._modules = modules.keys()
        for path, module in modules.values():
            self._module(path, module)
        for function in functions:
            self._value(function, ("", "a function"), _DEPTH)
        self._of_hook = True
        self.hook_tables = [m.__dict__.get(table, {}) for _, m in modules.values() for table in HOOK_TABLES]
        for table in _GLOBAL_TABLES:
            self.hook_tables.append(getattr(nn.modules.module, table))
            self._value(self.hook_tables[-1], ("", table), 0)
        for hook in [hook for table in self.hook_tables for hook in table.values()]:
            self._value(hook, ("", "a hook"), _DEPTH)

    def read(self) -> list[Any]:
        """Return the contents of all holders."""
        return [holder.read() for holder in self.found]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors outside of the tables by the names of their places; further ones of a place by number."""
        counts: Counter[str] = Counter()
        for place, tensor in self.tensors.values():
            name = ".".join(filter(None, place))
            yield (f"{name}.{counts[name]}" if counts[name] else name), tensor
            counts[name] += 1

    def stand_in(self) -> None:
        """Put others in the places of iterators and of functions' caches, to be used up instead; caches are empty."""
        parts = (part for holder in self.found for part in _values_of(holder.read()))
        self.stands = {id(part): (part, _stand_in(part)) for part in parts if type(part) in (*ITERATORS, _CACHED)}
        self.swap({key: stand for key, (_, stand) in self.stands.items()})

    def swap(self, others: Mapping[int, Any], twins: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Put other values in the places of some, told by their ids, and weak references to the second of two twins."""
        weak = [(weakref.ref(one), weakref.ref(other)) for one, other in twins]
        others = {**others, **{id(one): other for one, other in weak}}
        for holder in self.found if others else ():
            content = holder.read()
            if any(_swapped(part, others) is not part for part in _values_of(content)):
                pairs = content.items() if isinstance(content, dict) else enumerate(content)
                holder.write(applied(content, {key: _swapped(part, others) for key, part in pairs}))

    # -- the walk ----------------------------------------------------------------------------------------------------
    def _add(self, place: Place, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.found.append(Holder(place, read, write, self._of_hook))

    def _module(self, path: str, module: nn.Module) -> None:
        own = module.__dict__
        self._add((path, ""), lambda: {**own, _CLASS: type(module)}, functools.partial(_refill_module, module))
        if isinstance(module, torch.jit.ScriptModule):
            return
        for key, value in own.items():
            if key in _TABLES:
                self._add((path, key), functools.partial(_copied, value), functools.partial(_refill, value))
            else:
                self._value(value, (path, key), _DEPTH)
        self._class(type(module))

    def _value(self, value: Any, place: Place, depth: int) -> None:
        if isinstance(value, _ATOMIC) or depth < 0 or id(value) in self._seen:
            return
        if isinstance(value, nn.Module) and not (self._modules and is_apart(value, self._modules)):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = place, value
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _WRAPPED):
            self._value(value.__func__, place, depth)
            self._value(getattr(value, "__self__", None), place, depth)
        elif isinstance(value, _CACHED):
            self._value(value.__wrapped__, place, depth)
        elif isinstance(value, functools.partial):
            self._value((value.func, value.args, value.keywords), place, depth)
        elif (state := _state_of(value)) is not None:
            self._add(place, *state)
        else:
            self._parts(value, place, depth)

    def _parts(self, value: Any, place: Place, depth: int) -> None:
        parts: Iterable[Any] = ()
        if isinstance(value, (dict, list, set, deque)):
            self._add(place, functools.partial(_copied, value), functools.partial(_refill, value))
            parts = value.values() if isinstance(value, dict) else value
        elif isinstance(value, (tuple, frozenset)):
            parts = value
        if is_object(value) or isinstance(value, nn.Module):
            self._add(place, vars(value).copy, functools.partial(_refill, vars(value)))
            parts = [*parts, *vars(value).values()]
            self._class(type(value))
        for part in [*parts][:ENTRIES]:
            self._value(part, place, depth - 1)

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if one not in self._classes and not self._is_installed(one.__module__):
                self._classes.add(one)
                self._members(one)

    def _members(self, kind: type) -> None:
        place = ("", f"class {kind.__qualname__}")
        self._add(place, lambda: dict(vars(kind)), functools.partial(_refill_class, kind))
        for member in list(vars(kind).values()):
            self._value(member.fget if isinstance(member, property) else member, place, _DEPTH)

    def _function(self, function: types.FunctionType) -> None:
        if self._is_installed(function.__module__):
            return
        place = ("", function.__qualname__)
        self._add(place, function.__dict__.copy, functools.partial(_refill, function.__dict__))
        self._value((function.__defaults__, function.__kwdefaults__), place, _DEPTH + 1)
        for cell in function.__closure__ or ():
            self._add(place, functools.partial(_cell_content, cell), functools.partial(_refill_cell, cell))
            for value in _cell_content(cell):
                self._value(value, place, _DEPTH)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        spaces = [function.__globals__]
        modules = (function.__globals__.get(name) for name in sorted(names))
        spaces += [vars(m) for m in modules if isinstance(m, types.ModuleType) and not self._is_installed(m.__name__)]
        for space in spaces:
            self._add(place, functools.partial(_named, space, names), functools.partial(_refill_named, space, names))
            for value in _named(space, names).values():
                self._value(value, place, _DEPTH)

    def _is_installed(self, name: Any) -> bool:
        top = str(name).partition(".")[0]
        if top not in self._installed:
            file = str(getattr(sys.modules.get(top), "__file__", None) or "")
            library = top in sys.stdlib_module_names and top != "__main__"
            own = top in ("torch", "autosplit", "cost_models")
            self._installed[top] = library or own or any(part in file for part in _INSTALLED)
        return self._installed[top]


def _values_of(content: Any) -> Iterable[Any]:
    """Return the values of a content that is a dict or a list."""
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def _swapped(value: Any, others: Mapping[int, Any]) -> Any:
    """Return what comes in the place of a value; a tuple with other parts is a new one."""
    if not isinstance(value, tuple) or id(value) in others:
        return others.get(id(value), value)
    parts = [_swapped(part, others) for part in value]
    if all(one is other for one, other in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _stand_in(value: Any) -> Any:
    if type(value) is _CACHED:
        return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    return copy.deepcopy(value) if type(value) is itertools.cycle else copy.copy(value)


def position(value: Any) -> Any:
    """Return what tells where an iterator is."""
    if type(value) not in ITERATORS:
        return [position(part) for part in value] if type(value) in (tuple, list) else repr(value)
    return position(value.__reduce__())


def is_same(before: Any, after: Any) -> bool:
    """Tell whether a value is the same object as before, or an equal number or text."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    return isinstance(before, _ATOMIC) and repr(before) == repr(after)


def difference(before: Any, after: Any) -> dict[Any, Any]:
    """Return what of a content is another value now, by key or position; what is gone is `GONE`."""
    if isinstance(before, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    elif not isinstance(before, dict):
        return {} if before == after else {None: after}
    changed = {k: v for k, v in after.items() if k not in before or not is_same(before[k], v)}
    return changed | {key: GONE for key in before if key not in after}


def applied(content: Any, changes: Mapping[Any, Any]) -> Any:
    """Return a content with changes made to it."""
    if not isinstance(content, (dict, list)):
        return changes[None]
    keyed = dict(enumerate(content)) if isinstance(content, list) else dict(content)
    keyed.update(changes)
    keyed = {key: value for key, value in keyed.items() if value is not GONE}
    return list(keyed.values()) if isinstance(content, list) else keyed


GONE: Any = object()
"""Stands for a value that is no more."""
_TABLES = frozenset(("_parameters", "_buffers", "_modules", *HOOK_TABLES))


def _copied(value: Any) -> Any:
    if isinstance(value, set):
        return frozenset(value)
    return dict(value) if isinstance(value, dict) else list(value)


def _same_entries(now: Mapping[Any, Any], content: Mapping[Any, Any]) -> bool:
    return len(now) == len(content) and all(a is b and now[a] is content[b] for a, b in zip(now, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list, set or deque a content; one that has it already is not touched."""
    if isinstance(container, dict):
        if not _same_entries(container, content):
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    elif len(container) != len(content) or not all(a is b for a, b in zip(container, content, strict=True)):
        container.clear()
        container.extend(content)


def _refill_module(module: nn.Module, content: dict[str, Any]) -> None:
    """Give a module its class and attributes."""
    own, content = module.__dict__, dict(content)
    kind = content.pop(_CLASS)
    if type(module) is not kind:
        module.__class__ = kind
    _change(own, content, own.__setitem__, own.__delitem__)


def _refill_class(kind: type, content: dict[str, Any]) -> None:
    setter, deleter = functools.partial(type.__setattr__, kind), functools.partial(type.__delattr__, kind)
    _change(dict(vars(kind)), content, setter, deleter)


def _change(
    now: Mapping[str, Any],
    content: Mapping[str, Any],
    setter: Callable[[str, Any], None],
    deleter: Callable[[str], None],
) -> None:
    """Set and delete what makes entries the given content."""
    for key in now.keys() - content.keys():
        deleter(key)
    for key, value in content.items():
        if now.get(key, GONE) is not value:
            setter(key, value)


def _cell_content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _refill_cell(cell: types.CellType, content: list[Any]) -> None:
    if content:
        cell.cell_contents = content[0]


def _named(space: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: space[name] for name in sorted(names) if name in space}


def _refill_named(space: dict[str, Any], names: set[str], content: dict[str, Any]) -> None:
    _change(_named(space, names), content, space.__setitem__, space.__delitem__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _state_of(value: Any) -> tuple[Callable[[], bytes], Callable[[bytes], None]] | None:
    """Return how to read and to write the state of a random generator or an array; None for anything else."""
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    if isinstance(value, random.Random):
        read, write = value.getstate, value.setstate
    elif isinstance(value, torch.Generator):
        read, write = (lambda: value.get_state().numpy()), (lambda state: value.set_state(torch.from_numpy(state)))
    elif isinstance(value, np.random.RandomState):
        read, write = value.get_state, value.set_state
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        read, write = (lambda: bits.state), functools.partial(setattr, bits, "state")
    elif isinstance(value, np.ndarray) and value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject:
        read, write = (lambda: value), functools.partial(np.copyto, value)
    else:
        return None

    def restore(state: bytes) -> None:
        if pickle.dumps(read()) != state:
            write(pickle.loads(state))

    return lambda: pickle.dumps(read()), restore
