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
_CELLS = 16_000_000
"""Ideals that are looked at, times groups."""
_CHAINS = 2_048
"""Chains that are simulated together."""

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
        kind = [classes.setdefault(self._place(place), place) for place in range(model.stages)]
        chosen = {
            place: np.concatenate([choose(ideal, larger, place) for ideal, larger in enumerate(rows)])
            for place in classes.values()
        }
        again = np.array([chosen[place] for place in kind]) if len(classes) > 1 else chosen[0][None]
        order = np.argsort(head, kind="stable")
        self.by_key: Ints = np.empty(len(order), dtype=np.int64)
        self.by_key[order] = np.arange(len(order))
        self.tail, self.head = tail[order], head[order]
        self.again: Floats = again[:, order]
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

    def steps(self, chains: Ints) -> Floats:
        """Return what a step takes under each chain, infinite where the chain is not legal or does not fit."""
        stage, again = self._stages(chains)
        legal = np.flatnonzero(np.isfinite(again).all(axis=1))
        found = np.full(len(chains), np.inf)
        for low in range(0, len(legal), _CHAINS):
            own = legal[low : low + _CHAINS]
            chosen = self._chosen(stage[own], again[own])
            stage_of, rows = self._cut(chains[own])
            found[own] = self.model.timed(stage_of, rows, *chosen)
        return found

    def stage_of(self, chains: Ints) -> NDArray[np.int64]:
        """Return the stage of each group under each chain."""
        stage = np.zeros((len(chains), self.model.graph.size), dtype=np.int64)
        for boundary in range(1, chains.shape[1] - 1):
            stage += ~self.member[chains[:, boundary]]
        return stage

    def _stages(self, chains: Ints) -> tuple[Ints, Floats]:
        """Return the stages of each chain, -1 for an empty one, and what each does again, infinite if it is unfit."""
        key = chains[:, :-1] * self.size + chains[:, 1:]
        found = np.minimum(np.searchsorted(self.keys, key), max(len(self.keys) - 1, 0))
        stage = self.by_key[found]
        again = self.again[np.minimum(np.arange(self.model.stages), len(self.again) - 1), stage]
        again = np.where(self.keys[found] == key, again, np.inf)
        if self.empty:
            none = chains[:, :-1] == chains[:, 1:]
            stage, again = np.where(none, -1, stage), np.where(none, 0.0, again)
        return stage, again

    def _chosen(self, stage: Ints, again: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the forward, backward and weight seconds of stages."""
        forward, backward, weight = (
            np.where(stage < 0, 0.0, each[stage]) for each in (self.forward_s, self.backward_s, self.weight_s)
        )
        return forward, backward + again * forward, weight

    def _cut(self, chains: Ints) -> tuple[NDArray[np.int64], Ints]:
        """Return the stage of each group under each chain, and the rows of nets that any of the chains cuts.

        Groups that neither those rows nor what happens once per step asks for are left at 0.
        """
        own, model = self.model.crossings, self.model
        inside = self.member[np.unique(chains[:, 1:-1])]
        rows = np.flatnonzero((inside[:, own.producer] != inside[:, own.consumer]).any(axis=0))
        if model.ties or model.sync_s.any():
            return self.stage_of(chains), rows
        groups = np.unique(np.concatenate([own.producer[rows], own.consumer[rows]]))
        columns = np.ascontiguousarray(self.member[:, groups])
        few = np.zeros((len(chains), len(groups)), dtype=np.int64)
        for boundary in range(1, chains.shape[1] - 1):
            few += ~columns[chains[:, boundary]]
        stage_of = np.zeros((len(chains), model.graph.size), dtype=np.int64)
        stage_of[:, groups] = few
        return stage_of, rows


def rows_of(count: int) -> Ints:
    """Return so many zeros, as positions."""
    return np.zeros(count, dtype=np.int64)


def pool_ideals(graph: Graph, model: StepModel, *, most: int, always: Sequence[int]) -> tuple[list[int], bool]:
    """Return about ``most`` ideals, those of ``always`` among them, and whether these are all."""
    wide = max(500, min(_WIDE, _CELLS // graph.size))
    most = min(most, wide)
    ideals = all_ideals(graph, limit=wide)
    if ideals is not None and len(ideals) <= most:
        return ideals, True
    if ideals is None:
        orders = some_orders(graph)[: wide // graph.size] if graph.size < wide else [list(range(graph.size))]
        ideals = prefix_ideals(orders)
        ideals = ideals[:: -(-len(ideals) // wide)]
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


def nearby(model: StepModel, ideals: Sequence[int], *, width: int) -> list[int]:
    """Return the ideals together with about ``width`` around each: a group more or less, the nearest first."""
    size = model.graph.size
    width = min(width, max(4, _CELLS // (size * model.stages)))
    edges = np.array(sorted(model.graph.edges), dtype=np.int64).reshape(-1, 2)
    tail, head = edges[:, 0], edges[:, 1]
    pool: dict[int, None] = {}
    for ideal in dict.fromkeys(ideals):
        near = {ideal: None}
        frontier = [ideal]
        while frontier and len(near) < width:
            reached: dict[int, None] = {}
            for middle in frontier:
                inside = _bits(middle, size)
                addable, removable = ~inside, inside.copy()
                addable[head[~inside[tail]]] = False
                removable[tail[inside[head]]] = False
                reached |= dict.fromkeys(
                    middle ^ (1 << group) for group in np.flatnonzero(addable | removable).tolist()
                )
            frontier = [other for other in reached if other not in near][: width - len(near)]
            near |= dict.fromkeys(frontier)
        pool |= near
    return list(pool)


def _bits(ideal: int, size: int) -> NDArray[np.bool_]:
    packed = np.frombuffer(ideal.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").astype(np.bool_)
