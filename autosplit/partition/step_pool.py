"""A pool of ideals with every stage that can lie between two of them, and the best chains through it.

A chain is a row of positions in the pool, empty set to everything; `StagePool.stages` finds the stage between each two
neighbours, so that legality, capacities and the recompute that a stage chooses are looked up for many chains at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.fast_simulate import Floats, Ints
from autosplit.partition.graph import Graph
from autosplit.partition.ideals import all_ideals, prefix_ideals, some_orders
from autosplit.partition.step_model import StepModel
from autosplit.partition.table import Table

_WIDE = 8_000
"""Ideals that a pool is chosen from where it cannot have all."""

Choose = Callable[[int, Ints, int], Floats]
"""(ideal, larger, stage) -> how much of its forwards each stage does again, infinite where it cannot fit."""


@dataclass(frozen=True)
class Best:
    """The least value of a chain, and its positions in the pool."""

    value: float
    chain: tuple[int, ...]


class StagePool:
    """Every stage ``tail[i] -> head[i]`` between two ideals of a table, of at most ``limit_s`` on the fastest device.

    Where these are more than ``most`` the pool is not ``complete`` and of no use.

    ``again[position, i]`` is what part of its forwards the stage does again at that position of the pipeline; infinite
    where it does not fit there. Stages are sorted by head.
    """

    def __init__(
        self, model: StepModel, table: Table, *, limit_s: float, choose: Choose, most: int, empty: bool
    ) -> None:
        self.model, self.empty, self.table = model, empty, table
        graph = model.graph
        self.size = len(table)
        self.member: NDArray[np.bool_] = np.ascontiguousarray(table.columns.T)
        rows: list[Ints] = []
        total, self.complete = 0, True
        quanta = limit_s / table.quantum / float(model.scale.min())
        limit = np.inf if not np.isfinite(quanta) else quanta + graph.size
        for ideal in range(self.size):
            stop = int(np.searchsorted(table.weight, table.weight[ideal] + limit, side="right"))
            larger = table.supersets(ideal, start=ideal + 1, stop=stop) if ideal + 1 < stop else ideal + rows_of(0)
            rows.append(larger)
            total += len(larger)
            if total > most:
                self.complete = False
                break
        if not self.complete:
            return
        tail = np.repeat(np.arange(self.size), [len(row) for row in rows])
        head = np.concatenate(rows) if rows else rows_of(0)
        self.keys: Ints = tail * self.size + head
        classes: dict[object, int] = {}
        self.kind = [classes.setdefault(self._place(place), place) for place in range(model.stages)]
        chosen = {
            place: np.concatenate([choose(ideal, larger, place) for ideal, larger in enumerate(rows)])
            for place in classes.values()
        }
        self.by_tail = np.array([chosen[place] for place in self.kind]) if len(classes) > 1 else chosen[0][None]
        order = np.argsort(head, kind="stable")
        self.tail, self.head = tail[order], head[order]
        self.again: Floats = self.by_tail[:, order]
        self.begin: Ints = np.searchsorted(self.head, np.arange(self.size + 1))
        self.forward_s, self.backward_s, self.weight_s = (
            self._between(each) for each in (model.forward_s, model.backward_s, model.weight_s)
        )

    def _place(self, place: int) -> object:
        """Return what decides which stages fit at a position."""
        return place if self.model.problem.capacity_bytes is not None else None

    def _between(self, each: Floats) -> Floats:
        summed = self.member @ each
        difference: Floats = summed[self.head] - summed[self.tail]
        return np.maximum(difference, 0.0)

    def at(self, values: Floats, place: int) -> Floats:
        """Return the row of a position; values that are alike everywhere have one row."""
        row: Floats = values[min(place, len(values) - 1)]
        return row

    def stage(self, tail: int, head: int) -> int | None:
        """Return the stage between two ideals, None where these are the same."""
        if tail == head:
            return None
        low, high = int(self.begin[head]), int(self.begin[head + 1])
        return low + int(np.searchsorted(self.tail[low:high], tail))

    def best(self, costs: Sequence[Floats], *, highest: bool = False) -> Best | None:
        """Return the chain with the least sum of ``costs[position][stage]``, or with the least ``highest`` one.

        Infinite costs forbid a stage. None where no chain is left.
        """
        stages = self.model.stages
        values = np.full((stages + 1, self.size), np.inf)
        values[0, 0] = 0.0
        filled = self.begin[1:] > self.begin[:-1]
        starts = self.begin[:-1][filled]
        for place in range(stages):
            own = values[place][self.tail]
            own = np.maximum(own, costs[place]) if highest else own + costs[place]
            if len(starts):
                values[place + 1, filled] = np.minimum.reduceat(own, starts)
            if self.empty:
                np.minimum(values[place + 1], values[place], out=values[place + 1])
        if not np.isfinite(values[-1, -1]):
            return None
        chain = [self.size - 1]
        for place in range(stages - 1, -1, -1):
            here, target = chain[-1], values[place + 1, chain[-1]]
            if self.empty and values[place, here] == target:
                chain.append(here)
                continue
            low, high = int(self.begin[here]), int(self.begin[here + 1])
            own = values[place][self.tail[low:high]]
            own = np.maximum(own, costs[place][low:high]) if highest else own + costs[place][low:high]
            chain.append(int(self.tail[low + int(np.argmin(own))]))
        return Best(float(values[-1, -1]), tuple(chain[::-1]))

    def again_of(self, chains: Ints) -> Floats:
        """Return what each stage of each chain does again, infinite where the stage is none or does not fit."""
        key = chains[:, :-1] * self.size + chains[:, 1:]
        found = np.minimum(np.searchsorted(self.keys, key), max(len(self.keys) - 1, 0))
        place = np.minimum(np.arange(self.model.stages), len(self.by_tail) - 1)
        again = np.where(self.keys[found] == key, self.by_tail[place, found], np.inf)
        if self.empty:
            again = np.where(chains[:, :-1] == chains[:, 1:], 0.0, again)
        return again

    def stage_of(self, chains: Ints) -> NDArray[np.int64]:
        """Return the stage of each group under each chain."""
        stage = np.zeros((len(chains), self.model.graph.size), dtype=np.int64)
        for boundary in range(1, chains.shape[1] - 1):
            stage += ~self.member[chains[:, boundary]]
        return stage

    def steps(self, chains: Ints) -> Floats:
        """Return what a step takes under each chain, infinite where the chain is not legal or does not fit."""
        again = self.again_of(chains)
        legal = np.flatnonzero(np.isfinite(again).all(axis=1))
        found = np.full(len(chains), np.inf)
        found[legal] = self.model.steps(self.stage_of(chains[legal]), again[legal])
        return found


def rows_of(count: int) -> Ints:
    """Return so many zeros, as positions."""
    return np.zeros(count, dtype=np.int64)


def pool_ideals(graph: Graph, model: StepModel, *, most: int, always: Sequence[int]) -> tuple[list[int], bool]:
    """Return about ``most`` ideals, those of ``always`` among them, and whether these are all."""
    ideals = all_ideals(graph, limit=_WIDE)
    if ideals is not None and len(ideals) <= most:
        return ideals, True
    if ideals is None:
        ideals = prefix_ideals(some_orders(graph)[: max(1, _WIDE // graph.size)])
    everything = (1 << graph.size) - 1
    kept = dict.fromkeys((0, everything, *always))
    table = Table(graph, ideals)
    cost = cut_s(model, table)
    share = table.weight * most // max(int(table.weight[-1]), 1)
    order = np.lexsort((np.arange(len(table)), cost, share))
    first = order[np.diff(share[order], prepend=-1) > 0]
    kept |= dict.fromkeys(table.ideals[place] for place in first.tolist())
    return list(kept), False


def cut_s(model: StepModel, table: Table) -> Floats:
    """Return for each ideal about what crosses it."""
    own, cost = model.crossings, np.zeros(len(table))
    for tail, head, seconds in zip(own.producer, own.consumer, own.forward_s + own.backward_s, strict=True):
        cost += seconds * (table.columns[tail] & ~table.columns[head])
    return cost
