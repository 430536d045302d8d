"""How what holds Python values is read, and how it is given a content back; what has it already is not touched."""

from __future__ import annotations

import functools
import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from autosplit.trace.borrowed.values import GONE

CLASS = "__class__"
"""The entry of a module's content that is its class."""
_ARRAY_BYTES = 1 << 24
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def copied(value: Any) -> Any:
    """Return a copy of a list, dict, set or deque."""
    if isinstance(value, set):
        return frozenset(value)
    return dict(value) if isinstance(value, dict) else list(value)


def same_entries(now: Mapping[Any, Any], content: Mapping[Any, Any]) -> bool:
    """Tell whether a dict has the same objects under the same keys, in the same order."""
    return len(now) == len(content) and all(a is b and now[a] is content[b] for a, b in zip(now, content, strict=True))


def refill(container: Any, content: Any) -> None:
    """Give a dict, list, set or deque a content; one that has it already is not touched."""
    if isinstance(container, dict):
        if not same_entries(container, content):
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif len(container) != len(content) or not all(a is b for a, b in zip(container, content, strict=True)):
        container.clear()
        container.extend(content)


def refill_module(module: nn.Module, content: dict[str, Any]) -> None:
    """Give a module its class and attributes."""
    own, content = module.__dict__, dict(content)
    kind = content.pop(CLASS)
    if type(module) is not kind:
        module.__class__ = kind
    change(own, content, own.__setitem__, own.__delitem__)


def refill_class(kind: type, content: dict[str, Any]) -> None:
    """Give a class its attributes."""
    setter, deleter = functools.partial(type.__setattr__, kind), functools.partial(type.__delattr__, kind)
    change(dict(vars(kind)), content, setter, deleter)


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


def named(space: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those of some names that a namespace has, and their values."""
    return {name: space[name] for name in names if name in space}


def refill_named(space: dict[str, Any], names: Iterable[str], content: dict[str, Any]) -> None:
    """Give a namespace the values of some names."""
    change(named(space, names), content, space.__setitem__, space.__delitem__)


def tensor_hooks(tensor: torch.Tensor) -> dict[tuple[str, int], Any]:
    """Return a parameter's hooks, by the table that they are in and their keys there."""
    tables = ((table, getattr(tensor, table)) for table in _TENSOR_HOOKS)
    return {(table, key): hook for table, hooks in tables for key, hook in (hooks or {}).items()}


def refill_tensor_hooks(tensor: torch.Tensor, content: dict[tuple[str, int], Any]) -> None:
    """Give a parameter its hooks."""
    if not same_entries(tensor_hooks(tensor), content):
        for table in _TENSOR_HOOKS:
            hooks = OrderedDict((key, hook) for (own, key), hook in content.items() if own == table)
            setattr(tensor, table, hooks or None)


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
    else:
        return None

    def restore(state: bytes) -> None:
        if pickle.dumps(read()) != state:
            write(pickle.loads(state))

    return lambda: pickle.dumps(read()), restore
