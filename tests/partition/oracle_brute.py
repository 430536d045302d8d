"""Oracles that look at everything: every assignment, and every chain of ideals, with nothing pruned or merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from autosplit.partition.problem import Problem
from tests.partition.oracle_costs import Rules, flows, members


@dataclass(frozen=True)
class Best:
    """The least value, infinite when nothing fits, and what has it."""

    value: float
    assignment: tuple[int, ...] | None


def assignments(problem: Problem, *, stages: int, empty: bool = False) -> Iterator[tuple[int, ...]]:
    """Yield every legal assignment, work by work; without ``empty`` each stage has a work."""
    rules = Rules(problem, stages)
    count = len(problem.works)
    pairs = flows(problem) | set(_same(problem))
    earlier = [[(tail, head) for tail, head in pairs if max(tail, head) == last] for last in range(count)]

    def extend(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(prefix) == count:
            if (empty or len(set(prefix)) == stages) and rules.legal(prefix):
                yield prefix
            return
        for stage in range(stages):
            longer = (*prefix, stage)
            reachable = empty or stages - len(set(longer)) <= count - len(longer)
            if reachable and all(longer[tail] <= longer[head] for tail, head in earlier[len(prefix)]):
                yield from extend(longer)

    return extend(())


def most_stages(problem: Problem, *, stages: int) -> int:
    """Return into how many non-empty stages, at most ``stages``, the problem can be cut."""
    return min(stages, len(set(closures(problem))))


def brute_force(problem: Problem, *, stages: int, empty: bool = False) -> Best:
    """Return the least bottleneck over assignments."""
    return _least(problem, Rules.bottleneck_s, stages=stages, empty=empty)


def brute_force_step(problem: Problem, *, stages: int, empty: bool = False) -> Best:
    """Return the shortest simulated step over assignments."""
    return _least(problem, Rules.step_s, stages=stages, empty=empty)


def _least(problem: Problem, value_of: Callable[..., float], *, stages: int, empty: bool) -> Best:
    count = stages if empty else most_stages(problem, stages=stages)
    rules = Rules(problem, count)
    best = Best(math.inf, None)
    for assignment in assignments(problem, stages=count, empty=empty):
        value = value_of(rules, assignment)
        if value < best.value:
            best = Best(value, assignment)
    return best


def closures(problem: Problem) -> list[int]:
    """Return for each work the works that cannot lie in a later stage than it, itself and whole colours included."""
    count = len(problem.works)
    needs = [1 << work for work in range(count)]
    for tail, head in [*flows(problem), *_same(problem)]:
        needs[head] |= 1 << tail
    while True:
        larger = list(needs)
        for work, mask in enumerate(needs):
            for other in members(mask):
                larger[work] |= needs[other]
        if larger == needs:
            return needs
        needs = larger


def ideals_of(problem: Problem) -> list[int]:
    """Return all sets of works that hold, with a work, all that must not come later, and whole colours."""
    closed = set(closures(problem))
    found = {0}
    fresh = [0]
    while fresh:
        ideal = fresh.pop()
        for mask in closed:
            if ideal | mask not in found:
                found.add(ideal | mask)
                fresh.append(ideal | mask)
    return sorted(found, key=lambda ideal: (ideal.bit_count(), ideal))


def _same(problem: Problem) -> Iterator[tuple[int, int]]:
    for tail, head in itertools.permutations(range(len(problem.works)), 2):
        colour = problem.works[tail].colocation_group
        if colour is not None and colour == problem.works[head].colocation_group:
            yield tail, head


def ideal_dp(problem: Problem, *, stages: int, empty: bool = False) -> float:
    """Return the least bottleneck into exactly ``stages`` stages, one on each device, over all chains of ideals."""
    assert problem.virtual_stages == 1
    assert not problem.ties
    rules = Rules(problem, stages)

    @cache
    def load_s(inside: int, stage: int) -> float:
        option, capacity = rules.option("never", inside, before=0, stage=stage), rules.device(stage).capacity_bytes
        return option.load_s if capacity is None or option.peak_bytes <= capacity else math.inf

    ideals = ideals_of(problem)
    best = {0: 0.0}
    for stage in range(stages):
        following: dict[int, float] = {}
        for larger in ideals:
            values = [
                max(value, load_s(larger ^ ideal, stage))
                for ideal, value in best.items()
                if ideal & larger == ideal and (empty or ideal != larger)
            ]
            following[larger] = min(values, default=math.inf)
        best = {ideal: value for ideal, value in following.items() if value < math.inf}
    return best.get((1 << len(problem.works)) - 1, math.inf)
