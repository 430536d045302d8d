"""Moments of a save at which a process is killed."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from typing import Any, NamedTuple

from autosplit.distributed.checkpoint import save


class Moment(NamedTuple):
    """When a rank is killed: at an event of Python's profiler, in any thread."""

    rank: int
    share: float = 1.0
    event: str = ""
    function: str = ""
    count: int = 1


class Watch:
    """Counts events while a checkpoint is saved; kills this process at one of them."""

    def __init__(self) -> None:
        self.seen = 0
        self._last = math.inf
        self._function: tuple[str, str] | None = None

    def arm(self, moment: Moment) -> None:
        """Kill at a share of the events of the last save, or when a function is called or returns."""
        self._last = moment.count if moment.function else moment.share * self.seen
        self._function = (moment.event, moment.function) if moment.function else None

    def __call__(self, _frame: Any, event: str, function: Any) -> None:
        self.seen += self._function in (None, (event, getattr(function, "__name__", "")))
        if self.seen >= self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, *args: Any, **options: Any) -> None:
        self.seen = 0
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            save(*args, **options).wait()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
