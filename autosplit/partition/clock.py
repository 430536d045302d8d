"""The time that a search may take. Without a limit no clock is read, so that the answer depends on the input alone."""

from __future__ import annotations

import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """The search ends with what it has."""


@dataclass(frozen=True)
class Clock:
    """Runs until ``deadline`` on the clock of time.monotonic, or for ever."""

    deadline: float | None = None

    @classmethod
    def start(cls, limit_s: float | None) -> Clock:
        """Return a clock that runs for so many seconds from now on, without a limit for None."""
        return cls(None if limit_s is None else time.monotonic() + limit_s)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def check(self) -> None:
        """Raise OutOfTime when the time is over."""
        if self.over:
            raise OutOfTime


FOREVER = Clock()
"""No limit."""
