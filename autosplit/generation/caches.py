"""A cache as flat tensors: what a recording of a decode step takes and gives, and the object that callers hold.

    DynamicCache(layers=[...])  ─► layout: structure, constants, which leaves are tensors or counts
                                   tensors: keys, values, ... of each layer; a count n is an empty tensor [1, 0, n]

A number that a call changes, such as how many tokens a layer has seen, is a size: one recording serves all of them.
"""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from autosplit.errors import InputError
from autosplit.trace.inputs.objects import Structure, attributes_of, is_object, items_of, take_apart


class Slot(enum.Enum):
    """What stands at a leaf of a cache that is no constant."""

    TENSOR = 0
    COUNT = 1
    """A number that calls change."""
    SAME = 2
    """A tensor of the cache before the call."""


@dataclass(frozen=True)
class Layout:
    """What a cache is made of besides tensors; ``slots`` are constants, and for other leaves what stands there."""

    structure: Structure
    slots: tuple[Any, ...]

    def leaves(self, tensors: Iterable[torch.Tensor], before: Sequence[Any] = ()) -> list[Any]:
        """Return the leaves of a cache by its tensors, those of counts too, and the leaves ``before`` the call."""
        each = iter(tensors)
        return [
            before[position] if slot is Slot.SAME else _leaf(slot, each) for position, slot in enumerate(self.slots)
        ]

    def build(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return a new cache of these tensors."""
        return self.structure(self.leaves(tensors))


def _leaf(slot: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if slot is Slot.TENSOR:
        return next(tensors)
    return next(tensors).shape[2] if slot is Slot.COUNT else slot


class Apart(NamedTuple):
    """A cache taken apart: the number of its layout, its tensors, those of counts too, and all of its leaves."""

    number: int
    tensors: list[torch.Tensor]
    leaves: list[Any]


class Layouts:
    """The layouts of a model's caches, numbered: a recording knows that of its result by the number."""

    def __init__(self) -> None:
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._numbering = threading.Lock()
        self._counts: dict[Structure, frozenset[int]] = {}
        self._walks: WeakKeyDictionary[Any, _Walk] = WeakKeyDictionary()

    def apart(self, cache: Any) -> Apart:
        """Take a cache apart."""
        walk = self._walks.get(cache) if _is_hashable(cache) else None
        if walk is not None and (known := walk.again(self._layouts[walk.number].slots)) is not None:
            return known
        leaves, structure = take_apart(cache)
        counts = self._counts.get(structure, ())
        kinds = (
            Slot.TENSOR if isinstance(leaf, torch.Tensor) else Slot.COUNT if at in counts and _is_count(leaf) else leaf
            for at, leaf in enumerate(leaves)
        )
        number = self._number(Layout(structure, slots := tuple(kinds)))
        if _is_hashable(cache):
            self._walks.pop(cache, None)
            if (walk := _Walk.of(cache, leaves, number)) is not None:
                self._walks[cache] = walk
        return Apart(number, _tensors(leaves, slots), leaves)

    def after(self, cache: Any, before: Sequence[Any]) -> tuple[int, list[torch.Tensor]]:
        """Return the layout and the new tensors of a cache behind a call, by the leaves that the call began with."""
        leaves, structure = take_apart(cache)
        earlier = before if len(before) == len(leaves) else [None] * len(leaves)
        counts = set(self._counts.get(structure, ()))
        slots: list[Any] = []
        tensors = []
        for position, (leaf, old) in enumerate(zip(leaves, earlier, strict=True)):
            if isinstance(leaf, torch.Tensor):
                slots.append(Slot.SAME if leaf is old else Slot.TENSOR)
                tensors += [] if leaf is old else [leaf]
            elif _is_count(leaf) and (position in counts or not (leaf is old or leaf == old)):
                counts.add(position)
                slots.append(Slot.COUNT)
                tensors.append(torch.empty(1, 0, leaf))
            else:
                slots.append(leaf)
        self._counts[structure] = frozenset(counts)
        return self._number(Layout(structure, tuple(slots))), tensors

    def put(self, cache: Any, before: Apart | None, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Give a cache what a call made of it; return it, or a new one where there was none before."""
        layout = self._layouts[number]
        leaves = layout.leaves(tensors, () if before is None else before.leaves)
        if before is None:
            return layout.structure(leaves)
        if layout.structure is self._layouts[before.number].structure and (walk := self._walks.get(cache)) is not None:
            walk.write(leaves)
            return cache
        return adopt(cache, layout.structure(leaves))

    def release(self, cache: Any, before: Apart, number: int) -> None:
        """Drop the tensors of a cache that a call replaces whose result has the layout of this number."""
        slots = self._layouts[number].slots
        if len(slots) == len(before.leaves) and (walk := self._walks.get(cache)) is not None:
            before.tensors.clear()
            before.leaves[:] = [leaf if s is Slot.SAME else None for leaf, s in zip(before.leaves, slots, strict=True)]
            walk.write(before.leaves)

    def __getitem__(self, number: int) -> Layout:
        return self._layouts[number]

    def _number(self, layout: Layout) -> int:
        try:
            hash(layout)
        except TypeError as error:
            raise InputError(
                f"a cache holds a constant that cannot be followed ({error}): keep tensors, numbers and containers of "
                "them in it, or generate with the model itself, which pipe.unsplit() gives back"
            ) from None
        with self._numbering:
            if layout not in self._numbers:
                same = next((each.structure for each in self._layouts if each.structure == layout.structure), None)
                self._numbers[layout] = len(self._layouts)
                self._layouts.append(layout if same is None else Layout(same, layout.slots))
            return self._numbers[layout]


def _tensors(leaves: Sequence[Any], slots: Sequence[Any]) -> list[torch.Tensor]:
    return [
        leaf if slot is Slot.TENSOR else torch.empty(1, 0, leaf)
        for leaf, slot in zip(leaves, slots, strict=True)
        if slot is Slot.TENSOR or slot is Slot.COUNT
    ]


def _is_count(leaf: Any) -> bool:
    return isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool) and bool(leaf >= 0)


def _is_hashable(value: Any) -> bool:
    kind: Any = type(value)
    return bool(kind.__hash__ == object.__hash__)


class _Walk:
    """Where the leaves of a cache are, as long as its objects, lists and dicts are the same.

    Attributes:
        number: that of the cache's layout when it was taken apart last.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._inner: list[tuple[Any, Any, Any]] = []
        """Each container with where it stands."""
        self._sizes: list[tuple[Any, int]] = []
        self._leaves: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, cache: Any, leaves: Sequence[Any], number: int) -> _Walk | None:
        """Return the walk of a cache with these leaves; None where it has other containers."""
        walk = cls(number)
        if not walk._into(cache, set()):
            return None
        read = [space[name] for space, name in walk._leaves]
        return walk if len(read) == len(leaves) and all(map(operator.is_, read, leaves)) else None

    def _into(self, value: Any, seen: set[int]) -> bool:
        """Note where the leaves below a container are; tell whether all are in dicts and lists that are met once."""
        if id(value) in seen or (is_object(value) and not (hasattr(value, "__dict__") and items_of(value) is None)):
            return False
        seen.add(id(value))
        for space in [vars(value) if is_object(value) else value]:
            self._sizes.append((space, len(space)))
            for name in range(len(space)) if isinstance(space, list) else list(space):
                item = space[name]
                if is_object(item) or type(item) in (list, dict):
                    self._inner.append((space, name, item))
                    if not self._into(item, seen):
                        return False
                else:
                    self._leaves.append((space, name))
        return True

    def again(self, slots: Sequence[Any]) -> Apart | None:
        """Return the cache taken apart again; None where anything but tensors and counts is another."""
        if any(len(space) != size for space, size in self._sizes):
            return None
        try:
            same = all(space[name] is item for space, name, item in self._inner)
            leaves = [space[name] for space, name in self._leaves]
        except (KeyError, IndexError):
            return None
        if not same:
            return None
        for leaf, slot in zip(leaves, slots, strict=True):
            if slot is Slot.TENSOR:
                if not isinstance(leaf, torch.Tensor):
                    return None
            elif slot is Slot.COUNT:
                if type(leaf) is not int or leaf < 0:
                    return None
            elif leaf is not slot and (type(leaf) is not type(slot) or leaf != slot):
                return None
        return Apart(self.number, _tensors(leaves, slots), leaves)

    def write(self, leaves: Sequence[Any]) -> None:
        """Put leaves in their places."""
        for (space, name), leaf in zip(self._leaves, leaves, strict=True):
            space[name] = leaf


def adopt(before: Any, now: Any, seen: set[int] | None = None) -> Any:
    """Give the objects, lists and dicts of a cache the content of another; return what stands for that."""
    seen = set() if seen is None else seen
    if type(before) is not type(now) or id(before) in seen:
        return before if id(before) in seen else now
    if is_object(before):
        seen.add(id(before))
        earlier, attributes, items = attributes_of(before), attributes_of(now), items_of(now)
        for name in earlier.keys() - attributes.keys():
            object.__delattr__(before, name)
        for name, value in attributes.items():
            object.__setattr__(before, name, adopt(earlier.get(name), value, seen))
        if items is not None and not isinstance(before, tuple):
            _fill(before, items, seen)
    elif isinstance(before, (list, dict)):
        seen.add(id(before))
        _fill(before, now, seen)
    else:
        return now
    return before


def _fill(before: Any, now: Any, seen: set[int]) -> None:
    """Give a list or a dict the items of another."""
    if isinstance(before, list):
        before[:] = [adopt(*pair, seen) for pair in zip(before, now, strict=False)] + now[len(before) :]
    else:
        both = {name: adopt(dict.get(before, name), value, seen) for name, value in now.items()}
        dict.clear(before)
        dict.update(before, both)
