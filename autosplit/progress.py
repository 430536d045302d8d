"""How far long work has come, told to whoever listens: the command line, and a pipe that records and plans.

    with phase("measuring", total=len(nodes)):
        for done, node in enumerate(nodes):
            update(done)

`phase` decorates functions too. Phases may lie inside each other; `update` speaks of the innermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Bar(Protocol):
    """One phase as it is shown."""

    def moved(self, done: int, total: int | None) -> None:
        """Show that so much of ``total`` is done; None: what the phase began with."""

    def ended(self) -> None:
        """Take the phase away."""


class Listener(Protocol):
    """Who shows phases."""

    def began(self, name: str, total: int | None) -> Bar:
        """Show a phase that begins; ``total`` is what it counts up to, where that is known."""


_LISTENER: ContextVar[Listener | None] = ContextVar("autosplit_listener", default=None)
_BAR: ContextVar[Bar | None] = ContextVar("autosplit_bar", default=None)


@contextmanager
def phase(name: str, *, total: int | None = None) -> Iterator[None]:
    """Tell that work of this name begins, and ends with the block or the decorated function."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    bar = listener.began(name, total)
    token = _BAR.set(bar)
    try:
        yield
    finally:
        _BAR.reset(token)
        bar.ended()


def update(done: int, total: int | None = None) -> None:
    """Tell how much of the innermost phase is done, and of how much where that was not known before."""
    bar = _BAR.get()
    if bar is not None:
        bar.moved(done, total)


def has_listener() -> bool:
    """Tell whether somebody listens."""
    return _LISTENER.get() is not None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of all phases inside the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
