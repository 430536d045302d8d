"""The search for the best chain where all devices are alike: from a quick solution to a proof.

1. A first solution: the best prefixes of a few topological orders.
2. Graphs merged as far as the best value survives when stages may be empty. Where their ideals can be
   listed, they are searched by thresholds: a lower bound, and usually the solution as well. Else a bound that needs no
   list, and the ideals around the boundaries that it names.
3. Where bytes matter or stages must not be empty, and the gap is still open: all ideals with the limits, of the merged
   graph and then of the unmerged one.
4. Where the ideals are too many: the same on graphs whose small costs are set to zero, which gives lower bounds, and
   then the ideals around the best solution's cuts, until they bring nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autosplit.partition.bounds.elimination import bound
from autosplit.partition.clock import FOREVER, Clock, OutOfTime
from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, base_graph, merge
from autosplit.partition.ideals.chains import Chain, best_chain
from autosplit.partition.ideals.enumerate import all_ideals, in_runs, neighbourhood, prefix_ideals, some_orders
from autosplit.partition.ideals.lattice import lattice
from autosplit.partition.ideals.swaps import best_nearby
from autosplit.partition.ideals.table import Table
from autosplit.partition.ideals.thresholds import threshold_search
from autosplit.partition.problem import Problem
from autosplit.partition.reduce.condense import MergeObjective, condense, merge_inseparable
from autosplit.partition.reduce.views import labels, without_small

TOLERANCE = 1e-9
"""Values that differ by less, relatively, are the same."""

_SHORT = 2_500
"""Orders of at most so many groups are tried by the handful."""

_FEW, _MANY, _PER_GROUP = 5_000, 20_000, 20
"""How many ideals are listed: for side questions; for a proof by thresholds, and how many more for each group."""

_ENTRIES = 25_000_000
"""No table has more entries, ideals times groups."""

_PROBES = (0.1, 0.03, 0.01, 0.004, 0.001)
"""Which small costs are set to zero, as parts of the best value."""

_SMALL_GAP = 0.01
"""Probes would hardly raise a bound that is so near to the best value already."""

_WIDTHS = (16, 64, 256)
_ROUNDS = 8
_POOL = 8_000
"""Ideals around the best cuts: how many around each, how often, and how many in all."""


_SWAPPED = 64
"""Graphs of at most so many groups are searched by swaps."""

_LOADS = MergeObjective(loads=True, bytes=False)


@dataclass(frozen=True)
class Found:
    """A chain within the limits, and the graph whose ideals it consists of."""

    chain: Chain
    graph: Graph

    @property
    def assignment(self) -> tuple[int, ...]:
        """The stage of each work."""
        inner = self.chain.ideals[1:]
        stage = [
            next(index for index, ideal in enumerate(inner) if ideal >> group & 1) for group in range(self.graph.size)
        ]
        return tuple(stage[group] for group in self.graph.group_of)


@dataclass(frozen=True)
class Outcome:
    """The best that was found, None when nothing fits; a valid lower bound; whether the search was exhaustive."""

    found: Found | None
    lower_bound: float
    exhaustive: bool


def search(
    problem: Problem,
    *,
    stages: int,
    least: Literal["load", "bytes"],
    empty: bool,
    ideal_limit: int,
    clock: Clock = FOREVER,
) -> Outcome:
    """Return the best cut into ``stages`` non-empty stages, or as many as the graph has groups when these are fewer.

    ``least="load"`` keeps the problem's capacities; ``least="bytes"`` has no limit. ``empty`` allows empty stages. When
    the ``clock`` is over the best so far comes back.
    """
    found = _Search(problem, stages=stages, least=least, empty=empty, ideal_limit=ideal_limit, clock=clock)
    found.run()
    return Outcome(found.best, found.lower, found.exhaustive)


class _Search:
    def __init__(
        self,
        problem: Problem,
        *,
        stages: int,
        least: Literal["load", "bytes"],
        empty: bool,
        ideal_limit: int,
        clock: Clock,
    ) -> None:
        self.problem, self.least, self.ideal_limit, self.clock = problem, least, ideal_limit, clock
        self.base = base_graph(problem)
        count = stages if empty else min(stages, self.base.size)
        self.goal = Goal.of(problem, stages=count, least=least, empty=empty)
        self.capacity = self._binding_capacity() if least == "load" else None
        self.concern = MergeObjective(loads=least == "load", bytes=least == "bytes" or self.capacity is not None)
        self.merged: dict[MergeObjective, Graph] = {}
        self.best: Found | None = None
        self.lower = self._first_bound()
        self.loads_known = self.exhaustive = False

    def run(self) -> None:
        """Search until the gap is closed, all was searched, or the time is over."""
        try:
            self._prefixes()
            self._loads_alone()
            self._more_prefixes()
            self._try_leanest()
            self._all()
            self._contracted()
            self._refine()
            self._swap()
            self._settle()
        except OutOfTime:
            pass
        self.exhaustive = self._closed()

    def _prefixes(self) -> None:
        """Find a first solution, whatever the time, and merge what a better one cannot separate."""
        start = self._condensed(self.concern)
        if start.size < self.goal.stages:
            start = self.base
        start = in_runs(start)
        table = Table(start, prefix_ideals([range(start.size)]), by_bytes=self.least == "bytes")
        chain = best_chain(table, goal=self._limited())
        self._take(chain, start)
        self.clock.check()
        if self.best is not None and self.least == "load":
            glued = merge_inseparable(self.base, bound_s=self.best.chain.value)
            if glued.size < self.base.size:
                self.base = glued
                self.merged.clear()

    def _more_prefixes(self) -> None:
        """Look among the prefixes of a few topological orders, where these are short."""
        graph = self._condensed(self.concern)
        if not self._closed() and self.goal.stages <= graph.size <= _SHORT:
            self._try(graph, prefix_ideals(some_orders(graph)))

    def _loads_alone(self) -> None:
        """Bound and search without an eye for bytes: where the best cut fits, it is the best that fits."""
        if self.least == "bytes" or self._closed():
            return
        graph = self._condensed(_LOADS)
        upper = math.inf if self.best is None else self.best.chain.value
        seed = None
        if self.capacity is not None and in_runs(graph) is graph:
            table = self._table(graph, prefix_ideals([range(graph.size)]))
            seed = best_chain(table, goal=self._relaxed(None), clock=self.clock)
            upper = upper if seed is None else min(upper, seed.value)
        ideals = lattice(graph, limit=_MANY + _PER_GROUP * graph.size, clock=self.clock)
        if ideals is None:
            self._name_boundaries(graph, upper=upper)
            return
        found = threshold_search(ideals, stages=self.goal.stages, lower=self.lower, upper=upper, clock=self.clock)
        self.lower, self.loads_known = max(self.lower, found.lower_bound), True
        seed = found.chain or seed
        if seed is not None and self.capacity is None and self._is_legal(seed):
            self._take(seed, graph)
        if not self._closed():
            # The merges had no eye for bytes, and stages may be empty, but most of what is legal is still there.
            near = () if seed is None else seed.ideals
            self._try(graph, self._few_ideals(graph) or self._around(graph, near, width=_WIDTHS[1]))

    def _name_boundaries(self, graph: Graph, *, upper: float) -> None:
        """Raise the lower bound by one that needs no list of ideals, and search around the boundaries that it names."""
        found = bound(graph, stages=self.goal.stages, upper_s=upper, clock=self.clock)
        if found is None:
            return
        self.lower = max(self.lower, found.lower_s)
        for width in _WIDTHS:
            if not self._closed():
                self._try(graph, self._around(graph, found.ideals, width=width))

    def _all(self) -> None:
        """Search graphs of growing detail, as long as all their ideals can be listed."""
        for graph in (self._condensed(self.concern), self.base):
            limit = min(self.ideal_limit, _ENTRIES // graph.size)
            ideals = None if self._closed() else all_ideals(graph, limit=limit)
            if ideals is None:
                return
            self._solve(self._table(graph, ideals))

    def _contracted(self) -> None:
        """Bound from graphs without their small costs, solve on the same groups with true costs."""
        for fraction in _PROBES:
            if self.least == "bytes" or self.loads_known or self.best is None:
                return
            if self.best.chain.value <= self.lower * (1 + _SMALL_GAP):
                return
            small_s = fraction * self.best.chain.value
            reduced = condense(
                merge_inseparable(
                    without_small(self.base, goal=self.goal, small_s=small_s), bound_s=self.best.chain.value
                ),
                concern=_LOADS,
            )
            ideals = self._few_ideals(reduced)
            if not ideals:
                return
            self._raise(best_chain(self._table(reduced, ideals), goal=self._relaxed(None), clock=self.clock))
            true = merge(self.base, labels(self.base, reduced))
            self._try(true, self._few_ideals(true))

    def _refine(self) -> None:
        """Search the ideals near the best cuts, wider when that brings nothing."""
        for width in _WIDTHS:
            for _ in range(_ROUNDS):
                if self.best is None or self._closed():
                    return
                before, graph = self.best.chain.value, self.best.graph
                self._try(graph, self._around(graph, self.best.chain.ideals, width=width))
                if self.best.chain.value >= before * (1 - TOLERANCE):
                    break

    def _swap(self) -> None:
        """Let single groups change stages, where these are few enough to try them all."""
        if self.best is None or self.least == "bytes" or self._closed() or self.base.size > _SWAPPED:
            return
        place = self.best.assignment
        stage = dict(zip(self.base.group_of, place, strict=True))
        ideals = [sum(1 << group for group, own in stage.items() if own < end) for end in range(self.goal.stages + 1)]
        self._take(best_nearby(self.base, ideals, goal=self._limited(), clock=self.clock), self.base)
        self._refine()

    def _settle(self) -> None:
        """Among equally good chains take the one whose fullest stage is emptiest."""
        if self.best is None or self.least == "bytes" or not self.base.has_bytes:
            return
        graph = self._condensed(MergeObjective(loads=True, bytes=True))
        ideals = self._few_ideals(graph)
        if not ideals:
            graph = self.best.graph
            ideals = self._around(graph, self.best.chain.ideals, width=_WIDTHS[0])
            ideals = ideals or list(self.best.chain.ideals)
        goal = replace(self._limited(), least="bytes")
        chain = best_chain(self._table(graph, ideals), goal=goal, clock=self.clock)
        if chain is not None:
            self.best = Found(replace(chain, value=self.best.chain.value), graph)

    def _solve(self, table: Table) -> None:
        """Bound by the best chain with empty stages, and take it, or the best without, where these are not allowed."""
        chain = best_chain(table, goal=replace(self._limited(), empty=True), clock=self.clock)
        self._raise(chain)
        if chain is not None and self._is_legal(chain):
            self._take(chain, table.graph)
        elif not self._closed():
            self._take(best_chain(table, goal=self._limited(), clock=self.clock), table.graph)
            if table.graph.size == self.base.size:
                self.lower = self.best.chain.value if self.best is not None else math.inf

    def _few_ideals(self, graph: Graph) -> list[int]:
        """Return all ideals, none where these are not few."""
        return all_ideals(graph, limit=min(_FEW, self.ideal_limit, _ENTRIES // graph.size)) or []

    def _is_legal(self, chain: Chain) -> bool:
        return self.goal.empty or all(begin != end for begin, end in pairwise(chain.ideals))

    def _around(self, graph: Graph, ideals: Sequence[int], *, width: int) -> list[int]:
        """Return the ideals together with those around them, none where these would be too many."""
        wanted = width * len(ideals)
        return neighbourhood(graph, ideals, width=width) if wanted <= min(_POOL, _ENTRIES // graph.size) else []

    def _try(self, graph: Graph, ideals: Sequence[int]) -> None:
        if ideals:
            self._take(best_chain(self._table(graph, ideals), goal=self._limited(), clock=self.clock), graph)

    def _take(self, chain: Chain | None, graph: Graph) -> None:
        """Take a chain that is better than the best so far."""
        if chain is not None and (self.best is None or chain.value < self.best.chain.value):
            self.best = Found(chain, graph)

    def _raise(self, chain: Chain | None) -> None:
        """Raise the lower bound to the value of the best chain of a relaxation, none where all are above the limit."""
        value = math.inf if chain is None else chain.value
        self.lower = max(self.lower, value if self.best is None else min(value, self.best.chain.value))

    def _try_leanest(self) -> None:
        """Look for a chain within the capacities near the one that needs the fewest bytes.

        The fullest stage of every chain needs at least that search's lower bound: with less room nothing fits.
        """
        if self.best is not None or self.capacity is None or self._closed():
            return
        lean = _Search(
            self.problem,
            stages=self.goal.stages,
            least="bytes",
            empty=self.goal.empty,
            ideal_limit=self.ideal_limit,
            clock=self.clock,
        )
        lean.run()
        assert lean.best is not None, "without limits every graph can be cut"
        if lean.lower > max(self.capacity) * (1 + TOLERANCE):
            self.lower = math.inf
            return
        for width in (1, *_WIDTHS):
            if self.best is None:
                graph = lean.best.graph
                self._try(graph, self._around(graph, lean.best.chain.ideals, width=width))

    def _relaxed(self, capacity: tuple[float, ...] | None) -> Goal:
        goal = replace(self._limited(), empty=True)
        return replace(goal, capacity_bytes=capacity) if self.least == "load" else goal

    def _limited(self) -> Goal:
        limit = math.inf if self.best is None else self.best.chain.value * (1 + TOLERANCE)
        if self.least == "load":
            return replace(self.goal, load_limit_s=limit, capacity_bytes=self.capacity)
        return replace(self.goal, capacity_bytes=(limit,) * self.goal.stages)

    def _condensed(self, concern: MergeObjective) -> Graph:
        """Return the graph without what need not be cut."""
        if concern not in self.merged:
            self.merged[concern] = condense(self.base, concern=concern)
        return self.merged[concern]

    def _closed(self) -> bool:
        if self.best is None:
            return math.isinf(self.lower)
        return self.best.chain.value <= self.lower * (1 + TOLERANCE)

    def _table(self, graph: Graph, ideals: Sequence[int]) -> Table:
        self.clock.check()
        return Table(graph, ideals, by_bytes=self.least == "bytes")

    def _first_bound(self) -> float:
        if self.least == "bytes":
            return 0.0
        return max(sum(self.base.times_s) / self.goal.stages, *self.base.times_s)

    def _binding_capacity(self) -> tuple[float, ...] | None:
        """Return the capacities, or None when even everything on one stage would fit in each."""
        capacity = self.goal.capacity_bytes
        if capacity is None:
            return None
        kept = sum(hold.bytes for hold in self.problem.holds) * max(self.goal.in_flight)
        most = sum(self.base.static_bytes) + kept + max(self.base.transient_bytes)
        return None if most <= min(capacity) else capacity
