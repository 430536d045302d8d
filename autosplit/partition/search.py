"""The search for the best chain: from a quick solution to a proof.

1. A first solution: dynamic programming over the prefixes of a few topological orders.
2. Graphs of growing detail, each with all its ideals: merged as far as the best value survives when stages may be
   empty (a lower bound, and usually a solution as well), then unmerged (exact). The first that closes the gap ends it.
3. Where the ideals are too many: the same on graphs whose small costs are set to zero, which gives lower bounds, and
   then the ideals around the best solution's cuts, until they bring nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosplit.partition.chains import Chain, best_chain
from autosplit.partition.condense import Concern, condense, glue_costly
from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, Tensor, base_graph, merge
from autosplit.partition.ideals import all_ideals, neighbourhood, prefix_ideals, some_orders
from autosplit.partition.problem import Problem
from autosplit.partition.table import Table

TOLERANCE = 1e-9
"""Values that differ by less, relatively, are the same."""

_FRACTIONS = (0.1, 0.06, 0.03, 0.015, 0.008, 0.004, 0.002, 0.001, 0.0005)
_WIDTHS = (16, 64, 256)
_ROUNDS = 8


@dataclass(frozen=True)
class Found:
    """A chain of non-empty stages within the limits, and the table that it came from."""

    chain: Chain
    table: Table

    @property
    def assignment(self) -> tuple[int, ...]:
        """The stage of each work."""
        inner = self.chain.ideals[1:]
        stage = [
            next(index for index, ideal in enumerate(inner) if ideal >> group & 1)
            for group in range(self.table.graph.size)
        ]
        return tuple(stage[group] for group in self.table.graph.group_of)


@dataclass(frozen=True)
class Outcome:
    """The best that was found, None when nothing fits; a valid lower bound; whether the search was exhaustive."""

    found: Found | None
    lower_bound: float
    exhaustive: bool


def search(problem: Problem, *, stages: int, least: Literal["load", "bytes"], empty: bool, ideal_limit: int) -> Outcome:
    """Return the best cut into ``stages`` non-empty stages, or as many as the graph has groups when these are fewer.

    ``least="load"`` keeps the problem's capacities; ``least="bytes"`` has no limit. ``empty`` allows empty stages.
    """
    return _Search(problem, stages=stages, least=least, empty=empty, ideal_limit=ideal_limit).run()


class _Search:
    def __init__(
        self, problem: Problem, *, stages: int, least: Literal["load", "bytes"], empty: bool, ideal_limit: int
    ) -> None:
        self.problem = problem
        self.base = base_graph(problem)
        self.least = least
        self.ideal_limit = ideal_limit
        count = stages if empty else min(stages, self.base.size)
        self.goal = Goal.of(problem, stages=count, least=least, empty=empty)
        self.capacity = self._binding_capacity() if least == "load" else None
        self.concern = Concern(loads=least == "load", bytes=least == "bytes" or self.capacity is not None)
        self.best: Found | None = None
        self.lower = self._first_bound()

    def run(self) -> Outcome:
        start = condense(self.base, concern=self.concern)
        if start.size < self.goal.stages:
            start = self.base
        self._prefixes(start)
        if self.best is not None and self.least == "load":
            self.base = glue_costly(self.base, bound_s=self.best.chain.value)
        exhaustive = self._levels()
        if self.best is None and not exhaustive:
            self._try_leanest()
        if not self._closed() and not exhaustive:
            if self.least == "load":
                self._contracted()
            self._refine()
        if self.best is not None and self.least == "load":
            self._settle()
        return Outcome(self.best, self.lower, exhaustive)

    def _prefixes(self, graph: Graph) -> None:
        orders = some_orders(graph)
        self._try(self._table(graph, prefix_ideals(orders[:1])))
        if not self._closed():
            self._try(self._table(graph, prefix_ideals(orders)))

    def _levels(self) -> bool:
        """Search graphs of growing detail; return whether the last was searched, so that the answer is exact."""
        loose = Concern(loads=True, bytes=False)
        levels = [(condense(self.base, concern=loose), False)] if self.capacity is not None else []
        levels += [(condense(self.base, concern=self.concern), True), (self.base, True)]
        for graph, with_capacity in levels:
            if self._closed():
                return True
            ideals = all_ideals(graph, limit=self.ideal_limit)
            if ideals is None:
                return False
            table = self._table(graph, ideals)
            complete = with_capacity and graph.size == self.base.size
            if not complete:
                self._bound(table, capacity=self.capacity if with_capacity else None)
            if not self._closed():
                self._try(table)
            if complete:
                self.lower = self.best.chain.value if self.best is not None else math.inf
                return True
        return True

    def _contracted(self) -> None:
        """Bound from graphs without their small costs, solve on the same groups with true costs."""
        for fraction in _FRACTIONS:
            if self.best is None or self._closed():
                return
            small = fraction * self.best.chain.value
            reduced = condense(
                glue_costly(_without_small(self.base, small_s=small), bound_s=self.best.chain.value),
                concern=Concern(loads=True, bytes=False),
            )
            ideals = all_ideals(reduced, limit=self.ideal_limit)
            if ideals is None:
                return
            self._bound(self._table(reduced, ideals), capacity=None)
            true = merge(self.base, _labels(self.base, reduced))
            self._try(self._table(true, all_ideals(true, limit=self.ideal_limit) or []))

    def _refine(self) -> None:
        """Search the ideals near the best cuts, wider when that brings nothing."""
        for width in _WIDTHS:
            for _ in range(_ROUNDS):
                if self.best is None or self._closed():
                    return
                before = self.best.chain.value
                graph = self.best.table.graph
                self._try(self._table(graph, neighbourhood(graph, self.best.chain.ideals, width=width)))
                if self.best.chain.value >= before * (1 - TOLERANCE):
                    break

    def _settle(self) -> None:
        """Among equally good chains take the one whose fullest stage is emptiest."""
        assert self.best is not None
        if not self.base.has_bytes:
            return
        goal = replace(self._limited(self.capacity), least="bytes")
        ideals = None
        if not self.concern.bytes:
            # The merges so far had no eye for bytes: look among the cuts that they hid, when these are not too many.
            graph = condense(self.base, concern=Concern(loads=True, bytes=True))
            ideals = all_ideals(graph, limit=self.ideal_limit)
        tables = [self.best.table] if ideals is None else [self._table(graph, ideals), self.best.table]
        for table in tables:
            chain = best_chain(table, goal=goal)
            if chain is not None:
                self.best = Found(replace(chain, value=self.best.chain.value), table)
                return

    def _try(self, table: Table) -> None:
        """Take the table's best chain if it is better than, or as good as, the best so far."""
        chain = best_chain(table, goal=self._limited(self.capacity))
        if chain is not None:
            self.best = Found(chain, table)

    def _try_leanest(self) -> None:
        """Look for a chain within the capacities among the ideals that serve the least bytes best."""
        leanest = search(
            self.problem, stages=self.goal.stages, least="bytes", empty=self.goal.empty, ideal_limit=self.ideal_limit
        ).found
        assert leanest is not None, "without limits every graph can be cut"
        self._try(leanest.table)

    def _bound(self, table: Table, *, capacity: tuple[float, ...] | None) -> None:
        """Raise the lower bound to the table's best value with empty stages allowed."""
        chain = best_chain(table, goal=replace(self._limited(capacity), empty=True))
        value = math.inf if chain is None else chain.value
        self.lower = max(self.lower, value if self.best is None else min(value, self.best.chain.value))

    def _limited(self, capacity: tuple[float, ...] | None) -> Goal:
        limit = math.inf if self.best is None else self.best.chain.value * (1 + TOLERANCE)
        if self.least == "load":
            return replace(self.goal, load_limit_s=limit, capacity_bytes=capacity)
        return replace(self.goal, capacity_bytes=(limit,) * self.goal.slots)

    def _closed(self) -> bool:
        return self.best is not None and self.best.chain.value <= self.lower * (1 + TOLERANCE)

    def _table(self, graph: Graph, ideals: Sequence[int]) -> Table:
        return Table(graph, ideals, by_bytes=self.least == "bytes")

    def _first_bound(self) -> float:
        if self.least == "bytes":
            return 0.0
        return max(sum(self.base.times_s) / self.goal.stages, *self.base.times_s)

    def _binding_capacity(self) -> tuple[float, ...] | None:
        """Return the capacities, or None when even everything on one stage would fit in each."""
        if self.problem.capacity_bytes is None:
            return None
        given = self.problem.capacity_bytes[: self.goal.stages]
        capacity = tuple(math.inf if limit is None else limit for limit in given)
        kept = sum(hold.bytes for hold in self.problem.holds) * max(self.goal.in_flight)
        most = sum(self.base.static_bytes) + kept + max(self.base.transient_bytes)
        return None if most <= min(capacity) else capacity


def _without_small(graph: Graph, *, small_s: float) -> Graph:
    """Return the graph with costs below ``small_s`` at zero: no load grows, so its best value is a lower bound."""
    tensors: tuple[Tensor, ...] = tuple(tensor for tensor in graph.tensors if tensor.cost_s >= small_s)
    times_s = tuple(time_s if time_s >= small_s else 0.0 for time_s in graph.times_s)
    return replace(graph, times_s=times_s, tensors=tensors)


def _labels(graph: Graph, coarse: Graph) -> list[int]:
    """Return for each group of ``graph`` its group in ``coarse``, which was merged from it."""
    labels = [0] * graph.size
    for fine, group in zip(graph.group_of, coarse.group_of, strict=True):
        labels[fine] = group
    return labels
