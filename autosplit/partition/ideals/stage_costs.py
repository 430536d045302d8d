"""What candidate stages between ideals cost on the places that they may take: device, capacity, microbatches in flight.

Under each recompute option a stage has a load and bytes; it takes the fastest that fits, which is exact, as what one
stage takes is no other's business. Where several stages share a device that is a relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autosplit.partition.goal import PLAIN, Goal, Place, Terms
from autosplit.partition.ideals.table import Floats, Ints, Pins, Row, Table, Worst
from autosplit.partition.problem import RECOMPUTE, Hold, Problem, recompute_fraction


class StageCosts:
    """Costs of the stages from one ideal to larger ones, for one goal."""

    def __init__(self, table: Table, goal: Goal) -> None:
        self.table, self.goal = table, goal
        self.extras = None if goal.extras is None else Extras(table, goal.extras)
        self._needs_loads = goal.least == "load" or math.isfinite(goal.load_limit_s)

    def of(self, ideal: int, larger: Ints, places: Sequence[Place]) -> tuple[Ints, Floats]:
        """Return which of ``larger`` may end a stage on one of the places at least, and the costs: [place, larger].

        Where a stage is beyond a limit its cost is infinite.
        """
        if self.extras is not None:
            costs = np.stack([self._chosen(ideal, larger, place) for place in places])
            kept = np.isfinite(costs).any(axis=0)
            return larger[kept], costs[:, kept]
        if not self._needs_loads:
            return larger, self._plain_bytes(ideal, larger, places)
        loads = self._loads(ideal, larger, places)
        within = loads <= self.goal.load_limit_s
        if not within.all():
            kept = within.any(axis=0)
            larger, loads = larger[kept], np.where(within, loads, np.inf)[:, kept]
        if not self.goal.needs_bytes or not len(larger):
            return larger, loads
        needed = self._plain_bytes(ideal, larger, places)
        if self.goal.least == "bytes":
            return larger, np.where(np.isfinite(loads), needed, np.inf)
        return larger, np.where(np.isfinite(needed), loads, np.inf)

    def _loads(self, ideal: int, larger: Ints, places: Sequence[Place]) -> Floats:
        """Return the loads, one row for all places where these are plain."""
        if all(place.terms == PLAIN for place in places):
            return self.table.loads(ideal, larger)[None, :]
        works_s, nets_s = self.table.works_s(ideal, larger), self.table.nets_s(ideal, larger)
        return np.stack([place.terms.work * works_s + place.terms.net * nets_s for place in places])

    def _plain_bytes(self, ideal: int, larger: Ints, places: Sequence[Place]) -> Floats:
        """Return what the stages need where nothing is tied or recomputed, infinite beyond the capacity."""
        fixed, resident = self.table.static_and_transient(ideal, larger), self.table.residents(ideal, larger)
        in_flight = np.array([[place.in_flight] for place in places])
        capacity = np.array([[place.capacity_bytes] for place in places])
        needed = fixed + in_flight * resident
        return np.where(needed <= capacity, needed, np.inf)

    def _chosen(self, ideal: int, larger: Ints, place: Place) -> Floats:
        """Return the cost under the option that each stage takes."""
        goal, extras = self.goal, self.extras
        assert extras is not None
        cost, open_ = np.full(len(larger), np.inf), np.ones(len(larger), dtype=np.bool_)
        loads = extras.loads(ideal, larger, place.terms) if self._needs_loads else None
        needed_bytes = goal.least == "bytes" or math.isfinite(place.capacity_bytes)
        leanest = goal.least == "bytes" and loads is None
        for index, again in extras.again:
            fits = np.ones(len(larger), dtype=np.bool_)
            if needed_bytes:
                needed = extras.bytes(ideal, larger, option=index, in_flight=place.in_flight)
                fits = needed <= place.capacity_bytes
            if loads is not None:
                own = loads if not again else loads + place.terms.work * again * extras.forward(ideal, larger)
                value = needed if goal.least == "bytes" else own
            else:
                own, value = needed, needed
            take = fits & (value < cost) if leanest else fits & open_
            open_ &= ~take
            cost[take] = value[take]
            if loads is not None:
                cost[take & (own > goal.load_limit_s)] = np.inf
        return cost


class Extras:
    """What ties, synchronisation and recompute options add, read from the problem's works through a table's groups."""

    def __init__(self, table: Table, problem: Problem) -> None:
        self.table, self.problem = table, problem
        self.group_of = table.graph.group_of
        self.again = recompute_fractions(problem)
        self.forward_s = self._sum(work.forward_s for work in problem.works)
        self.sync_s = self._sum(work.sync_s for work in problem.works)
        users = [sorted({self.group_of[user] for user in tie.users}) for tie in problem.ties]
        self.user_count = np.array([len(own) for own in users], dtype=np.int64)
        self.user_inside = np.zeros((len(users), len(table)), dtype=np.int64)
        for row, own in enumerate(users):
            self.user_inside[row] = table.columns[own].sum(axis=0)
        self.home = np.array([tie.home_bytes for tie in problem.ties], dtype=np.float64)
        self.copy = np.array([tie.copy_bytes for tie in problem.ties], dtype=np.float64)
        self.transfer_s = np.array([tie.transfer_s for tie in problem.ties])

    def _sum(self, numbers: Iterable[float]) -> Floats:
        """Return the sum over the works in each ideal."""
        groups = np.zeros(self.table.graph.size)
        np.add.at(groups, np.array(self.group_of), np.fromiter(numbers, dtype=np.float64))
        return groups @ self.table.columns

    def forward(self, ideal: int, larger: Ints) -> Floats:
        """Return the forward seconds of the stages."""
        return self.forward_s[larger] - self.forward_s[ideal]

    def loads(self, ideal: int, larger: Ints, terms: Terms) -> Floats:
        """Return the loads without what is recomputed."""
        loads = terms.work * self.table.works_s(ideal, larger) + terms.net * self.table.nets_s(ideal, larger)
        if terms.sync:
            loads += terms.sync * (self.sync_s[larger] - self.sync_s[ideal])
        if len(self.transfer_s):
            inside = self._users(ideal, larger)
            loads += terms.tie * (self.transfer_s @ ((inside > 0) & (inside < self.user_count[:, None])))
        return loads

    def bytes(self, ideal: int, larger: Ints, *, option: int, in_flight: int) -> Floats:
        """Return the peak bytes of the stages under one recompute option."""
        table, name = self.table, RECOMPUTE[option]
        static = table.static[larger] - table.static[ideal]
        if len(self.home):
            before = self.user_inside[:, ideal] > 0
            static += np.where(before, self.copy, self.home) @ (self._users(ideal, larger) > 0)
        if name == "block":
            return (
                static
                + in_flight * self._of_blocks.stage_cost(ideal, larger)
                + self._block_transients.of(ideal, larger)
            )
        transient = table.worst.of(ideal, larger)
        kept = table.residents(ideal, larger)
        if name == "never":
            return static + in_flight * kept + transient
        boundary = self._boundaries.stage_cost(ideal, larger)
        return static + in_flight * boundary + (kept - boundary) + transient

    def _users(self, ideal: int, larger: Ints) -> Ints:
        return self.user_inside[:, larger] - self.user_inside[:, ideal][:, None]

    @cached_property
    def _boundaries(self) -> Pins:
        """What crosses the boundaries of stages."""
        return Pins.of(self.table.columns, (replace(row, savers=frozenset()) for row in self._holds()))

    @cached_property
    def _of_blocks(self) -> Pins:
        """What stays while blocks are done again: what crosses, and what is saved where it comes from another block."""
        rows = []
        for hold, row in zip(self.problem.holds, self._holds(), strict=True):
            source = None if hold.producer is None else block_of(self.problem, hold.producer)
            entering = (pin for pin in (*hold.consumers, *hold.savers) if block_of(self.problem, pin) != source)
            savers = self._groups(block_savers(self.problem, hold))
            rows.append(replace(row, savers=savers, entering=self._groups(entering)))
        return Pins.of(self.table.columns, rows)

    @cached_property
    def _block_transients(self) -> Worst:
        return Worst.among(block_bytes(self.problem, self.group_of, size=self.table.graph.size), self.table.columns)

    def _holds(self) -> Iterator[Row]:
        for hold in self.problem.holds:
            source = None if hold.producer is None else self.group_of[hold.producer]
            yield Row(hold.bytes, source, self._groups(hold.consumers) - {source}, self._groups(hold.savers))

    def _groups(self, works: Iterable[int]) -> frozenset[int]:
        return frozenset(self.group_of[work] for work in works)


def recompute_fractions(problem: Problem) -> list[tuple[int, float]]:
    """Return the recompute options, the fastest first: an index into RECOMPUTE, the part of the forward done again."""
    allowed = [(name, index) for index, name in enumerate(RECOMPUTE) if name in problem.recompute]
    ranked = sorted((recompute_fraction(name, microbatches=problem.microbatches), index) for name, index in allowed)
    return [(index, again) for again, index in ranked]


def block_of(problem: Problem, work: int) -> tuple[bool, object]:
    """Return what tells a work's block from others: a work without one is a block of its own."""
    block = problem.works[work].block
    return (False, work) if block is None else (True, block)


def block_savers(problem: Problem, hold: Hold) -> tuple[int, ...]:
    """Return the works that keep a storage while blocks are done again: what enters a block is kept for that."""
    source = None if hold.producer is None else block_of(problem, hold.producer)
    again = (own for own in hold.consumers if problem.works[own].block is not None)
    return (*hold.savers, *(own for own in again if block_of(problem, own) != source))


def block_bytes(problem: Problem, group_of: Sequence[int], *, size: int) -> list[int]:
    """Return for each group the most that a work of it needs while its block is done again."""
    saved: dict[object, int] = {}
    for hold in problem.holds:
        block = None if hold.producer is None else block_of(problem, hold.producer)
        if block is not None and any(block_of(problem, saver) == block for saver in hold.savers):
            saved[block] = saved.get(block, 0) + hold.bytes
    worst = [0] * size
    for work, group in enumerate(group_of):
        again = saved.get(block_of(problem, work), 0) + problem.works[work].transient_bytes
        worst[group] = max(worst[group], again)
    return worst
