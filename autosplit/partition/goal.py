"""What a chain of stages is to make least, and within which limits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal


class OutOfTime(Exception):
    """The search ends with what it has."""


@dataclass(frozen=True)
class Timer:
    """The time that a search may take: without a limit no clock is read, so the answer depends on the input alone.

    It runs until ``deadline`` on the clock of time.monotonic.
    """

    deadline: float | None = None

    @classmethod
    def start(cls, limit_s: float | None) -> Timer:
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


FOREVER = Timer()
"""No limit."""


@dataclass(frozen=True)
class Goal:
    """What to minimise over the stages, the maximum load or the maximum bytes, and within which limits.

    Attributes:
        stages: how many there are.
        least: what is made least.
        load_limit_s, capacity_bytes: no stage may have more.
        empty: stages without a group are allowed.
    """

    stages: int
    least: Literal["load", "bytes"] = "load"
    load_limit_s: float = math.inf
    capacity_bytes: float = math.inf
    empty: bool = False

    def relaxed(self) -> Goal:
        """Return the goal without a capacity: no load is larger, so its best value is a lower bound."""
        return replace(self, capacity_bytes=math.inf)
