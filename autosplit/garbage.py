"""Python's garbage collector while much is made and little of it is garbage: tracing and planning.

Every 700 new objects it looks through the youngest, and now and then through all that a process has, which torch and a
large model make many of: a third of the time of a large plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 100_000
"""How many more objects there are made than freed between two looks at the youngest."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector come rarely inside the block or the decorated function, and as before afterwards."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
