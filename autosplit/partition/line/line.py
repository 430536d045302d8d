"""What every run of consecutive units costs, as tables over (first unit, unit behind the last).

A storage or tied parameter costs a run something according to which of its pins lie inside. Over the plane of runs
``i .. j - 1`` the runs that hold no pin are one rectangle per gap between pins, those that hold all pins are one more:

    no pin between a < b: a < i and j <= b          all pins between a and b: i <= a and b < j

Rectangles are added up from their corners, so a table takes one pass whatever the number of storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageTable:
    """Bytes of each run as a stage under one recompute option: once, and per microbatch in flight."""

    fixed: Floats
    """Static bytes and the worst transient."""
    each: Floats
    transient: Floats
    """The part of ``fixed`` that counts once per device, however many stages it has."""
    least: Floats
    """What a run holds in the optimizer's step, whatever is in flight before it."""


class Line:
    """The runs of a coarse problem's units."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.size = len(problem.works)
        self.forward_s, self.backward_s, self.weight_s = (
            _running(getattr(work, name) for work in problem.works) for name in ("forward_s", "backward_s", "weight_s")
        )
        self.cut_s = self._cut_s()
        self._tables: dict[str, StageTable] = {}
        self._spans: Spans | None = None

    def _cut_s(self) -> Floats:
        """Return what crosses the cut in front of each unit, there and back, the ends included."""
        change = np.zeros(self.size + 2)
        for net in self.problem.nets:
            seconds = net.forward_s + net.backward_s
            change[net.producer + 1] += seconds
            change[max(net.consumers) + 1] -= seconds
        crossing: Floats = change.cumsum()[: self.size + 1]
        return np.maximum(crossing, 0.0)

    def table(self, option: str) -> StageTable:
        """Return the bytes of every run under a recompute option."""
        if option not in self._tables:
            self._tables[option] = self._table(option)
        return self._tables[option]

    def spans(self, widest: int) -> Spans:
        """Return the stages of up to ``widest`` units, or more."""
        if self._spans is None or len(self._spans.tail) < widest:
            self._spans = Spans(self, widest)
        return self._spans

    def _table(self, option: str) -> StageTable:
        transient = self._worst(work.transient_bytes for work in self.problem.works)
        each = self._never
        if option in ("always", "except_last"):
            transient, each = transient + self._never - self._boundary, self._boundary
        elif option == "block":
            transient, each = self._worst(_block_bytes(self.problem)), self._of_blocks
        return StageTable(self._static + transient, each, transient, self._least)

    @cached_property
    def _static(self) -> Floats:
        """Return what each run holds whatever is in flight: a copy of a tied parameter where its home is before."""
        static = _running(work.static_bytes for work in self.problem.works)
        whole = static[None, :] - static[:, None]
        plane = _Plane(self.size)
        for tie in self.problem.ties:
            first = min(tie.users)
            plane.touched(tie.users, tie.copy_bytes)
            # A run that starts at the first user or before, and holds it, is the home.
            plane.rectangle((0, first), (first + 1, self.size), tie.home_bytes - tie.copy_bytes)
        tied: Floats = whole + plane.sums()
        return tied

    @cached_property
    def _least(self) -> Floats:
        step = _running(work.step_bytes for work in self.problem.works)
        least: Floats = self._static + (step[None, :] - step[:, None])
        return least

    @cached_property
    def _never(self) -> Floats:
        plane = _Plane(self.size)
        for hold in self.problem.holds:
            ends = _ends(hold.producer, hold.consumers)
            plane.touched({*ends, *hold.savers}, hold.bytes)
            if hold.producer is not None and not hold.savers:
                plane.inside(ends, -hold.bytes)
        return plane.sums()

    @cached_property
    def _boundary(self) -> Floats:
        plane = _Plane(self.size)
        for hold in self.problem.holds:
            ends = _ends(hold.producer, hold.consumers)
            plane.touched(ends, hold.bytes)
            if hold.producer is not None:
                plane.inside(ends, -hold.bytes)
        return plane.sums()

    @cached_property
    def _of_blocks(self) -> Floats:
        plane = _Plane(self.size)
        for hold in self.problem.holds:
            ends = _ends(hold.producer, hold.consumers)
            plane.touched(ends, hold.bytes)
            if hold.producer is None:
                continue
            source = _block_of(self.problem, hold.producer)
            entering = {pin for pin in (*hold.consumers, *hold.savers) if _block_of(self.problem, pin) != source}
            # What a block takes from outside is kept for it to be done again.
            taken = any(self.problem.works[pin].block is not None for pin in entering.intersection(hold.consumers))
            if not taken and not (hold.savers and entering):
                plane.inside(ends, -hold.bytes)
        return plane.sums()

    def _worst(self, each: Iterable[int]) -> Floats:
        """Return the largest value of each run, 0 for an empty run."""
        values = np.fromiter(each, dtype=np.float64)
        worst = np.zeros((self.size + 1, self.size + 1))
        for first in range(self.size):
            worst[first, first + 1 :] = np.maximum.accumulate(values[first:])
        return worst


class Spans:
    """The stages of a line by length, from one unit on, and by where they end: [length - 1, end].

    Attributes:
        tail: where they begin; 0 where that would be before the line.
        none: where that is so.
        forward_s, works_s: the seconds of their forwards, and of both.
    """

    def __init__(self, line: Line, widest: int) -> None:
        ends = np.arange(line.size + 1)
        tail = ends - np.arange(1, widest + 1)[:, None]
        self.line, self.none = line, tail < 0
        self.tail: Ints = np.where(self.none, 0, tail)
        self.ends: Ints = np.broadcast_to(ends, tail.shape)
        self.forward_s: Floats = line.forward_s[ends] - line.forward_s[self.tail]
        self.works_s: Floats = self.forward_s + line.backward_s[ends] - line.backward_s[self.tail]
        self._held: dict[str, tuple[Floats, Floats, Floats]] = {}

    @cached_property
    def crossing_s(self) -> Floats:
        """The seconds of what crosses both ends of each stage."""
        crossing_s: Floats = self.line.cut_s[self.tail] + self.line.cut_s[self.ends]
        return crossing_s

    def held(self, option: str) -> tuple[Floats, Floats, Floats]:
        """Return what each stage holds under a recompute option: once, per microbatch, and at least."""
        if option not in self._held:
            table = self.line.table(option)
            fixed, each, least = (array[self.tail, self.ends] for array in (table.fixed, table.each, table.least))
            self._held[option] = fixed, each, least
        return self._held[option]


@dataclass(frozen=True)
class LineBytes:
    """What stages hold under each option and the transient on top: [.., stage, option]; in the update: [.., stage].

    Of a device's stages the largest transient counts; what the optimizer holds in its step is there for all at once.
    """

    held: Floats
    transient: Floats
    step: Floats

    @classmethod
    def of(
        cls, line: Line, bounds: Ints, options: Sequence[str], *, stages: Sequence[int], in_flight: Sequence[int]
    ) -> LineBytes:
        """Return what some of the stages of cuts hold that are given by their bounds [.., stage].

        What "except_last" keeps of the last microbatch is there on all stages of a device at once.
        """
        indices = np.array(stages)
        runs = bounds[..., indices], bounds[..., indices + 1]
        tables = [line.table(option) for option in options]
        worst = [line.table("never" if option == "except_last" else option) for option in options]
        transient = np.stack([table.transient[runs] for table in worst], axis=-1)
        fixed = np.stack([table.fixed[runs] for table in tables], axis=-1)
        each = np.stack([table.each[runs] for table in tables], axis=-1)
        held = fixed - transient + np.array(in_flight)[indices, None] * each
        return cls(held, transient, tables[0].least[runs])

    def needed(self, options: Ints, *, stages: Sequence[int] | None = None) -> Floats:
        """Return what a device needs whose stages take these options; by default it has all of them."""
        indices = np.arange(self.step.shape[-1]) if stages is None else np.array(stages)
        moving = self.held[..., indices, options].sum(axis=-1) + self.transient[..., indices, options].max(axis=-1)
        needed: Floats = np.maximum(moving, self.step[..., indices].sum(axis=-1))
        return needed


class _Plane:
    """Rectangles over the runs, added up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.corners: list[tuple[int, int, int, int]] = []
        self.values: list[float] = []
        self.everywhere = 0.0

    def rectangle(self, rows: tuple[int, int], columns: tuple[int, int], value: float) -> None:
        """Add a value to the runs that start and end within two ranges, both ends of them included."""
        self.corners.append((rows[0], rows[1] + 1, columns[0], columns[1] + 1))
        self.values.append(value)

    def touched(self, pins: Iterable[int], value: float) -> None:
        """Add a value to the runs that hold at least one pin."""
        self.everywhere += value
        for before, after in pairwise((-1, *sorted(set(pins)), self.size)):
            if after - before > 1:
                self.rectangle((before + 1, after - 1), (before + 2, after), -value)

    def inside(self, pins: Sequence[int], value: float) -> None:
        """Add a value to the runs that hold all pins."""
        self.rectangle((0, min(pins)), (max(pins) + 1, self.size), value)

    def sums(self) -> Floats:
        """Return the value of each run."""
        plane = np.zeros((self.size + 2, self.size + 2))
        if self.corners:
            low, high, left, right = np.array(self.corners, dtype=np.int64).T
            values = np.array(self.values)
            for rows, columns, sign in ((low, left, 1.0), (high, left, -1.0), (low, right, -1.0), (high, right, 1.0)):
                np.add.at(plane, (rows, columns), sign * values)
        summed: Floats = plane.cumsum(axis=0).cumsum(axis=1)[: self.size + 1, : self.size + 1]
        return summed + self.everywhere


def _ends(producer: int | None, consumers: Sequence[int]) -> tuple[int, ...]:
    return tuple(consumers) if producer is None else (producer, *consumers)


def _running(each: Iterable[float]) -> Floats:
    return np.concatenate([[0.0], np.fromiter(each, dtype=np.float64).cumsum()])


def _block_of(problem: Problem, work: int) -> tuple[bool, object]:
    """Return what tells a work's block from others: a work without one is a block of its own."""
    block = problem.works[work].block
    return (False, work) if block is None else (True, block)


def _block_bytes(problem: Problem) -> list[int]:
    """Return for each work the most that it needs while its block is done again."""
    saved: dict[object, int] = {}
    for hold in problem.holds:
        block = None if hold.producer is None else _block_of(problem, hold.producer)
        if block is not None and any(_block_of(problem, saver) == block for saver in hold.savers):
            saved[block] = saved.get(block, 0) + hold.bytes
    return [
        saved.get(_block_of(problem, work), 0) + problem.works[work].transient_bytes
        for work in range(len(problem.works))
    ]
