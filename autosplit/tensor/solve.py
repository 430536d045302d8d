"""The cheapest choice of one alternative per variable, where costs are tables over few variables each.

Variables are eliminated one by one: the cheapest alternative is noted for every choice of those that share a table
with it (nonserial dynamic programming; Bertelè and Brioschi, 1972). On a chain it is the shortest path.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

Variable = Hashable
_MOST = 2**18
"""Entries of a table at most: above, the variable that shares tables with most others is fixed."""


@dataclass(frozen=True)
class Table:
    """Costs over all combinations of alternatives of some variables, a dimension for each."""

    variables: tuple[Variable, ...]
    costs: np.ndarray


@dataclass(frozen=True)
class Cheapest:
    """The alternative of each variable; the sum is the least among those in which ``fixed`` ones are as they are."""

    chosen: dict[Variable, int]
    fixed: tuple[Variable, ...]


def cheapest(tables: Sequence[Table]) -> Cheapest:
    """Return the alternative of each variable that makes the sum of all tables least.

    Where tables would become too large, some variables are fixed by themselves first.
    """
    counts = {v: n for table in tables for v, n in zip(table.variables, table.costs.shape, strict=True)}
    sizes = {variable: size for variable, size in counts.items() if size > 1}
    tables = [Table(tuple(v for v in table.variables if v in sizes), table.costs.squeeze()) for table in tables]
    keys_left = itertools.count(len(tables))
    number = {variable: n for n, variable in enumerate(sizes)}
    touching: dict[Variable, set[int]] = {variable: set() for variable in sizes}
    alive = dict(enumerate(tables))
    for key, table in alive.items():
        for variable in table.variables:
            touching[variable].add(key)

    def scope(variable: Variable) -> set[Variable]:
        return {v for key in touching[variable] for v in alive[key].variables}

    def width(variable: Variable) -> int:
        return math.prod(sizes[v] for v in scope(variable))

    queue = [(width(variable), number[variable], variable) for variable in sizes]
    heapq.heapify(queue)
    fixed: list[Variable] = []
    steps: list[tuple[Variable, tuple[Variable, ...], np.ndarray]] = []
    left = set(sizes)
    while queue:
        size, _, variable = heapq.heappop(queue)
        if variable not in left:
            continue
        now = width(variable)
        if now > size:
            heapq.heappush(queue, (now, number[variable], variable))
            continue
        if now > _MOST:
            fixed.append(max(left, key=lambda v: (len(scope(v)), -number[v])))
            _fix(fixed[-1], alive, touching, next(keys_left))
            for other in left:
                heapq.heappush(queue, (width(other), number[other], other))
            continue
        left.remove(variable)
        others = tuple(sorted(scope(variable) - {variable}, key=number.__getitem__))
        keys = sorted(touching[variable])
        total = _added([alive.pop(key) for key in keys], (*others, variable), sizes)
        for other in others:
            touching[other].difference_update(keys)
        steps.append((variable, others, total.argmin(axis=-1)))
        if others:
            key = next(keys_left)
            alive[key] = Table(others, total.min(axis=-1))
            for other in others:
                touching[other].add(key)
                heapq.heappush(queue, (width(other), number[other], other))
    chosen: dict[Variable, int] = dict.fromkeys(counts, 0)
    for variable, others, best in reversed(steps):
        chosen[variable] = int(best[tuple(chosen[other] for other in others)])
    return Cheapest(chosen, tuple(fixed))


def _fix(variable: Variable, alive: dict[int, Table], touching: dict[Variable, set[int]], key: int) -> None:
    """Leave a variable the alternative that is cheapest where all others are free; other tables lose its dimension."""
    least = np.zeros(())
    for number in touching[variable]:
        table = alive[number]
        axis = table.variables.index(variable)
        least = least + table.costs.min(axis=tuple(n for n in range(table.costs.ndim) if n != axis))
    best = int(np.argmin(least))
    for number in touching[variable]:
        table = alive[number]
        axis = table.variables.index(variable)
        others = tuple(other for other in table.variables if other != variable)
        alive[number] = Table(others, table.costs.take(best, axis=axis))
    only = np.full(least.shape, np.inf)
    only[best] = 0
    alive[key] = Table((variable,), only)
    touching[variable] = {key}


def _added(tables: Sequence[Table], scope: tuple[Variable, ...], sizes: dict[Variable, int]) -> np.ndarray:
    """Return the sum of tables over a scope."""
    total = np.zeros([sizes[variable] for variable in scope])
    position = {variable: n for n, variable in enumerate(scope)}
    for table in tables:
        order = sorted(range(len(table.variables)), key=lambda n: position[table.variables[n]])
        shape = [1] * len(scope)
        for n in order:
            shape[position[table.variables[n]]] = table.costs.shape[n]
        total += table.costs.transpose(order).reshape(shape)
    return total
