"""Objects as parts of a key."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Identity:
    """An object as part of a key: equal to the same object only, never to a later one at the same address.

    It is held by a weak reference, so that a key keeps no tensor alive; one that is gone equals nothing.
    """

    __slots__ = ("_hash", "_of")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._of: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # it takes no weak reference
            self._of = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Identity) and (value := self._of()) is not None and value is other._of()
