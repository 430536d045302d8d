"""Merges that no optimal solution minds, so that fewer ideals remain to be searched.

A tensor is paid for by each stage that holds some of its pins (producer and consumers) but not all, whoever produces
and whether or not its stages are in order. Let ``v`` and ``u`` lie in different stages and move ``v`` to that of ``u``:

    A [ .. u ]  <--  v  [ .. ] B        (the stages may lie in either order, any number of others between them)

* A tensor of both was paid for by A and B as it lay across them: moving a pin makes neither pay more. If its pins are
  just ``u`` and ``v`` ("private"), both pay it no longer.
* A tensor of ``v`` without a pin at ``u`` ("foreign") costs A, and B, its price more at worst.
* A gains the time of ``v``, B loses it. No other stage notices.

So where ``time(v) + foreign(v) <= private`` no load grows. What remains is that ``v`` may lie where ``u`` does: coming
from a later stage, that all direct predecessors of ``v`` are ``u`` or before it (so none lies after A), unless ``v`` is
before ``u`` and never comes from a later stage; and the mirror image. Merging the two then leaves the best value as it
was, and closes no cycle. The rule covers leaves and sources without time, cheap works behind a dear tensor, and works
without time beside each other.

Several merges at once are right if each moves its own ``v`` once and no two follow each other in a circle: taken in
turn from the last target back, a target only grows: tensors become private and never foreign, and more lies before it.

Bytes obey the same argument with storages in the place of tensors, save that savers keep a storage wherever they are,
and the transient bytes of ``v`` must not be above those of ``u``. The kept bytes of no stage grow. A stage may
become empty: the search for exactly N non-empty stages treats the result as a relaxation.

These rules compare a group's seconds with its tensors' on one stage. Other devices weigh them differently, and a merge
has to be right on every device: the group that moves counts with the most seconds per second of tensors that it has on
any (`lossless`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autosplit.partition.goal import PLAIN, Goal
from autosplit.partition.graph import Graph, Net, merge, reach

_ROUNDING = 1 + 1e-14
"""Sums of the same numbers in another order may differ by so much."""

_MANY = 8
"""Pairs are counted for tensors of at most so many pins."""


def condense(graph: Graph, *, loads: bool, bytes_: bool) -> Graph:
    """Return the graph after all merges that keep the best value over any number of non-empty stages.

    They make no stage's load worse, no stage's bytes, or neither.
    """
    while True:
        labels = _Moves(graph, loads=loads, bytes_=bytes_).labels()
        if labels == list(range(graph.size)):
            return graph
        graph = merge(graph, labels)


@dataclass(frozen=True)
class _Reach:
    """Bit masks for each group: it and its predecessors, it and its successors, and its direct neighbours."""

    before: Sequence[int]
    after: Sequence[int]
    direct_before: Sequence[int]
    direct_after: Sequence[int]

    def joins(self, moved: int, target: int) -> bool:
        """Tell whether ``moved`` may lie in the stage of ``target``, whatever the stages of all others."""
        up = self.after[moved] >> target & 1 or not self.direct_before[moved] & ~self.before[target]
        down = self.before[moved] >> target & 1 or not self.direct_after[moved] & ~self.after[target]
        return bool(up and down)


class _Moves:
    """Which group may join which."""

    def __init__(self, graph: Graph, *, loads: bool, bytes_: bool) -> None:
        self.graph, self.keeps_loads, self.keeps_bytes = graph, loads, bytes_
        self.predecessors, self.successors = graph.predecessors(), graph.successors()
        self.tensors = _by_end(graph.size, graph.tensors)
        storages = graph.storages if bytes_ else ()
        self.boundaries = _by_end(graph.size, storages)
        self.kept = [float(bytes_) for bytes_ in graph.resident_bytes]
        for storage in storages:
            for pin in storage.pins:
                self.kept[pin] += storage.cost
        unsaved = (storage for storage in storages if storage.producer is not None and not storage.savers)
        self.unsaved = _by_end(graph.size, unsaved)

    def labels(self) -> list[int]:
        """Return for each group the one that it joins in the end, itself if none."""
        target = [-1] * self.graph.size
        for moved in range(self.graph.size):
            joined = next((other for other in self._allowed(moved) if _end(target, other) != moved), None)
            if joined is not None:
                target[moved] = joined
        return [_end(target, group) for group in range(self.graph.size)]

    @cached_property
    def reach(self) -> _Reach:
        graph = self.graph
        before = reach(self.predecessors, range(graph.size))
        after = reach(self.successors, reversed(range(graph.size)))
        direct = [[sum(1 << other for other in row) for row in each] for each in (self.predecessors, self.successors)]
        return _Reach(before, after, *direct)

    def _allowed(self, moved: int) -> Iterable[int]:
        graph = self.graph
        others = dict.fromkeys(sorted(self.predecessors[moved] | self.successors[moved]))
        if self.keeps_loads:
            cheap = _targets(self.tensors[moved], moved, cost=graph.times_s[moved], others=others)
            others = dict.fromkeys(cheap)
        if self.keeps_bytes and others:
            # What is kept beyond boundaries (savers, storages within the group) moves along whatever the target.
            cost = self.kept[moved] - sum(storage.cost for storage in self.boundaries[moved])
            light = _targets(self.boundaries[moved], moved, cost=cost, others=others, private=self.unsaved[moved])
            others = dict.fromkeys(
                other
                for other in light
                if not graph.static_bytes[moved] and graph.transient_bytes[moved] <= graph.transient_bytes[other]
                if not self.keeps_loads or other in others
            )
        return (other for other in others if self.reach.joins(moved, other))


def _targets(
    nets: Sequence[Net], moved: int, *, cost: float, others: Iterable[int], private: Sequence[Net] | None = None
) -> list[int]:
    """Return the groups for which ``cost`` and the nets that they have no part in are at most the private ones."""
    alone: dict[int, float] = {}
    for net in nets if private is None else private:
        if len(net.ends) == 2:
            other = min(net.ends - {moved})
            alone[other] = alone.get(other, 0.0) + net.cost
    if cost > max(alone.values(), default=0.0) * _ROUNDING:
        return []
    touched = dict.fromkeys((*others, *alone))
    for net in nets:
        # What has a cost of its own joins only what it shares something alone with.
        if cost <= 0.0 and len(net.ends) <= _MANY:
            touched |= dict.fromkeys(sorted(net.ends - {moved}))
    targets = []
    for other in touched:
        most = alone.get(other, 0.0) * _ROUNDING
        if cost <= most and cost + sum(net.cost for net in nets if other not in net.ends) <= most:
            targets.append(other)
    return targets


def _by_end(size: int, nets: Iterable[Net]) -> list[list[Net]]:
    by_end: list[list[Net]] = [[] for _ in range(size)]
    for net in nets:
        for end in net.ends:
            by_end[end].append(net)
    return by_end


def _end(target: Sequence[int], group: int) -> int:
    while target[group] >= 0:
        group = target[group]
    return group


def lossless(graph: Graph, *, goal: Goal, loads: bool, bytes_: bool) -> Graph:
    """Return the graph condensed as `condense` does, for the devices of the goal."""
    ratio = max(terms.work / terms.net if terms.net else math.inf for terms in goal.terms or (PLAIN,))
    seen = replace(graph, times_s=tuple(time_s and ratio * time_s for time_s in graph.times_s))
    coarse = condense(seen, loads=loads, bytes_=bytes_)
    return graph if coarse.size == graph.size else merge(graph, labels(graph, coarse))


def without_small(graph: Graph, *, goal: Goal, small_s: float) -> Graph:
    """Return the graph with costs below ``small_s`` at zero: no load grows, so its best value is a lower bound."""
    terms = goal.terms or (PLAIN,)
    work, net = max(term.work for term in terms), max(term.net for term in terms)
    tensors = tuple(tensor for tensor in graph.tensors if net * tensor.cost >= small_s)
    return replace(
        graph,
        times_s=tuple(time_s if work * time_s >= small_s else 0.0 for time_s in graph.times_s),
        tensors=tensors,
    )


def labels(graph: Graph, coarse: Graph) -> list[int]:
    """Return for each group of ``graph`` its group in ``coarse``, which was merged from it."""
    coarse_of = [0] * graph.size
    for fine, group in zip(graph.group_of, coarse.group_of, strict=True):
        coarse_of[fine] = group
    return coarse_of
