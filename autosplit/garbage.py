"""Python's garbage collector while much is made and little of it is garbage: importing torch, tracing, planning.

Every 700 new objects it looks through the youngest, and now and then through all that a process has, which torch and a
large model make many of: a fifth of the time of a plan. Here it still comes, but rarely.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 100_000
"""How many more objects there are made than freed between two looks at the youngest."""
COMMAND_OBJECTS = 5_000_000
"""The same of a command that allocates nothing and ends with its answer: some megabytes more, and no look."""


@contextmanager
def rare_collections(*, objects: int = _OBJECTS, look_back: bool = True) -> Iterator[None]:
    """Let the collector come rarely inside the block or the decorated function, and as before afterwards.

    Without ``look_back`` what was made inside counts as old at the end and is not looked through at once: for a command
    that is about to end. It takes what was frozen before (`gc.freeze`) with it, so it is for a process of one's own.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], objects), *before[1:])
    try:
        yield
    finally:
        if not look_back:
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
