"""A cache as flat tensors: what a recording of a decode step takes and gives, and the object that callers hold.

    DynamicCache(layers=[...])  ─► layout: structure, constants, which leaves are tensors or counts
                                   tensors: keys, values, ... of each layer; a count n is an empty tensor [0, n]

A number that a call changes, such as how many tokens a layer has seen, is a size: one recording serves all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """What a cache is made of besides tensors; ``leaves`` are constants and slots."""

    structure: Structure
    leaves: tuple[Any, ...]

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a new cache of these tensors, those of counts too."""
        each = iter(tensors)
        return self.structure([_value(leaf, each) for leaf in self.leaves])

    def rebuild(self, tensors: Sequence[torch.Tensor], before: Sequence[Any]) -> Any:
        """Return what a call made of the cache whose leaves were ``before``, by the tensors that the call returned."""
        each = iter(tensors)
        return self.structure([
            before[position] if leaf is Slot.SAME else _value(leaf, each) for position, leaf in enumerate(self.leaves)
        ])


def _value(leaf: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if leaf is Slot.TENSOR:
        return next(tensors)
    return next(tensors).shape[1] if leaf is Slot.COUNT else leaf


class Layouts:
    """The layouts of a model's caches, numbered: a recording knows that of its result by the number."""

    def __init__(self) -> None:
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._counts: dict[Structure, frozenset[int]] = {}

    def __getitem__(self, number: int) -> Layout:
        return self._layouts[number]

    def apart(self, cache: Any) -> tuple[int, list[torch.Tensor], list[Any]]:
        """Return the number of a cache's layout, its tensors, those of counts too, and all of its leaves."""
        leaves, structure = take_apart(cache)
        counts = self._counts.get(structure, ())
        slots, tensors = [], []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                slots.append(Slot.TENSOR)
                tensors.append(leaf)
            elif position in counts:
                slots.append(Slot.COUNT)
                tensors.append(torch.empty(0, leaf))
            else:
                slots.append(leaf)
        return self._number(Layout(structure, tuple(slots))), tensors, leaves

    def after(self, cache: Any, before: Any) -> tuple[int, list[torch.Tensor]]:
        """Return the layout and the new tensors of a cache behind a call, by the leaves that the call began with."""
        leaves, structure = take_apart(cache)
        anchor = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        earlier = before if len(before) == len(leaves) else [None] * len(leaves)
        counts = set(self._counts.get(structure, ()))
        slots, tensors = [], []
        for position, (leaf, old) in enumerate(zip(leaves, earlier, strict=True)):
            if isinstance(leaf, torch.Tensor):
                anchor = leaf
                slots.append(Slot.SAME if leaf is old else Slot.TENSOR)
                tensors += [] if leaf is old else [leaf]
            elif is_number(leaf) and (position in counts or not (leaf is old or leaf == old)):
                counts.add(position)
                slots.append(Slot.COUNT)
                tensors.append(anchor.new_empty(0, leaf))
            else:
                slots.append(leaf)
        self._counts[structure] = frozenset(counts)
        return self._number(Layout(structure, tuple(slots))), tensors

    def _number(self, layout: Layout) -> int:
        if layout not in self._numbers:
            self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return self._numbers[layout]


def is_number(leaf: Any) -> bool:
    """Tell whether a leaf is an integer, or one that is a symbol in a recording."""
    return isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)


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
        if isinstance(before, list) and (items := items_of(now)):
            before[:] = items
    else:
        return now
    return before
