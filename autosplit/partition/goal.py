"""What a chain of stages is to make least, within which limits, and on which devices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from autosplit.partition.problem import Problem


class OutOfTime(Exception):
    """The search ends with what it has."""


@dataclass(frozen=True)
class Clock:
    """The time that a search may take: without a limit no clock is read, so the answer depends on the input alone.

    It runs until ``deadline`` on the clock of time.monotonic.
    """

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


@dataclass(frozen=True)
class Terms:
    """How a device counts seconds, per microbatch: of works, of tensors cut, of gradients synchronised, of ties."""

    work: float = 1.0
    net: float = 1.0
    sync: float = 0.0
    tie: float = 0.0


PLAIN = Terms()


@dataclass(frozen=True)
class Place:
    """What the cost of one stage depends on: stages on equal places cost the same."""

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
        capacity_bytes: per slot; None where bytes have no limit.
        empty: stages without a group are allowed.
        terms: per slot; None where all are plain.
        free_order: the stages may take the slots in any order, and need not take all. Else stage ``i`` has slot ``i``.
        extras: where ties, synchronisation and recompute options are read from; None where there are none.
    """

    in_flight: tuple[int, ...]
    least: str = "load"
    load_limit_s: float = math.inf
    capacity_bytes: tuple[float, ...] | None = None
    empty: bool = False
    terms: tuple[Terms, ...] | None = None
    free_order: bool = False
    extras: Problem | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, problem: Problem, *, stages: int, least: str = "load", empty: bool = False) -> Goal:
        """Return the problem's goal for so many stages; ``least="bytes"`` has no capacities.

        A slot is a place for one stage on a device, so there are ``virtual_stages`` of each device. Where these are
        several the goal is a relaxation: each stage alone must fit its device, and free order frees the slots.
        """
        each = problem.virtual_stages
        lane = problem.lanes(stages)
        positions = range(max(lane) + 1)
        if problem.devices is not None and problem.free_order and least == "load":
            lane = tuple(device for device in range(len(problem.devices)) for _ in range(each))
            positions = range(len(problem.devices))
        terms = [_terms(problem, position) for position in positions]
        capacity = None
        if problem.capacity_bytes is not None and least == "load":
            capacity = tuple(_unlimited(problem.capacity_bytes[device]) for device in lane)
        return cls(
            in_flight=problem.in_flight(stages),
            least=least,
            capacity_bytes=capacity,
            empty=empty,
            terms=None if all(own == PLAIN for own in terms) else tuple(terms[device] for device in lane),
            free_order=problem.free_order and least == "load",
            extras=problem if has_extras(problem, bytes_matter=capacity is not None or least == "bytes") else None,
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.in_flight)

    @property
    def slots(self) -> int:
        """Number of places for stages."""
        given = self.terms if self.terms is not None else self.capacity_bytes
        return self.stages if given is None else len(given)

    @property
    def needs_bytes(self) -> bool:
        """Whether bytes matter at all."""
        return self.least == "bytes" or self.capacity_bytes is not None

    @property
    def plain(self) -> bool:
        """Whether stage ``i`` is on device ``i``, all equally fast, and nothing but works and tensors costs."""
        return self.terms is None and self.extras is None and not self.free_order

    def place(self, slot: int, *, stage: int) -> Place:
        """Return what a stage on a slot costs by."""
        return Place(
            terms=PLAIN if self.terms is None else self.terms[slot],
            capacity_bytes=math.inf if self.capacity_bytes is None else self.capacity_bytes[slot],
            in_flight=self.in_flight[stage] if self.needs_bytes else 0,
        )

    def relaxed(self) -> Goal:
        """Return the goal without capacities and extras: no load is larger, so its best value is a lower bound."""
        return replace(self, capacity_bytes=None, extras=None)


def has_extras(problem: Problem, *, bytes_matter: bool) -> bool:
    """Tell whether more than works, tensors and storages costs time or bytes; without limits nothing is recomputed."""
    copies = any(device.replicas > 1 for device in problem.devices or ())
    synced = copies and any(work.sync_s for work in problem.works)
    chosen = problem.recompute != ("never",) and (bytes_matter or "never" not in problem.recompute)
    return bool(problem.ties) or synced or chosen


def _terms(problem: Problem, position: int) -> Terms:
    link = max((problem.links or ())[max(position - 1, 0) : position + 1], default=1.0)
    tie = link / problem.microbatches if problem.ties else 0.0
    if problem.devices is None:
        return Terms(tie=tie)
    device = problem.devices[position]
    return Terms(
        work=device.slowdown / device.replicas,
        net=link / device.replicas,
        sync=(device.replicas - 1) / device.replicas / problem.microbatches,
        tie=tie,
    )


def _unlimited(limit: int | None) -> float:
    return math.inf if limit is None else limit
