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
            Slot.TENSOR if isinstance(leaf, torch.Tensor) else Slot.COUNT if at in counts and _is_number(leaf) else leaf
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
            elif _is_number(leaf) and (position in counts or not (leaf is old or leaf == old)):
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


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)


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
        walk._into(cache)
        read = [space[name] for space, name in walk._leaves]
        return walk if len(read) == len(leaves) and all(map(operator.is_, read, leaves)) else None

    def _into(self, value: Any) -> None:
        if is_object(value):
            spaces: list[Any] = [] if items_of(value) is None else [value]
            spaces.append(vars(value))
        else:
            spaces = [value]
        for space in spaces:
            self._sizes.append((space, len(space)))
            for name in range(len(space)) if isinstance(space, list) else list(space):
                item = space[name]
                if is_object(item) or type(item) in (list, dict):
                    self._inner.append((space, name, item))
                    self._into(item)
                else:
                    self._leaves.append((space, name))

    def again(self, slots: Sequence[Any]) -> Apart | None:
        """Return the cache taken apart again; None where anything but tensors and counts is another."""
        if any(
            space[name] is not item for space, name, item in self._inner if name in space or isinstance(space, list)
        ):
            return None
        if any(len(space) != size for space, size in self._sizes):
            return None
        leaves = [space[name] for space, name in self._leaves]
        for leaf, slot in zip(leaves, slots, strict=True):
            if slot is Slot.TENSOR:
                if not isinstance(leaf, torch.Tensor):
                    return None
            elif slot is Slot.COUNT:
                if type(leaf) is not int:
                    return None
            elif leaf is not slot and (type(leaf) is not type(slot) or leaf != slot):
                return None
        return Apart(self.number, _tensors(leaves, slots), leaves)

    def write(self, leaves: Sequence[Any]) -> None:
        """Put leaves in their places."""
        for (space, name), leaf in zip(self._leaves, leaves, strict=True):
            space[name] = leaf


def adopt(before: Any, now: Any) -> Any:
    """Give the objects, lists and dicts of a cache the content of another; return what stands for that."""
    if type(before) is not type(now):
        return now
    if isinstance(before, list):
        before[:] = [adopt(*pair) for pair in zip(before, now, strict=False)] + now[len(before) :]
    elif isinstance(before, dict):
        both = {name: adopt(before[name], value) if name in before else value for name, value in now.items()}
        before.clear()
        before.update(both)
    elif is_object(before):
        vars(before).update({n: adopt(vars(before).get(n), value) for n, value in attributes_of(now).items()})
    else:
        return now
    return before
