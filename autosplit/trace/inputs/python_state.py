"""What tells the Python state that a forward, a hook or a loss may read from what it was in another call."""

from __future__ import annotations

import array
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autosplit.trace.borrowed.holders import Holder, Holders, Place
from autosplit.trace.borrowed.values import ENTRIES, difference, is_same_content, parts_of, referent

_DEPTH = 3
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_EXACT = frozenset(_VALUES) - {float, complex}
"""Types whose values are equal only where nothing tells them apart."""
_WRAPPERS = (tuple, functools.partial, types.MethodType, staticmethod, classmethod)
_FIXED = frozenset((tuple, frozenset, torch.Size, type, types.ModuleType, types.MethodType, types.BuiltinFunctionType))
"""Types whose values are what they were."""
_STATES = (np.ndarray, bytearray, array.array)
"""What has a state of its own in the map, and no parts."""
_LARGEST: dict[type, int] = {bytes: 8 * ENTRIES, frozenset: ENTRIES, list: ENTRIES, dict: ENTRIES}
"""The most bytes or entries of a content that is looked at."""


class Identity:
    """An object as part of a key: equal to the same object only, never to a later one at the same address.

    It is held by a weak reference, so that a key keeps no tensor alive; one that is gone equals nothing.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # it takes no weak reference
            self.value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Identity) and (value := self.value()) is not None and value is other.value()


class Look(NamedTuple):
    """A value's class, the keys of its parts, told by equality, and these, by identity: what a walk finds in it."""

    kind: type
    keys: Any
    """None: it has no parts that are looked at."""
    parts: Sequence[Any]


@dataclass(frozen=True)
class Walk:
    """What a walk through Python values has come to.

    Attributes:
        modules: the model's modules, by id.
        ties: numbers of modules, parameters and objects in the signature, by id.
        seen: the objects that were looked at already, by id: modules share configs.
        looked: what may change in itself, with what `look` gave, by id; None where it may be gone.
        loose: whether numbers and tensors may be others, but for whole numbers where ``integers`` count.
    """

    modules: dict[int, nn.Module]
    ties: dict[int, int]
    seen: dict[int, Any] = field(default_factory=dict)
    looked: dict[int, tuple[Any, Look] | None] = field(default_factory=dict)
    loose: bool = False
    integers: bool = True

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Walk:
        """Return a walk through the attributes of a model's modules."""
        by_id = {id(module): module for module in modules}
        return cls(by_id, {key: number for number, key in enumerate(by_id)})

    def named(self) -> tuple[Any, ...]:
        """Return functions, Python modules and classes that the walk has come to: what is in them is outside of it."""
        values = (*self.modules.values(), *self.seen.values())
        whole = (types.FunctionType, types.ModuleType)
        return tuple(dict.fromkeys(value if isinstance(value, whole) else type(value) for value in values))


def content(value: Any, walk: Walk, depth: int = _DEPTH) -> Any:
    """Return what tells whether a value is as it was: its class and parts, three levels deep, each object once.

    A function is told by its code: a loop may define the same one anew.
    """
    if type(value) in _EXACT and not walk.loose:
        return type(value), value
    if (value := referent(holder := value)) is not holder:
        walk.looked[id(holder)] = None
    if isinstance(value, _VALUES):
        return _known(value, walk)
    if isinstance(value, (np.ndarray, np.generic)):
        walk.looked[id(value)] = value, (known := look(value, walk.modules))
        return known.keys
    if id(value) in walk.seen or id(value) in walk.modules:
        return walk.ties.get(id(value))
    if isinstance(value, torch.Tensor):
        return held(value) if walk.loose and not isinstance(value, nn.Parameter) else (Identity(value), *held(value))
    if depth == 0:
        return None
    known = look(value, walk.modules)
    if type(value) not in _FIXED:
        walk.looked[id(value)] = value, known
    if isinstance(value, types.ModuleType):
        walk.seen[id(value)] = value
    if known.keys is None:
        return _whole(value)
    if not isinstance(value, (tuple, frozenset)):
        walk.seen[id(value)] = value
        walk.ties[id(value)] = len(walk.ties)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, (set, frozenset)) or (walk.loose and isinstance(value, list)):  # a log that grows is the same
        return type(value), frozenset(content(item, walk, depth - 1) for item in known.parts)
    pairs = zip(known.keys, known.parts, strict=True)
    return type(value), tuple((key, content(item, walk, depth - 1)) for key, item in pairs)


def look(value: Any, modules: Collection[int]) -> Look:
    """Return what a walk finds in a value itself: an array's contents, a function's code, or the parts of others."""
    if isinstance(value, (np.ndarray, np.generic)):
        small = value.size <= ENTRIES and not value.dtype.hasobject
        return Look(type(value), (value.dtype.str, value.shape, value.tobytes()) if small else None, ())
    if isinstance(value, types.FunctionType):  # what it names, and its defaults, are outside
        return Look(type(value), ("__code__",), (value.__code__,))
    if (parts := parts_of(value, modules)) is None:
        return Look(type(value), None, ())
    return Look(type(value), [str(key) for key, _ in parts], [item for _, item in parts])


def held(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a recording sees of a tensor besides its values; a lazy or nested one has no shape to ask for."""
    return tensor.dtype, None if is_lazy(tensor) or tensor.is_nested else tensor.shape, tensor.requires_grad


def _whole(value: Any) -> Any:
    """Return what tells a value without parts from others: a range or a date by equality, an operator by identity."""
    kind = type(value)
    if kind is slice:
        return kind, (value.start, value.stop, value.step)
    has_value = kind.__hash__ is not None and any("__eq__" in vars(base) for base in kind.__mro__[:-1])
    return (kind, value) if has_value and kind.__module__ in sys.stdlib_module_names else Identity(value)


def _known(value: Any, walk: Walk) -> Any:
    """Return what tells a number, text, dtype or device from another by its value."""
    if walk.loose and isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return (type(value), value) if walk.integers and isinstance(value, int) else type(value)
    return (float, repr(value)) if isinstance(value, float) else (type(value), value)  # a NaN is equal to itself here


class _Entry(NamedTuple):
    """An entry of a holder outside of the modules: the place of the holder, and its own."""

    whole: Place
    place: Place
    content: Any
    is_live: bool

    def is_at(self, places: Collection[Place]) -> bool:
        return self.place in places or self.whole in places


class OutsideValues:
    """Reads the values that functions, also those of classes, name; walks them anew only where one is another.

    With ``loose`` numbers and tensors may be others, and with ``integers`` whole numbers not.
    """

    def __init__(self, *, loose: bool = False, integers: bool = True) -> None:
        self._loose, self._integers = loose, integers
        self._roots: tuple[Any, ...] = ()
        self._map = Holders(())
        self._contents: list[tuple[Holder, Any]] = []
        self._entries: list[_Entry] = []
        self._told: dict[Collection[Place], tuple[Any, ...]] = {}

    def signature(
        self,
        roots: Sequence[Any],
        hooks: Sequence[Any] = (),
        *,
        without: Collection[Place] = (),
        skipped: Collection[int] = (),
    ) -> tuple[Any, ...]:
        """Return what tells the values from others, but for those at the places ``without``.

        Modules ``skipped`` are told by their ids: what is in them is looked at elsewhere.
        """
        every = (*roots, *hooks)
        if not is_same_content(self._roots, every) or any(map(self._counts, self._changes())):
            self._roots, self._map = every, Holders((), roots, skipped, hooks)
            self._read()
        if without not in self._told:
            kept = (entry for entry in self._entries if not entry.is_at(without))
            self._told[without] = tuple((entry.place, entry.content) for entry in kept)
        return self._told[without]

    def left_out(self, without: Collection[Place]) -> tuple[Any, ...]:
        """Return what a signature leaves out of the values that recorded code, which runs no more, may read."""
        left = (entry for entry in self._entries if not entry.is_live and entry.is_at(without)) if without else ()
        return tuple((entry.place, entry.content) for entry in left)

    def may_name(self, name: str) -> bool:
        """Tell whether code that was walked may take an attribute of this name."""
        return self._map.may_name(name)

    def changed(self) -> frozenset[Place]:
        """Return the places where values are others than when the signature was read."""
        places = [holder.places(before, difference(before, now)) for holder, before, now in self._changes()]
        return frozenset[Place]().union(*places)

    def _changes(self) -> Iterator[tuple[Holder, Any, Any]]:
        """Yield the holders in which something is another object, with what was and what is in them."""
        for holder, before in self._contents:
            if not is_same_content(before, now := holder.read()):
                yield holder, before, now

    def _counts(self, change: tuple[Holder, Any, Any]) -> bool:
        holder, before, now = change
        moved = isinstance(now, dict) and not holder.attributes and list(before) != list(now)
        return moved or any(self._map.may_read(holder, key) for key in difference(before, now))

    def _read(self) -> None:
        self._told.clear()
        self._contents = [(holder, holder.read()) for holder in self._map.found]
        self._contents = [(h, now) for h, now in self._contents if len(now) <= _LARGEST[type(now)] and not h.draws]
        walk = Walk({}, {}, loose=self._loose, integers=self._integers)
        self._entries = [_Entry(("", ""), ("", ""), self._entry(root, walk), True) for root in self._roots]
        for holder, now in self._contents:
            entries = [(holder.place_of(k), self._entry(v, walk)) for k, v in self._map.entries(holder, now)]
            if self._loose and isinstance(now, list):  # a log that grows is the same one
                entries = [(holder.place_of(0), frozenset(value for _, value in entries))]
            is_live = holder.of_hook or holder.of_function
            self._entries += [_Entry(("", holder.name), *entry, is_live) for entry in entries]

    def _entry(self, value: Any, walk: Walk) -> Any:
        """Return what tells an entry from another; what is in a list, dict or object is in entries of its own."""
        value = referent(value)
        if isinstance(value, types.FunctionType):
            return value.__code__
        if isinstance(value, _WRAPPERS):
            return type(value), tuple(self._entry(item, walk) for _, item in parts_of(value, ()) or ())
        if isinstance(value, frozenset):
            return frozenset(self._entry(item, walk) for item in value)
        followed = isinstance(value, _STATES) or parts_of(value, ()) is not None
        if followed and not isinstance(value, (type, torch.Tensor)) and self._map.has(value):
            return type(value), walk.ties.setdefault(id(value), len(walk.ties))
        known = isinstance(value, (*_VALUES, torch.Tensor, np.generic))
        return content(value, walk) if known else _whole(value)
