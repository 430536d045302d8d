"""Ideals: sets of groups that contain all their predecessors, as Python ints with bit ``i`` for group ``i``.

A cut into stages is a chain of ideals, empty set to everything; a stage is the difference of two neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from autosplit.partition.goal import FOREVER, Timer
from autosplit.partition.graph import Graph, merge

_MOST_GROUPS = 2_000
"""Above this many groups first solutions are looked for among runs of the model's order."""

_RANDOM, _DRAWN = 8, 1_000
"""Pairs of random orders: at most, and how many groups they have in all where that leaves more than two."""


def list_ideals(graph: Graph, *, limit: int, quantum: float = 1.0, clock: Timer = FOREVER) -> dict[int, int] | None:
    """Return every ideal of the graph and its time, or None when there are more than ``limit``.

    Times are in whole numbers of ``quantum`` seconds. Raises OutOfTime when the ``clock`` is over.
    """
    quanta = [round(time_s / quantum) for time_s in graph.times_s]
    before, after = _masks(graph.predecessors()), [sorted(heads) for heads in graph.successors()]
    times = {0: 0}
    level = {0: sum(1 << group for group, tails in enumerate(before) if not tails)}
    """The ideals of one size, with the groups that each may grow by."""
    while level:
        clock.check()
        following: dict[int, int] = {}
        for ideal, addable in level.items():
            rest = addable
            while rest:
                bit = rest & -rest
                rest ^= bit
                grown = ideal | bit
                if grown not in following:
                    group = bit.bit_length() - 1
                    opened = sum(1 << head for head in after[group] if not before[head] & ~grown)
                    following[grown] = addable ^ bit | opened
                    times[grown] = times[ideal] + quanta[group]
        if len(times) > limit:
            return None
        level = following
    return times


def prefix_ideals(orders: Iterable[Sequence[int]]) -> list[int]:
    """Return the ideals that are prefixes of at least one of the topological orders."""
    pool = {0: None}
    for order in orders:
        ideal = 0
        for group in order:
            ideal |= 1 << group
            pool[ideal] = None
    return list(pool)


def in_runs(graph: Graph) -> Graph:
    """Return the graph; where it has very many groups, with neighbours in the model's order merged into even runs."""
    if graph.size <= _MOST_GROUPS:
        return graph
    half = _MOST_GROUPS // 2
    each_s = (sum(graph.times_s) or 1.0) / half
    so_far_s = 0.0
    first: dict[tuple[int, int], int] = {}
    runs: list[int] = []
    for group, time_s in enumerate(graph.times_s):
        # A run ends with its share of the time, or of the groups.
        runs.append(first.setdefault((int(so_far_s / each_s), group * half // graph.size), group))
        so_far_s += time_s
    return merge(graph, runs)


def some_orders(graph: Graph) -> list[list[int]]:
    """Return a few topological orders: the model's, each branch to its end, every work as late as possible, random."""
    before, after = graph.predecessors(), graph.successors()
    chance = random.Random(0)
    orders = [list(range(graph.size)), _walk(before, after), _walk(after, before)[::-1]]
    for _ in range(max(2, min(_RANDOM, _DRAWN // graph.size))):
        orders += [_walk(before, after, chance=chance), _walk(after, before, chance=chance)[::-1]]
    return orders


def neighbourhood(graph: Graph, ideals: Iterable[int], *, width: int) -> list[int]:
    """Return the ideals together with about ``width`` around each: a group more or less, the nearest first."""
    steps = _Steps(graph)
    pool: dict[int, None] = {}
    for ideal in ideals:
        near = {ideal: None}
        frontier = [ideal]
        while frontier and len(near) < width:
            reached = [other for middle in frontier for other in steps.adjacent(middle)]
            frontier = [other for other in dict.fromkeys(reached) if other not in near][: width - len(near)]
            near |= dict.fromkeys(frontier)
        pool |= near
    return list(pool)


class _Steps:
    """From an ideal to those with a group more or less."""

    def __init__(self, graph: Graph) -> None:
        before, after = graph.predecessors(), graph.successors()
        self.before, self.after = _masks(before), _masks(after)
        self.last_before = np.array([max(tails, default=-1) for tails in before])
        self.first_after = np.array([min(heads, default=graph.size) for heads in after])

    def adjacent(self, ideal: int) -> list[int]:
        """Return the ideals next to this one, by the group that they differ in."""
        # All below ``low`` is inside and nothing from ``end`` on: few groups have their neighbours on the right side.
        low, end = (~ideal & ideal + 1).bit_length() - 1, ideal.bit_length()
        fewer = np.flatnonzero(self.first_after[:end] >= low)
        more = low + np.flatnonzero(self.last_before[low:] < end)
        adjacent = []
        for group in np.union1d(fewer, more).tolist():
            bit = 1 << group
            if ideal & bit:
                if not self.after[group] & ideal:
                    adjacent.append(ideal ^ bit)
            elif not self.before[group] & ~ideal:
                adjacent.append(ideal | bit)
        return adjacent


def _walk(before: Sequence[set[int]], after: Sequence[set[int]], *, chance: random.Random | None = None) -> list[int]:
    """Return a topological order that follows what was opened last."""
    waiting = [len(tails) for tails in before]
    ready = [group for group, count in enumerate(waiting) if not count][::-1]
    order = []
    while ready:
        group = ready.pop()
        order.append(group)
        opened = []
        for head in sorted(after[group], reverse=True):
            waiting[head] -= 1
            if not waiting[head]:
                opened.append(head)
        if chance is not None:
            chance.shuffle(opened)
        ready += opened
    return order


def _masks(neighbours: Sequence[set[int]]) -> list[int]:
    return [sum(1 << other for other in others) for others in neighbours]
