"""The search for the best chain of stages: from a quick solution to a proof.

1. A first solution: the best prefixes of a few topological orders.
2. Graphs merged as far as the best value survives when stages may be empty. Where their ideals can be listed, they are
   searched by thresholds: a lower bound, and usually the solution as well.
3. While the gap is open: all ideals with the limits, of the merged graph and then of the unmerged one.
4. Where the ideals are too many: the same on graphs whose small costs are set to zero, which gives lower bounds, and
   then the ideals around the best solution's cuts, until they bring nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autosplit.partition.goal import FOREVER, Goal, OutOfTime, Timer
from autosplit.partition.graph import Graph, base_graph, merge
from autosplit.partition.ideals.chains import IdealChain, best_chain
from autosplit.partition.ideals.condense import condense, labels, without_small
from autosplit.partition.ideals.enumerate import in_runs, list_ideals, neighbourhood, prefix_ideals, some_orders
from autosplit.partition.ideals.table import IdealTable
from autosplit.partition.ideals.thresholds import lattice, threshold_search
from autosplit.partition.problem import Problem

_TOLERANCE = 1e-9
"""Values that differ by less, relatively, are the same."""

_SHORT = 2_500
"""Orders of at most so many groups are tried by the handful."""

_FEW, _MANY, _PER_GROUP = 5_000, 50_000, 20
"""How many ideals are listed: for side questions; for a proof by thresholds, and how many more for each group."""

_ENTRIES = 25_000_000
"""No table has more entries, ideals times groups."""

_PROBES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0)
"""Which small costs are set to zero, as parts of the best value."""

_WIDTHS = (16, 64, 256)
_ROUNDS = 8
_POOL = 8_000
"""Ideals around the best cuts: how many around each, how often, and how many in all."""


@dataclass(frozen=True)
class Found:
    """A chain within the limits, and the graph whose ideals it consists of."""

    chain: IdealChain
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
class Solution:
    """The best assignment that was found (None if none fits), and a valid lower bound.

    ``exhaustive``: the search was complete, so no better assignment exists, or none that fits.
    """

    assignment: tuple[int, ...] | None
    lower_bound: float
    exhaustive: bool


class IdealSearch:
    """The search for the best cut into ``stages`` non-empty stages, or as many as the graph has groups, if fewer.

    ``least="load"`` keeps the problem's capacity; ``least="bytes"`` has no limit. ``empty`` allows empty stages.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        stages: int,
        least: Literal["load", "bytes"],
        empty: bool,
        ideal_limit: int,
        clock: Timer = FOREVER,
    ) -> None:
        self.problem, self.least, self.ideal_limit, self.clock = problem, least, ideal_limit, clock
        self.base = base_graph(problem)
        count = stages if empty else min(stages, self.base.size)
        limit = min((limit for limit in problem.capacity_bytes or () if limit is not None), default=math.inf)
        binds = least == "load" and sum(self.base.static_bytes) > limit
        self.goal = Goal(count, least, capacity_bytes=limit if binds else math.inf, empty=empty)
        self.loads, self.bytes = least == "load", least == "bytes" or binds
        self.merged: dict[tuple[bool, bool], Graph] = {}
        self.best: Found | None = None
        times_s = self.base.times_s
        self.lower = max(sum(times_s) / count, max(times_s)) if self.loads else 0.0
        self.loads_known = False

    def run(self) -> Solution:
        """Search until the gap is closed, all was searched, or the time is over; return the best so far."""
        try:
            self._prefixes()
            self._loads_alone()
            self._more_prefixes()
            self._try_leanest()
            self._all()
            self._contracted()
            self._refine()
            self._settle()
        except OutOfTime:
            pass
        return Solution(None if self.best is None else self.best.assignment, self.lower, self.closed)

    @property
    def closed(self) -> bool:
        """Whether the best is proven to be that, or that nothing fits."""
        if self.best is None:
            return math.isinf(self.lower)
        return self.best.chain.value <= self.lower * (1 + _TOLERANCE)

    def _prefixes(self) -> None:
        """Find a first solution, whatever the time."""
        condensed = self._condensed(loads=self.loads, bytes_=self.bytes)
        start = in_runs(condensed if condensed.size >= self.goal.stages else self.base)
        table = IdealTable(start, prefix_ideals([range(start.size)]), by_bytes=self.least == "bytes")
        self._take(best_chain(table, goal=self._limited()), start)
        self.clock.check()

    def _more_prefixes(self) -> None:
        """Look among the prefixes of a few topological orders, where these are short."""
        graph = self._condensed(loads=self.loads, bytes_=self.bytes)
        if not self.closed and self.goal.stages <= graph.size <= _SHORT:
            self._try(graph, prefix_ideals(some_orders(graph)))

    def _loads_alone(self) -> None:
        """Bound and search without an eye for bytes: where the best cut fits, it is the best that fits."""
        if not self.loads or self.closed:
            return
        graph = self._condensed(loads=True, bytes_=False)
        upper = math.inf if self.best is None else self.best.chain.value
        seed = None
        if self.bytes and in_runs(graph) is graph:
            table = self._table(graph, prefix_ideals([range(graph.size)]))
            seed = best_chain(table, goal=self._relaxed(), clock=self.clock)
            upper = upper if seed is None else min(upper, seed.value)
        ideals = lattice(graph, limit=_MANY + _PER_GROUP * graph.size, clock=self.clock)
        if ideals is None:
            return
        improved = threshold_search(ideals, stages=self.goal.stages, lower=self.lower, upper=upper, clock=self.clock)
        self.lower, self.loads_known = max(self.lower, improved.lower_bound), True
        seed = improved.chain or seed
        if seed is not None and not self.bytes and self._is_legal(seed):
            self._take(seed, graph)
        if not self.closed:
            # The merges had no eye for bytes, and stages may be empty, but most of what is legal is still there.
            near = () if seed is None else seed.ideals
            self._try(graph, self._ideals(graph, most=_FEW) or self._around(graph, near, width=_WIDTHS[1]))

    def _try_leanest(self) -> None:
        """Look for a chain within the capacity near the one that needs the fewest bytes.

        The fullest stage of every chain needs at least that search's lower bound: with less room nothing fits.
        """
        if self.best is not None or not (self.loads and self.bytes) or self.closed:
            return
        lean = IdealSearch(
            self.problem,
            stages=self.goal.stages,
            least="bytes",
            empty=self.goal.empty,
            ideal_limit=self.ideal_limit,
            clock=self.clock,
        )
        lean.run()
        assert lean.best is not None, "without limits every graph can be cut"
        if lean.lower > self.goal.capacity_bytes * (1 + _TOLERANCE):
            self.lower = math.inf
            return
        for width in (1, *_WIDTHS):
            if self.best is None:
                graph = lean.best.graph
                self._try(graph, self._around(graph, lean.best.chain.ideals, width=width))

    def _all(self) -> None:
        """Search graphs of growing detail, as long as all their ideals can be listed."""
        for graph in (self._condensed(loads=self.loads, bytes_=self.bytes), self.base):
            ideals = [] if self.closed else self._ideals(graph)
            if not ideals:
                return
            self._solve(self._table(graph, ideals))

    def _contracted(self) -> None:
        """Bound from graphs without their small costs, solve on the same groups with true costs."""
        for fraction in _PROBES:
            if not self.loads or self.loads_known or self.best is None or self.closed:
                return
            bound_s = self.best.chain.value
            relaxed = self._relaxed()
            reduced = condense(without_small(self.base, small_s=fraction * bound_s), loads=True, bytes_=False)
            ideals = self._ideals(reduced, most=_FEW)
            if not ideals:
                return
            self._raise(best_chain(self._table(reduced, ideals), goal=relaxed, clock=self.clock))
            true = merge(self.base, labels(self.base, reduced))
            self._try(true, self._ideals(true, most=_FEW))

    def _refine(self) -> None:
        """Search the ideals near the best cuts, wider when that brings nothing."""
        for width in _WIDTHS:
            for _ in range(_ROUNDS):
                if self.best is None or self.closed:
                    return
                before, graph = self.best.chain.value, self.best.graph
                self._try(graph, self._around(graph, self.best.chain.ideals, width=width))
                if self.best.chain.value >= before * (1 - _TOLERANCE):
                    break

    def _settle(self) -> None:
        """Among equally good chains take the one whose fullest stage is emptiest."""
        if self.best is None or not self.loads or not any(self.base.static_bytes):
            return
        graph = self._condensed(loads=True, bytes_=True)
        ideals: Sequence[int] = self._ideals(graph, most=_FEW)
        if not ideals:
            graph = self.best.graph
            ideals = self._around(graph, self.best.chain.ideals, width=_WIDTHS[0]) or self.best.chain.ideals
        chain = best_chain(self._table(graph, ideals), goal=replace(self._limited(), least="bytes"), clock=self.clock)
        if chain is not None:
            self.best = Found(replace(chain, value=self.best.chain.value), graph)

    def _solve(self, table: IdealTable) -> None:
        """Bound by the best chain with empty stages, and take it, or the best without, where these are not allowed."""
        chain = best_chain(table, goal=replace(self._limited(), empty=True), clock=self.clock)
        self._raise(chain)
        if chain is not None and self._is_legal(chain):
            self._take(chain, table.graph)
        elif not self.closed:
            self._take(best_chain(table, goal=self._limited(), clock=self.clock), table.graph)
            if table.graph.size == self.base.size:
                self.lower = self.best.chain.value if self.best is not None else math.inf

    def _is_legal(self, chain: IdealChain) -> bool:
        return self.goal.empty or all(begin != end for begin, end in pairwise(chain.ideals))

    def _ideals(self, graph: Graph, *, most: float = math.inf) -> list[int]:
        """Return all ideals, or an empty list if there are too many."""
        return list(list_ideals(graph, limit=int(min(self.ideal_limit, _ENTRIES // graph.size, most))) or ())

    def _around(self, graph: Graph, ideals: Sequence[int], *, width: int) -> list[int]:
        """Return the ideals and their neighbours, or an empty list if there are too many."""
        few = width * len(ideals) <= min(_POOL, _ENTRIES // graph.size)
        return neighbourhood(graph, ideals, width=width) if few else []

    def _try(self, graph: Graph, ideals: Sequence[int]) -> None:
        if ideals:
            self._take(best_chain(self._table(graph, ideals), goal=self._limited(), clock=self.clock), graph)

    def _take(self, chain: IdealChain | None, graph: Graph) -> None:
        """Take a chain that is better than the best so far."""
        if chain is not None and (self.best is None or chain.value < self.best.chain.value):
            self.best = Found(chain, graph)

    def _raise(self, chain: IdealChain | None) -> None:
        """Raise the lower bound to the value of the best chain of a relaxation, none where all are above the limit."""
        value = math.inf if chain is None else chain.value
        self.lower = max(self.lower, value if self.best is None else min(value, self.best.chain.value))

    def _relaxed(self) -> Goal:
        """Return the goal without an eye for bytes: its best value, where stages may be empty, is a lower bound."""
        return replace(self._limited().relaxed(), empty=True)

    def _limited(self) -> Goal:
        limit = math.inf if self.best is None else self.best.chain.value * (1 + _TOLERANCE)
        return replace(self.goal, load_limit_s=limit) if self.loads else replace(self.goal, capacity_bytes=limit)

    def _condensed(self, *, loads: bool, bytes_: bool) -> Graph:
        """Return the graph without what need not be cut."""
        if (loads, bytes_) not in self.merged:
            self.merged[loads, bytes_] = condense(self.base, loads=loads, bytes_=bytes_)
        return self.merged[loads, bytes_]

    def _table(self, graph: Graph, ideals: Sequence[int]) -> IdealTable:
        self.clock.check()
        return IdealTable(graph, ideals, by_bytes=self.least == "bytes")
