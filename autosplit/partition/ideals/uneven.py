"""The search where devices differ, or more than works, tensors and storages on one stage per device costs.

The steps are those of `search`, with merges that are right on every device, and without the bounds that need equal
devices. Where devices hold several stages the search for single stages is a relaxation: it bounds what follows, and
its cuts are where `shared` starts from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from autosplit.errors import InfeasibleError
from autosplit.partition.clock import FOREVER, Clock, OutOfTime
from autosplit.partition.goal import PLAIN, Goal
from autosplit.partition.graph import Graph, base_graph, merge
from autosplit.partition.ideals.chains import Chain, best_chain
from autosplit.partition.ideals.enumerate import all_ideals, in_runs, neighbourhood, prefix_ideals, some_orders
from autosplit.partition.ideals.search import TOLERANCE, Found, search
from autosplit.partition.ideals.shared import best_shared
from autosplit.partition.ideals.table import Table
from autosplit.partition.problem import Problem
from autosplit.partition.reduce.views import glued, labels, lossless, without_small

_FRACTIONS = (0.1, 0.03, 0.01, 0.003, 0.001)
_WIDTHS = (16, 64, 256)
_ROUNDS = 8
_MANY_GROUPS = 600
"""Above this many groups the pool of all prefixes of several orders is too large."""
_ENTRIES = 25_000_000
"""No table has more entries, ideals times groups."""


@dataclass(frozen=True)
class Answer:
    """The best assignment and order of devices that were found, None when nothing fits; a lower bound; its proof."""

    assignment: tuple[int, ...] | None
    order: tuple[int, ...] | None
    lower_bound: float
    exhaustive: bool


def find(
    problem: Problem,
    *,
    stages: int,
    least: Literal["load", "bytes"],
    empty: bool,
    ideal_limit: int,
    clock: Clock = FOREVER,
) -> Answer:
    """Return the best cut of any problem; see `search`."""
    goal = Goal.of(problem, stages=stages, least=least, empty=empty)
    if goal.plain and not problem.shared and problem.own is None:
        outcome = search(problem, stages=stages, least=least, empty=empty, ideal_limit=ideal_limit, clock=clock)
        assignment = None if outcome.found is None else outcome.found.assignment
        return Answer(assignment, None, outcome.lower_bound, outcome.exhaustive)
    return _Search(problem, stages=stages, least=least, empty=empty, ideal_limit=ideal_limit, clock=clock).run()


class _Search:
    def __init__(
        self,
        problem: Problem,
        *,
        stages: int,
        least: Literal["load", "bytes"],
        empty: bool,
        ideal_limit: int,
        clock: Clock = FOREVER,
    ) -> None:
        self.problem, self.least, self.ideal_limit, self.clock = problem, least, ideal_limit, clock
        self.whole = self.base = base_graph(problem)
        count = stages if empty else problem.max_stages(min(stages, self.base.size))
        if not count:
            raise InfeasibleError(
                f"{problem.schedule} puts {problem.virtual_stages} stages on a device, and the works fall into "
                f"{self.base.size} groups that cannot be separated; choose a schedule with fewer stages"
            )
        self.goal = Goal.of(problem, stages=count, least=least, empty=empty)
        self.capacity = self.goal.capacity_bytes
        self.bytes = least == "bytes" or self.capacity is not None
        self.best: Found | None = None
        self.lower = self._first_bound()

    def run(self) -> Answer:
        self._prefixes()
        exhaustive = False
        try:
            exhaustive = self._levels()
            if not exhaustive and not self._closed():
                if self.least == "load":
                    self._contracted()
                self._refine()
        except OutOfTime:
            pass
        if self.best is None and not exhaustive and self.least == "load":
            self._try_leanest()
        if self.problem.shared:
            return self._share(exhaustive)
        if self.best is None:
            return Answer(None, None, self.lower, exhaustive)
        if self.least == "load":
            with suppress(OutOfTime):
                self._settle()
        return Answer(self.best.assignment, self.best.chain.slots, self.lower, exhaustive)

    def _share(self, exhaustive: bool) -> Answer:
        """Improve the cuts of the relaxation by what devices carry that hold several stages."""
        if self.best is None and exhaustive:
            return Answer(None, None, self.lower, exhaustive=True)
        seeds = [] if self.best is None else [self.best.assignment]
        goals = [self.goal]
        if self.capacity is not None:
            # What each stage's share of the capacity holds, the device holds.
            each = self.problem.virtual_stages
            goals = [replace(self.goal, capacity_bytes=tuple(limit / each for limit in self.capacity))]
            goals += [replace(self.goal, least="bytes", capacity_bytes=None), self.goal]
        orders = some_orders(self.whole) if self.whole.size <= _MANY_GROUPS else []
        for order in (orders, *([own] for own in orders)) if orders else ():
            table = self._table(self.whole, prefix_ideals(order))
            chains = (best_chain(table, goal=goal) for goal in goals)
            seeds += [Found(chain, self.whole).assignment for chain in chains if chain is not None]
        found = best_shared(
            self.problem,
            self.whole,
            seeds=seeds,
            stages=self.goal.stages,
            least=self.least,
            empty=self.goal.empty,
            clock=self.clock,
        )
        lower = found.value if found.exhaustive else self.lower
        return Answer(found.assignment, found.order, lower, exhaustive=found.exhaustive)

    def _prefixes(self) -> None:
        start = self._condensed(self.base, loads=self.least == "load", bytes_=self.bytes)
        for graph in (start, self.base) if start.size < self.goal.stages else (start,):
            graph = in_runs(graph)
            orders = some_orders(graph)
            self._try(graph, prefix_ideals(orders if graph.size <= _MANY_GROUPS else orders[:1]))
        if self.best is not None and self.least == "load":
            self.base = glued(self.base, goal=self.goal, bound_s=self.best.chain.value)

    def _levels(self) -> bool:
        """Search graphs of growing detail; return whether the last was searched, so that the answer is exact."""
        levels = []
        if self.least == "load" and self.capacity is not None:
            levels.append((self._condensed(self.base, loads=True, bytes_=False), False))
        levels.append((self._condensed(self.base, loads=self.least == "load", bytes_=self.bytes), True))
        levels.append((self.base, True))
        for graph, with_capacity in levels:
            if self._closed():
                return True
            ideals = self._ideals(graph)
            if ideals is None:
                return False
            table = self._table(graph, ideals)
            if with_capacity and graph.size == self.base.size:
                self._try_table(table, graph)
                self.lower = math.inf if self.best is None else max(self.lower, self.best.chain.value)
                return True
            capacity = self._limited().capacity_bytes if with_capacity else None
            self._bound(table, replace(self._limited(), capacity_bytes=capacity))
            if not self._closed():
                self._try_table(table, graph)
        return True

    def _contracted(self) -> None:
        """Bound from graphs without their small costs, solve on the same groups with true costs."""
        for fraction in _FRACTIONS:
            if self.best is None or self._closed():
                return
            bound_s = self.best.chain.value
            small = without_small(self.base, goal=self.goal, small_s=fraction * bound_s)
            goal = self.goal.relaxed()
            reduced = self._condensed(glued(small, goal=goal, bound_s=bound_s), loads=True, bytes_=False, goal=goal)
            ideals = self._ideals(reduced)
            if ideals is None:
                return
            self._bound(self._table(reduced, ideals), replace(goal, load_limit_s=bound_s * (1 + TOLERANCE)))
            true = merge(self.base, labels(self.base, reduced))
            self._try(true, self._ideals(true) or [])

    def _refine(self) -> None:
        """Search the ideals near the best cuts, wider when that brings nothing."""
        for width in _WIDTHS:
            for _ in range(_ROUNDS):
                if self.best is None or self._closed():
                    return
                self.clock.check()
                before, graph = self.best.chain.value, self.best.graph
                self._try(graph, neighbourhood(graph, self.best.chain.ideals, width=width))
                if self.best.chain.value >= before * (1 - TOLERANCE):
                    break

    def _try_leanest(self) -> None:
        """Look for a chain within the capacities near the one that needs the fewest bytes."""
        lean = _Search(
            self.problem, stages=self.goal.stages, least="bytes", empty=self.goal.empty, ideal_limit=self.ideal_limit
        )
        lean.run()
        assert lean.best is not None, "without limits every graph can be cut"
        for width in _WIDTHS:
            if self.best is None:
                self._try(lean.best.graph, neighbourhood(lean.best.graph, lean.best.chain.ideals, width=width))
        with suppress(OutOfTime):
            self._refine()

    def _settle(self) -> None:
        """Among equally good chains take the one whose fullest stage is emptiest."""
        assert self.best is not None
        if not self.base.has_bytes:
            return
        graph = self._condensed(self.base, loads=True, bytes_=True)
        ideals = self._ideals(graph)
        table = None if ideals is None else self._table(graph, ideals)
        chain = None if table is None else self._chain(table, replace(self._limited(), least="bytes"))
        if chain is not None:
            self.best = Found(replace(chain, value=self.best.chain.value), graph)

    def _try(self, graph: Graph, ideals: Sequence[int]) -> None:
        if ideals:
            self._try_table(self._table(graph, ideals), graph)

    def _try_table(self, table: Table, graph: Graph) -> None:
        """Take the table's best chain if it is better than, or as good as, the best so far."""
        chain = self._chain(table, self._limited())
        if chain is not None:
            self.best = Found(chain, graph)

    def _bound(self, table: Table, goal: Goal) -> None:
        """Raise the lower bound to the table's best value with empty stages allowed."""
        chain = self._chain(table, replace(goal, empty=True))
        value = math.inf if chain is None else chain.value
        self.lower = max(self.lower, value if self.best is None else min(value, self.best.chain.value))

    def _chain(self, table: Table, goal: Goal) -> Chain | None:
        """Return the best chain; the first ones, before anything is found, take the time that they need."""
        return best_chain(table, goal=goal, clock=FOREVER if self.best is None else self.clock)

    def _limited(self) -> Goal:
        limit = math.inf if self.best is None else self.best.chain.value * (1 + TOLERANCE)
        if self.least == "load":
            return replace(self.goal, load_limit_s=limit)
        return replace(self.goal, capacity_bytes=(limit,) * self.goal.slots)

    def _condensed(self, graph: Graph, *, loads: bool, bytes_: bool, goal: Goal | None = None) -> Graph:
        return lossless(graph, goal=goal or self.goal, loads=loads, bytes_=bytes_)

    def _ideals(self, graph: Graph) -> list[int] | None:
        return all_ideals(graph, limit=min(self.ideal_limit, _ENTRIES // graph.size))

    def _closed(self) -> bool:
        return self.best is not None and self.best.chain.value <= self.lower * (1 + TOLERANCE)

    def _table(self, graph: Graph, ideals: Sequence[int]) -> Table:
        return Table(graph, ideals, by_bytes=self.least == "bytes")

    def _first_bound(self) -> float:
        """Return what the devices need at least for the works together, and for the largest alone."""
        if self.least == "bytes":
            return 0.0
        terms = self.goal.terms or (PLAIN,) * self.goal.stages
        shared = sorted((1.0 / own.work for own in terms), reverse=True)[: self.goal.stages]
        each = self.goal.stages / self.problem.places(self.goal.stages)
        whole = sum(self.base.times_s) * each / sum(shared)
        return max(whole, min(own.work for own in terms) * max(self.base.times_s))
