"""What tells the Python state that a forward, a hook or a loss may read from what it was in another call."""

from __future__ import annotations

import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autosplit.trace.borrowed.contents import Holder, Place
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.values import STATES, WRAPPERS, difference, is_same_content, parts_of, referent

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_EXACT = frozenset(_VALUES) - {float, complex}
"""Types whose values are equal only where nothing tells them apart."""


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


class Contents:
    """Tells values from what they were in another call, by a map of Python state.

    A function is told by its code: a loop may define the same one anew.

    Attributes:
        read: the holders in the map and what is in them, None where that is too large; without random generators.
        ties: numbers of objects that values share, by id.
        may_be_gone: whether a value that was told is held weakly.
    """

    def __init__(
        self, held: Holders, ties: dict[int, int], *, nested: bool, loose: bool = False, integers: bool = True
    ) -> None:
        """``nested``: an object is described once, with all its parts; otherwise its parts are described elsewhere.

        With ``loose`` numbers and tensors are described by their kind only; with ``integers`` whole numbers by value.
        """
        self.map, self.ties, self._nested, self._loose, self._integers = held, ties, nested, loose, integers
        self.read = [(holder, holder.look()) for holder in held.found if not holder.draws]
        self.may_be_gone = False
        self._of: defaultdict[int, list[Any]] = defaultdict(list)
        for holder, now in self.read if nested else ():
            self._of[id(holder.owner)].append(now)

    def of(self, value: Any) -> Any:
        """Return what tells a value from others: its class and what it is or has."""
        if type(value) in _EXACT and not self._loose:
            return type(value), value
        if (value := referent(reference := value)) is not reference:
            self.may_be_gone = True
        if isinstance(value, _VALUES):
            return self._known(value)
        if isinstance(value, np.generic):
            return type(value), value.dtype.str, value.tobytes()
        if isinstance(value, torch.Tensor):
            if id(value) in self.ties:
                return self.ties[id(value)]
            by_kind = self._loose and not isinstance(value, nn.Parameter)
            return held(value) if by_kind else (Identity(value), *held(value))
        if isinstance(value, types.FunctionType):  # what it names, and its defaults, are outside
            return value.__code__
        if isinstance(value, (tuple, *WRAPPERS)):
            return type(value), tuple((str(key), self.of(item)) for key, item in parts_of(value, ()) or ())
        if isinstance(value, frozenset):
            return frozenset(map(self.of, value))
        has_parts = isinstance(value, STATES) or parts_of(value, ()) is not None
        if self._nested:
            return self._with_parts(value) if has_parts or id(value) in self.ties else _whole(value)
        followed = has_parts and not isinstance(value, type) and self.map.has(value)
        return (type(value), self.ties.setdefault(id(value), len(self.ties))) if followed else _whole(value)

    def _with_parts(self, value: Any) -> Any:
        """Return what tells an object and what it has from others; its number where that was told before."""
        if id(value) in self.ties:
            return self.ties[id(value)]
        contents: Sequence[Any] = self._of.get(id(value), ())
        if not contents or None in contents:  # it is too deep, or too large
            return None
        self.ties[id(value)] = len(self.ties)
        if isinstance(contents[0], bytes):
            return type(value), contents[0]
        if isinstance(value, set) or (self._loose and isinstance(value, list)):  # a log that grows is the same
            return type(value), frozenset(map(self.of, contents[0]))
        pairs = [pair for now in contents for pair in (now.items() if isinstance(now, dict) else enumerate(now))]
        return type(value), tuple((str(key), self.of(item)) for key, item in pairs)

    def _known(self, value: Any) -> Any:
        """Return what tells a number, text, dtype or device from another by its value."""
        if self._loose and isinstance(value, (int, float, complex)) and not isinstance(value, bool):
            return (type(value), value) if self._integers and isinstance(value, int) else type(value)
        return (float, repr(value)) if isinstance(value, float) else (type(value), value)  # a NaN is equal to itself


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
        known = is_same_content(self._roots, every) and not self._map.misses()
        if not known or any(map(self._counts, self._changes())):
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
        told = Contents(self._map, {}, nested=False, loose=self._loose, integers=self._integers)
        self._contents = [(holder, now) for holder, now in told.read if now is not None]
        self._entries = [_Entry(("", ""), ("", ""), told.of(root), True) for root in self._roots]
        for holder, now in self._contents:
            entries = [(holder.place_of(key), told.of(value)) for key, value in self._map.entries(holder, now)]
            if self._loose and isinstance(now, list):  # a log that grows is the same one
                entries = [(holder.place_of(0), frozenset(value for _, value in entries))]
            is_live = holder.of_hook or holder.of_function
            self._entries += [_Entry(("", holder.name), *entry, is_live) for entry in entries]
