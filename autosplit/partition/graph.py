"""The problem as the search sees it: groups of works in topological order, without what cannot be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from autosplit.partition.problem import Problem


@dataclass(frozen=True)
class Tensor:
    """A net between groups; consumers in the producer's own group are left out, as they never differ from it."""

    cost_s: float
    producer: int
    consumers: frozenset[int]

    @property
    def pins(self) -> frozenset[int]:
        """All groups that the tensor touches."""
        return self.consumers | {self.producer}


@dataclass(frozen=True)
class Storage:
    """A hold between groups, with the same rule."""

    bytes: int
    producer: int | None
    consumers: frozenset[int]
    savers: frozenset[int]

    @property
    def pins(self) -> frozenset[int]:
        """All groups that the storage touches."""
        own = frozenset() if self.producer is None else frozenset((self.producer,))
        return own | self.consumers | self.savers


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
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
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
            Tensor(net.forward_s + net.backward_s, net.producer, frozenset(net.consumers)) for net in problem.nets
        ),
        storages=tuple(
            Storage(hold.bytes, hold.producer, frozenset(hold.consumers), frozenset(hold.savers))
            for hold in problem.holds
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
    storages: Counter[tuple[int | None, frozenset[int], frozenset[int]]] = Counter()
    for storage in graph.storages:
        moved = _relabel_storage(storage, labels)
        if len(moved.pins) == 1 and (moved.savers or moved.producer is None):
            resident[next(iter(moved.pins))] += moved.bytes
        elif len(moved.pins) > 1 and moved.bytes:
            storages[moved.producer, moved.consumers, moved.savers] += moved.bytes
    return Graph(
        times_s=tuple(times),
        static_bytes=tuple(static),
        resident_bytes=tuple(resident),
        transient_bytes=tuple(transient),
        edges=edges,
        tensors=_merge_tensors(graph.tensors, labels),
        storages=tuple(Storage(size, *pins) for pins, size in storages.items()),
        group_of=tuple(labels[group] for group in graph.group_of),
    )


def _merge_tensors(tensors: Sequence[Tensor], labels: Sequence[int]) -> tuple[Tensor, ...]:
    costs: dict[tuple[int, frozenset[int]], float] = {}
    for tensor in tensors:
        producer = labels[tensor.producer]
        consumers = frozenset(labels[consumer] for consumer in tensor.consumers) - {producer}
        if consumers and tensor.cost_s:
            costs[producer, consumers] = costs.get((producer, consumers), 0.0) + tensor.cost_s
    return tuple(Tensor(cost_s, *pins) for pins, cost_s in costs.items())


def _relabel_storage(storage: Storage, labels: Sequence[int]) -> Storage:
    producer = None if storage.producer is None else labels[storage.producer]
    consumers = frozenset(labels[consumer] for consumer in storage.consumers) - {producer}
    savers = frozenset(labels[saver] for saver in storage.savers)
    return Storage(storage.bytes, producer, frozenset(consumers), savers)


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
    """Return for each group, as bits, itself and all that it reaches; ``order`` has its neighbours before a group."""
    reached = [0] * len(neighbours)
    for group in order:
        mask = 1 << group
        for other in neighbours[group]:
            mask |= reached[other]
        reached[group] = mask
    return reached
