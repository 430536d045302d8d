"""The cut whose simulated step is shortest.

For each order of devices that is allowed:

1. A pool: every ideal of the graph where these are few, else of those of almost equal weight the cheapest to cut at.
2. Candidates: the chains that a lower bound of the step comes from (`step_bound`), and for several measures of a
   stage and limits on the longest the chain with the least transfers.
3. All are simulated; from the best, boundaries move while the simulated step gets shorter (`step_search`).
4. Where the pool is not complete, the ideals around the best cut make the next pool, until that brings nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import or_

import numpy as np

from autosplit.partition.clock import FOREVER, Clock
from autosplit.partition.costs import Costs, check
from autosplit.partition.fast_simulate import Floats, Ints
from autosplit.partition.goal import PLAIN, Goal
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.moves import Place
from autosplit.partition.problem import RECOMPUTE, Problem, again_share
from autosplit.partition.stage_costs import NONE_FITS, StageCosts
from autosplit.partition.step_bound import Boxes, Sums, limited_chains, simple_bound
from autosplit.partition.step_model import StepModel
from autosplit.partition.step_pool import Choose, StagePool, nearby, pool_ideals
from autosplit.partition.step_relax import relaxed_bound
from autosplit.partition.step_search import LocalSearch, Scored
from autosplit.partition.table import Table

_IDEALS, _STAGES, _PLACES = 2_000, 400_000, 4_000_000
"""Ideals and stages of a pool, at most, and stages times positions."""
_EFFORT = 40_000_000
"""Stages, times positions, that the bounds of one pool look at, about."""
_ORDERS = 6
_MOST_ROUNDS, _FEW_ROUNDS = 600, 24
_FAMILIES = 3
_STARTS = 6
_PASSES = 2
_ROUNDS = 60
_WIDTHS = (24, 64)
_CHECKED = 16


@dataclass(frozen=True)
class Step:
    """An assignment with the order of its devices, its step, and what no step of the problem can be below."""

    assignment: tuple[int, ...]
    order: tuple[int, ...]
    step_s: float
    lower_bound_s: float


def least_step(
    problem: Problem,
    *,
    stages: int,
    empty: bool,
    assignment: Sequence[int],
    order: Sequence[int] | None = None,
    clock: Clock = FOREVER,
) -> Step:
    """Return the cut with the shortest simulated step that is found, starting from a cut that fits.

    ``stages`` and ``empty`` are those of `solve`.
    """
    graph = _timed(problem)
    count = stages if empty else problem.whole(min(stages, graph.size))
    costs = check(problem, assignment, order=order, stages=count if empty else None)
    best = Step(tuple(assignment), costs.order, costs.step_s, math.inf)
    orders = list(islice(_orders(problem, best.order, places=problem.places(count)), _ORDERS + 1))
    lower = simple_bound(problem, stages=count) if len(orders) > _ORDERS else math.inf
    for own in orders[:_ORDERS]:
        search = _Search(_reordered(problem, own), graph, stages=count, empty=empty, clock=clock)
        found = search.run(best.assignment, upper=best.step_s)
        lower = min(lower, found.lower_bound_s)
        if found.step_s < best.step_s * (1 - 1e-12):
            best = replace(found, order=own)
    return replace(best, lower_bound_s=min(lower, best.step_s))


def _timed(problem: Problem) -> Graph:
    """Return the problem's graph with the times that its schedule uses."""
    graph = base_graph(problem)
    if problem.schedule != "forward":
        return graph
    times_s = np.zeros(graph.size)
    np.add.at(times_s, np.array(graph.group_of), np.array([work.forward_s for work in problem.works]))
    return replace(graph, times_s=tuple(times_s.tolist()))


def _orders(problem: Problem, first: tuple[int, ...], *, places: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders of devices that differ in more than equal devices, ``first`` first."""
    if problem.devices is None or not problem.free_order:
        yield tuple(range(places))
        return
    devices = problem.devices
    known = set()
    if len(first) == places:
        known.add(tuple(devices[index] for index in first))
        yield first

    def grow(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == places:
            kinds = tuple(devices[index] for index in order)
            if kinds not in known:
                known.add(kinds)
                yield order
            return
        tried = set()
        for index, device in enumerate(devices):
            if index not in order and device not in tried:
                tried.add(device)
                yield from grow((*order, index))

    yield from grow(())


def _reordered(problem: Problem, order: tuple[int, ...]) -> Problem:
    """Return the problem with its devices in a fixed order."""
    if problem.devices is None:
        return problem
    links = None if problem.links is None else problem.links[: len(order) - 1]
    return replace(problem, devices=tuple(problem.devices[index] for index in order), links=links, free_order=False)


class _Search:
    """The search on one order of devices."""

    def __init__(self, problem: Problem, graph: Graph, *, stages: int, empty: bool, clock: Clock) -> None:
        self.problem, self.graph, self.empty, self.clock = problem, graph, empty, clock
        self.model = StepModel(problem, graph, stages=stages)
        self.goal = replace(Goal.of(problem, stages=stages), load_limit_s=math.inf)
        capacity = self.goal.capacity_bytes or (math.inf,) * stages
        terms = self.goal.terms
        self.places = [
            Place(terms[place] if terms else PLAIN, capacity[place], self.goal.in_flight[place])
            for place in range(stages)
        ]

    def run(self, assignment: tuple[int, ...], *, upper: float) -> Step:
        """Return the best step found and a bound; ``upper`` is the step of the best known cut."""
        seed = self._ideals_of(assignment) if max(assignment) < self.model.stages else None
        pool, complete = self._pool(seed, upper)
        self.local = LocalSearch(pool, clock=self.clock)
        if seed is not None:
            self.local.score([_chain(pool, seed)])
        lower = self._candidates(pool, upper, rounds=_MOST_ROUNDS if complete else _FEW_ROUNDS)
        best = self._descend(_STARTS)
        if not complete:
            lower = simple_bound(self.problem, stages=self.model.stages)
            self._refine(best, upper)
            known = min([upper, *(each.step_s for each in self.local.best(1))])
            lower = max(lower, relaxed_bound(self.model, upper=known, clock=self.clock))
        return self._checked(lower)

    def _pool(self, seed: tuple[int, ...] | None, upper: float) -> tuple[StagePool, bool]:
        """Return a pool, and whether it has every ideal and every stage of a cut that takes at most ``upper``."""
        most = _IDEALS
        while True:
            ideals, complete = pool_ideals(self.graph, self.model, most=most, always=seed or ())
            pool = self._build(ideals, upper)
            if pool.complete:
                return pool, complete
            most = most * 2 // 3

    def _build(self, ideals: Sequence[int], upper: float) -> StagePool:
        # A step is no shorter than all microbatches on one stage.
        limit_s = upper * (1 + 1e-9) / self.problem.microbatches
        table = Table(self.graph, ideals)
        most = min(_STAGES, max(_PLACES // self.model.stages, 20_000))
        return StagePool(self.model, table, limit_s=limit_s, choose=self._chooser(table), most=most, empty=self.empty)

    def _chooser(self, table: Table) -> Choose:
        microbatches, capacity = self.problem.microbatches, self.problem.capacity_bytes
        share = np.array([again_share(option, microbatches=microbatches) for option in RECOMPUTE])
        fewest = min(again_share(option, microbatches=microbatches) for option in self.problem.recompute)
        costs = StageCosts(table, self.goal)

        def choose(ideal: int, larger: Ints, place: int) -> Floats:
            if capacity is None:
                return np.full(len(larger), fewest)
            option = costs.options(ideal, larger, self.places[place])
            again: Floats = np.where(option == NONE_FITS, np.inf, share[option])
            return again

        return choose

    def _candidates(self, pool: StagePool, upper: float, *, rounds: int) -> float:
        """Simulate the chains that bounds and limits lead to; return the bound."""
        sums = Sums(pool)
        rounds = max(4, min(rounds, _EFFORT // max(1, len(pool.tail) * self.model.stages)))
        self.local.score(limited_chains(sums, rounds=rounds, clock=self.clock))
        best = self.local.best(1)
        lower = simple_bound(self.problem, stages=self.model.stages)
        for family in sums.ranked(best[0].chain)[:_FAMILIES] if best else ():
            ceiling = min([upper, *(each.step_s for each in self.local.best(1))])
            found = Boxes(sums, family, upper=ceiling).run(rounds=rounds, clock=self.clock)
            lower = max(lower, found.lower)
            self.local.score(found.chains)
        return lower

    def _descend(self, starts: int) -> Scored | None:
        """Move boundaries from the best chains one by one, then from what is best after that also two at a time."""
        for start in self.local.best(starts):
            self.local.descend(start, rounds=_ROUNDS, double=False)
        done: set[tuple[int, ...]] = set()
        for _ in range(_PASSES):
            for start in self.local.best(_PASSES):
                if start.chain not in done:
                    done |= {start.chain, self.local.descend(start, rounds=_ROUNDS, double=True).chain}
        return next(iter(self.local.best(1)), None)

    def _refine(self, best: Scored | None, upper: float) -> None:
        """Go on among the ideals around the best cut."""
        for width in _WIDTHS:
            if best is None or self.clock.over:
                break
            ideals = tuple(self.local.pool.table.ideals[place] for place in best.chain)
            near = self._build(nearby(self.model, ideals, width=width), upper)
            if near.complete:
                self.local = LocalSearch(near, clock=self.clock)
                self.local.score([_chain(near, ideals)])
                best = self._descend(1)

    def _checked(self, lower: float) -> Step:
        """Return the best cut that the checker lets pass; of equal ones that whose fullest device needs least."""
        pool, order = self.local.pool, tuple(range(max(self.model.lane) + 1))
        found: Step | None = None
        least = math.inf
        for each in self.local.best(_CHECKED):
            if found is not None and each.step_s > found.step_s * (1 + 1e-9):
                break
            assignment = self._assignment(pool, each.chain)
            costs = check(self.problem, assignment, stages=self.model.stages if self.empty else None)
            better = found is None or costs.step_s < found.step_s * (1 - 1e-9)
            if _fits(self.problem, costs) and (better or max(costs.device_bytes) < least):
                found, least = Step(assignment, order, costs.step_s, lower), max(costs.device_bytes)
        return found or Step((), order, math.inf, lower)

    def _assignment(self, pool: StagePool, chain: tuple[int, ...]) -> tuple[int, ...]:
        stage = pool.stage_of(np.array([chain], dtype=np.int64))[0].tolist()
        return tuple(stage[group] for group in self.graph.group_of)

    def _ideals_of(self, assignment: tuple[int, ...]) -> tuple[int, ...]:
        members = [0] * self.model.stages
        for group, own in dict(zip(self.graph.group_of, assignment, strict=True)).items():
            members[own] |= 1 << group
        return (0, *accumulate(members, or_))


def _chain(pool: StagePool, ideals: Sequence[int]) -> tuple[int, ...]:
    places = {ideal: place for place, ideal in enumerate(pool.table.ideals)}
    return tuple(places[ideal] for ideal in ideals)


def _fits(problem: Problem, costs: Costs) -> bool:
    capacity = problem.capacity_bytes or (None,) * len(costs.order)
    pairs = zip(costs.device_bytes, (capacity[device] for device in costs.order), strict=True)
    return all(limit is None or needed <= limit for needed, limit in pairs)
