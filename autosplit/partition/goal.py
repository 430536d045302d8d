"""What a chain of stages is to make least, within which limits, and on which devices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from autosplit.partition.problem import Problem


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
class Terms:
    """How many times as long as the problem says works take on a device, and tensors on the links next to it."""

    work: float = 1.0
    net: float = 1.0


PLAIN = Terms()


@dataclass(frozen=True)
class CostBasis:
    """What the cost of one stage depends on: stages on an equal basis cost the same."""

    terms: Terms
    capacity_bytes: float
    in_flight: int


@dataclass(frozen=True)
class Goal:
    """What to minimise over the stages, the maximum load or the maximum bytes, and within which limits.

    Attributes:
        in_flight: one entry per stage, and so how many stages there are.
        least: what is made least, "load" or "bytes".
        load_limit_s: no stage may have more.
        capacity_bytes: per stage; None where bytes have no limit.
        empty: stages without a group are allowed.
        terms: per stage; None where all are plain.
    """

    in_flight: tuple[int, ...]
    least: str = "load"
    load_limit_s: float = math.inf
    capacity_bytes: tuple[float, ...] | None = None
    empty: bool = False
    terms: tuple[Terms, ...] | None = None

    @classmethod
    def of(cls, problem: Problem, *, stages: int, least: str = "load", empty: bool = False) -> Goal:
        """Return the problem's goal for so many stages; ``least="bytes"`` has no capacities."""
        terms = tuple(_terms(problem, stage) for stage in range(stages))
        capacity = None
        if problem.capacity_bytes is not None and least == "load":
            capacity = tuple(math.inf if limit is None else limit for limit in problem.capacity_bytes[:stages])
        return cls(
            in_flight=problem.in_flight(stages),
            least=least,
            capacity_bytes=capacity,
            empty=empty,
            terms=None if all(each == PLAIN for each in terms) else terms,
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.in_flight)

    @property
    def needs_bytes(self) -> bool:
        """Whether bytes matter at all."""
        return self.least == "bytes" or self.capacity_bytes is not None

    def cost_basis(self, stage: int) -> CostBasis:
        """Return what a stage costs by."""
        return CostBasis(
            terms=PLAIN if self.terms is None else self.terms[stage],
            capacity_bytes=math.inf if self.capacity_bytes is None else self.capacity_bytes[stage],
            in_flight=self.in_flight[stage] if self.needs_bytes else 0,
        )

    def relaxed(self) -> Goal:
        """Return the goal without capacities: no load is larger, so its best value is a lower bound."""
        return replace(self, capacity_bytes=None)


def _terms(problem: Problem, stage: int) -> Terms:
    link = max((problem.links or ())[max(stage - 1, 0) : stage + 1], default=1.0)
    return Terms(1.0 if problem.devices is None else problem.devices[stage].slowdown, link)
