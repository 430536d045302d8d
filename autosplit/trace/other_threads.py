"""The lock of recordings, and what other threads draw while one is made.

A recording seeds and rewinds the generators of Python and numpy, which belong to the process. Other threads draw from
copies of them meanwhile, and the generators go on from there afterwards. What a thread has imported by its own name
(``from random import random``) and torch's own generator cannot be kept apart.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np


class Recording:
    """The lock that is held while a model is recorded: that patches torch, `random` and `numpy.random`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._apart = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._apart.enter_context(_drawing_apart())

    def __exit__(self, *error: Any) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                self._apart.close()
        finally:
            self._lock.release()


def for_this_thread(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ``own`` in this thread and ``plain`` in any other."""
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == here else plain)(*args, **kwargs)

    return call


@contextlib.contextmanager
def _drawing_apart() -> Iterator[None]:
    """Let other threads draw from copies of the generators, and put the generators where these are at the end."""
    generators = (_Apart(random, random.Random()), _Apart(np.random, np.random.RandomState()))
    with contextlib.ExitStack() as stack:
        for own in generators:
            stack.enter_context(own.patched())
        for own in generators:
            own.begin()
        try:
            yield
        finally:
            for own in generators:
                own.end()


class _Apart:
    """A module's generator, which this thread has for itself, and a copy for all other threads."""

    def __init__(self, module: Any, copy: Any) -> None:
        self.module, self.copy, self.lock, self.begun = module, copy, threading.Lock(), False
        get, put = ("getstate", "setstate") if module is random else ("get_state", "set_state")
        self.state, self.set_state = getattr(module, get), getattr(module, put)
        self.state_of_copy, self.set_state_of_copy = getattr(copy, get), getattr(copy, put)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Tell threads apart in all functions that draw."""
        with contextlib.ExitStack() as stack:
            for name, plain in list(vars(self.module).items()):
                if callable(plain) and not isinstance(plain, type) and name[0] != "_" and hasattr(self.copy, name):
                    other = partial(self._draw, plain, getattr(self.copy, name))
                    stack.enter_context(patch.object(self.module, name, for_this_thread(plain, other)))
            yield

    def _draw(self, plain: Callable[..., Any], copied: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return (copied if self.begun else plain)(*args, **kwargs)

    def begin(self) -> None:
        """Let other threads draw from the copy."""
        with self.lock:
            self.set_state_of_copy(self.state())
            self.begun = True

    def end(self) -> None:
        """Let them draw from the generator again, which goes on where the copy is."""
        with self.lock:
            self.set_state(self.state_of_copy())
            self.begun = False
