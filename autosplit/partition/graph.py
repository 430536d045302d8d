"""The problem as the search sees it: groups of works in topological order, without what cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from autosplit.partition.problem import Problem


@dataclass(frozen=True)
class Net:
    """A tensor or a storage between groups: a stage pays when its boundary cuts the net, or when a saver is inside.

    ``cost`` are the seconds of a tensor, or the bytes of a storage. Consumers in the producer's own group are left out,
    as they never differ from it.
    """

    cost: float
    producer: int | None
    consumers: frozenset[int]
    savers: frozenset[int] = frozenset()

    @cached_property
    def ends(self) -> frozenset[int]:
        """The groups that make it cross a boundary: producer and consumers."""
        return self.consumers if self.producer is None else self.consumers | {self.producer}

    @property
    def pins(self) -> frozenset[int]:
        """All groups that it touches."""
        return self.ends | self.savers

    def relabelled(self, labels: Sequence[int]) -> Net:
        """Return the net between other groups, by the labels of these."""
        producer = None if self.producer is None else labels[self.producer]
        consumers = frozenset(labels[consumer] for consumer in self.consumers) - {producer}
        return Net(self.cost, producer, frozenset(consumers), frozenset(labels[saver] for saver in self.savers))


@dataclass(frozen=True)
class Graph:
    """Groups ``0..size-1`` in a topological order, with their costs and what connects them.

    ``resident_bytes`` are storages that a group keeps wherever it is; ``group_of`` maps works to groups.
    """

    times_s: tuple[float, ...]
    static_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    tensors: tuple[Net, ...]
    storages: tuple[Net, ...]
    group_of: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.times_s)

    @property
    def has_bytes(self) -> bool:
        """False when no stage can ever need a byte."""
        return any(self.static_bytes + self.resident_bytes + self.transient_bytes) or bool(self.storages)

    def predecessors(self) -> list[set[int]]:
        """Return the direct predecessors of each group."""
        before: list[set[int]] = [set() for _ in range(self.size)]
        for tail, head in self.edges:
            before[head].add(tail)
        return before

    def successors(self) -> list[set[int]]:
        """Return the direct successors of each group."""
        after: list[set[int]] = [set() for _ in range(self.size)]
        for tail, head in self.edges:
            after[tail].add(head)
        return after


def base_graph(problem: Problem) -> Graph:
    """Return the problem's graph with colocation groups merged and the cycles that this makes closed."""
    count = len(problem.works)
    plain = Graph(
        times_s=tuple(work.forward_s + work.backward_s for work in problem.works),
        static_bytes=tuple(work.static_bytes for work in problem.works),
        resident_bytes=(0,) * count,
        transient_bytes=tuple(work.transient_bytes for work in problem.works),
        edges=problem.precedence,
        tensors=tuple(
            Net(net.forward_s + net.backward_s, net.producer, frozenset(net.consumers)) for net in problem.nets
        ),
        storages=tuple(
            Net(hold.bytes, hold.producer, frozenset(hold.consumers), frozenset(hold.savers)) for hold in problem.holds
        ),
        group_of=tuple(range(count)),
    )
    first: dict[object, int] = {}
    names = (work.colocation_group for work in problem.works)
    return merge(plain, [index if name is None else first.setdefault(name, index) for index, name in enumerate(names)])


def merge(graph: Graph, labels: Sequence[int]) -> Graph:
    """Return the graph in which groups of equal label, and the cycles that this makes, are one group."""
    labels = _close_cycles(labels, graph.edges)
    edges = frozenset((labels[tail], labels[head]) for tail, head in graph.edges if labels[tail] != labels[head])
    size = max(labels) + 1
    static, transient, resident, times = [0] * size, [0] * size, [0] * size, [0.0] * size
    for old, new in enumerate(labels):
        times[new] += graph.times_s[old]
        static[new] += graph.static_bytes[old]
        resident[new] += graph.resident_bytes[old]
        transient[new] = max(transient[new], graph.transient_bytes[old])
    storages: list[Net] = []
    for storage in graph.storages:
        moved = storage.relabelled(labels)
        if len(moved.pins) == 1 and (moved.savers or moved.producer is None):
            resident[next(iter(moved.pins))] += int(moved.cost)
        elif len(moved.pins) > 1:
            storages.append(moved)
    tensors = (tensor.relabelled(labels) for tensor in graph.tensors)
    return Graph(
        times_s=tuple(times),
        static_bytes=tuple(static),
        resident_bytes=tuple(resident),
        transient_bytes=tuple(transient),
        edges=edges,
        tensors=_joined(tensor for tensor in tensors if tensor.consumers),
        storages=_joined(storages),
        group_of=tuple(labels[group] for group in graph.group_of),
    )


def _joined(nets: Iterable[Net]) -> tuple[Net, ...]:
    """Return nets that cost something, those between the same groups as one."""
    costs: dict[Net, float] = {}
    for net in nets:
        if net.cost:
            pins = replace(net, cost=0)
            costs[pins] = costs.get(pins, 0) + net.cost
    return tuple(replace(pins, cost=cost) for pins, cost in costs.items())


def _close_cycles(labels: Sequence[int], edges: frozenset[tuple[int, int]]) -> list[int]:
    """Merge labels that lie on a common cycle and number the rest topologically, close to the old order."""
    names = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    labels = [names[label] for label in labels]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(names)))
    graph.add_edges_from((labels[tail], labels[head]) for tail, head in edges if labels[tail] != labels[head])
    closed = nx.condensation(graph)
    first = {component: min(members) for component, members in closed.nodes(data="members")}
    order = nx.lexicographical_topological_sort(closed, key=first.__getitem__)
    position = {component: index for index, component in enumerate(order)}
    return [position[closed.graph["mapping"][label]] for label in labels]


def reach(neighbours: Sequence[set[int]], order: Iterable[int]) -> list[int]:
    """Return for each group a bit mask of the groups that it reaches, itself included; ``order`` is topological."""
    reached = [0] * len(neighbours)
    for group in order:
        mask = 1 << group
        for other in neighbours[group]:
            mask |= reached[other]
        reached[group] = mask
    return reached
