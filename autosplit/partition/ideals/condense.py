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

A group with bytes of its own stays where bytes matter. A stage may become empty: the search for exactly N non-empty
stages treats the result as a relaxation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
        self.tensors: list[list[Net]] = [[] for _ in range(graph.size)]
        for tensor in graph.tensors:
            for end in tensor.ends:
                self.tensors[end].append(tensor)

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
        if self.keeps_bytes and self.graph.static_bytes[moved]:
            return ()
        others = sorted(self.predecessors[moved] | self.successors[moved])
        if self.keeps_loads:
            others = _targets(self.tensors[moved], moved, cost_s=self.graph.times_s[moved], others=others)
        return (other for other in others if self.reach.joins(moved, other))


def _targets(nets: Sequence[Net], moved: int, *, cost_s: float, others: Iterable[int]) -> list[int]:
    """Return the groups for which ``cost_s`` and the nets that they have no part in are at most the private ones."""
    alone: dict[int, float] = {}
    for net in nets:
        if len(net.ends) == 2:
            other = min(net.ends - {moved})
            alone[other] = alone.get(other, 0.0) + net.cost_s
    if cost_s > max(alone.values(), default=0.0) * _ROUNDING:
        return []
    touched = dict.fromkeys((*others, *alone))
    for net in nets:
        # What has a cost of its own joins only what it shares something alone with.
        if cost_s <= 0.0 and len(net.ends) <= _MANY:
            touched |= dict.fromkeys(sorted(net.ends - {moved}))
    targets = []
    for other in touched:
        most = alone.get(other, 0.0) * _ROUNDING
        if cost_s <= most and cost_s + sum(net.cost_s for net in nets if other not in net.ends) <= most:
            targets.append(other)
    return targets


def _end(target: Sequence[int], group: int) -> int:
    while target[group] >= 0:
        group = target[group]
    return group


def without_small(graph: Graph, *, small_s: float) -> Graph:
    """Return the graph with costs below ``small_s`` at zero: no load grows, so its best value is a lower bound."""
    times_s = tuple(time_s if time_s >= small_s else 0.0 for time_s in graph.times_s)
    return replace(graph, times_s=times_s, tensors=tuple(net for net in graph.tensors if net.cost_s >= small_s))


def labels(graph: Graph, coarse: Graph) -> list[int]:
    """Return for each group of ``graph`` its group in ``coarse``, which was merged from it."""
    coarse_of = [0] * graph.size
    for fine, group in zip(graph.group_of, coarse.group_of, strict=True):
        coarse_of[fine] = group
    return coarse_of
