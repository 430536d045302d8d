"""How what holds Python values is read, and how it is given a content back; what has it already is not touched."""

from __future__ import annotations

import array
import functools
import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosplit.trace.borrowed.values import GONE, defaults_of, is_same_content, is_small

Place = tuple[str, str]
"""A module's path and the attribute or table where something is; outside of modules "" and a variable's name."""
CLASS = "__class__"
"""The entry of a module's content that is its class."""
_ARRAY_BYTES = 1 << 24
GENERATORS = (random.Random, torch.Generator, np.random.RandomState, np.random.Generator)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Holder(NamedTuple):
    """One thing that holds Python values; ``read`` returns a copy of its content, ``write`` gives it a content back.

    A content is a dict or a list of values, or the state of a generator or an array.

    Attributes:
        place: where it is, or what has it.
        of_hook: whether the walk came to it by way of a hook.
        of_function: whether it came to it by way of an autograd function, whose code runs in every call.
        name: what is outside of modules: the name of a variable, function, class or Python module.
        attributes: whether its entries are attributes of what ``name`` names, rather than items.
        draws: whether it is the state of a random generator.
        cell: whether it is a variable of a closure.
        owner: the list, object or array that this is the content of, where there is one.
        space: the plain dict that has all of it, where there is one.
    """

    place: Place
    read: Callable[[], Any]
    write: Callable[[Any], None]
    of_hook: bool = False
    of_function: bool = False
    name: str = ""
    attributes: bool = False
    draws: bool = False
    cell: bool = False
    owner: Any = None
    space: dict[Any, Any] | None = None

    def look(self) -> Any:
        """Return the content; None where it is too large to be compared from call to call."""
        return self.read() if self.attributes or self.owner is None or is_small(self.owner) else None

    def places(self, before: Any, keys: Collection[Any]) -> set[Place]:
        """Return the places of entries that changed; where entries of a dict come and go, that of the whole."""
        known = before if isinstance(before, dict) else range(len(before))
        whole = bool(self.name) and not self.attributes and any(key not in known for key in keys)
        return {("", self.name)} if whole else {self.place_of(key) for key in keys}

    def place_of(self, key: Any) -> Place:
        """Return the place of an entry; one of a list, a set or an array has the place of the whole."""
        if not self.name:
            return self.place if self.place[1] else (self.place[0], key)
        if self.attributes:
            return "", f"{self.name}.{key}"
        return "", self.name if key is None or isinstance(key, int) else f"{self.name}[{key!r}]"


def copied(value: Any) -> Any:
    """Return a copy of a list, dict, set or deque."""
    if isinstance(value, set):
        return frozenset(value)
    return dict(value) if isinstance(value, dict) else list(value)


def refill(container: Any, content: Any) -> None:
    """Give a dict, list, set or deque a content; one that has it already is not touched."""
    if not is_same_content(content, container):
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(content)


def refill_module(module: nn.Module, content: dict[str, Any]) -> None:
    """Give a module its class and attributes."""
    now, content = module.__dict__, dict(content)
    kind = content.pop(CLASS)
    if type(module) is not kind:
        module.__class__ = kind
    change(now, content, now.__setitem__, now.__delitem__)


def writer(
    read: Callable[[], Mapping[str, Any]], setter: Callable[[str, Any], None], deleter: Callable[[str], None]
) -> Callable[[Mapping[str, Any]], None]:
    """Return what gives entries a content: those of an object's slots, of a class or of a namespace."""
    return lambda content: change(read(), content, setter, deleter)


def change(
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


def refill_cell(cell: types.CellType, content: list[Any]) -> None:
    """Give a closure's variable its value."""
    if content:
        cell.cell_contents = content[0]


def refill_defaults(function: types.FunctionType, content: dict[str, Any]) -> None:
    """Give a function its code and its defaults."""
    if not is_same_content(content, defaults_of(function)):
        code, *entries = content.items()
        function.__code__, count = code[1], len(function.__defaults__ or ())
        function.__defaults__ = tuple(value for _, value in entries[:count])
        function.__kwdefaults__ = dict(entries[count:])


def named(space: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those of some names that a namespace has, and their values."""
    return {name: space[name] for name in names if name in space}


@functools.cache
def _of_fakes() -> frozenset[str]:
    """Return the attributes that every fake parameter has."""
    return frozenset(vars(FakeTensorMode().from_tensor(nn.Parameter(torch.empty(0)))))


def marks(parameters: dict[str, Any], name: str) -> dict[Any, Any]:
    """Return the attributes and hooks of the parameter that is in a table now, also where it is a fake one."""
    parameter = parameters.get(name)
    if parameter is None:
        return {}
    hooks = ((table, getattr(parameter, table)) for table in _TENSOR_HOOKS)
    hooked = {(table, key): hook for table, each in hooks for key, hook in (each or {}).items()}
    skipped = _of_fakes() if isinstance(parameter, FakeTensor) else ()
    return hooked | {key: value for key, value in vars(parameter).items() if key not in skipped}


def refill_marks(parameters: dict[str, Any], name: str, content: dict[Any, Any]) -> None:
    """Give the parameter that is in a table now attributes and hooks."""
    parameter, now = parameters.get(name), marks(parameters, name)
    if parameter is None or is_same_content(content, now):
        return
    hooks = [(*key, hook) for key, hook in content.items() if isinstance(key, tuple)]
    for table in _TENSOR_HOOKS:
        wanted = OrderedDict((key, hook) for kind, key, hook in hooks if kind == table)
        if (registered := getattr(parameter, table)) is None:
            setattr(parameter, table, wanted or None)
        else:  # handles take hooks out of this very dict
            registered.clear()
            registered.update(wanted)
    before, after = ({key: value for key, value in each.items() if isinstance(key, str)} for each in (now, content))
    change(before, after, vars(parameter).__setitem__, vars(parameter).__delitem__)


def state_of(value: Any) -> tuple[Callable[[], bytes], Callable[[bytes], None]] | None:
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
    elif isinstance(value, (bytearray, array.array)):
        read, write = (lambda: value[:]), functools.partial(value.__setitem__, slice(None))
    else:
        return None

    def restore(state: bytes) -> None:
        if pickle.dumps(read()) != state:
            write(pickle.loads(state))

    return lambda: pickle.dumps(read()), restore
