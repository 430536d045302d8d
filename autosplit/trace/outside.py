"""Values outside of the modules that a model's own functions read: globals, closures, defaults, class attributes.

They are part of a call's signature: a global that the caller changes between two calls makes another recording.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autosplit.trace.holders import Holder, Holders, difference
from autosplit.trace.identity import Identity
from autosplit.trace.python_state import Place

_LONGEST = 1024
"""Containers with more entries than this are known by their identity only."""
_VALUES = (bool, int, float, complex, str, bytes, type(None))


class OutsideValues:
    """Reads the values that the functions of some classes name; walks them anew only where one is another."""

    def __init__(self) -> None:
        self._kinds: frozenset[type] = frozenset()
        self._holders: list[tuple[Holder, Any]] = []
        self._parts: dict[Place, list[Any]] = {}

    def signature(self, kinds: frozenset[type], without: Collection[Place]) -> tuple[Any, ...]:
        """Return what tells the values from others, but for those at the places ``without``."""
        if kinds != self._kinds or any(difference(content, holder.read()) for holder, content in self._holders):
            self._walk(kinds)
        return tuple(part for place, parts in self._parts.items() if place not in without for part in parts)

    def changed(self) -> frozenset[Place]:
        """Return the places where values are others than when the signature was read."""
        return frozenset(h.place for h, content in self._holders if difference(content, h.read()))

    def _walk(self, kinds: frozenset[type]) -> None:
        found = Holders((), sorted(kinds, key=lambda kind: kind.__qualname__)).found
        pairs = [(holder, holder.read()) for holder in found if not holder.of_hook]
        self._kinds = kinds
        self._holders = [(h, content) for h, content in pairs if isinstance(content, (dict, list)) and _short(content)]
        self._parts = {}
        for holder, content in self._holders:
            self._parts.setdefault(holder.place, []).append(_frozen(content))


def _short(content: Any) -> bool:
    return len(content) <= _LONGEST


def _frozen(content: Mapping[Any, Any] | list[Any]) -> tuple[Any, ...]:
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
    return tuple((_part(key), _part(value)) for key, value in pairs if not str(key).startswith("__"))


def _part(value: Any) -> Any:
    if isinstance(value, float):
        return float, repr(value)  # a NaN is equal to itself here
    return (type(value), value) if isinstance(value, _VALUES) else Identity(value)
