"""The problem as the search sees it: groups of works in topological order, without what cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from autosplit.partition.problem import Problem


@dataclass(frozen=True)
class Net:
    """A tensor between groups: a stage pays its seconds that holds some of its ends and not all, whoever makes it."""

    cost_s: float
    ends: frozenset[int]


@dataclass(frozen=True)
class Graph:
    """Groups ``0..size-1`` in a topological order, with their costs and what connects them.

    ``group_of`` maps works to groups.
    """

    times_s: tuple[float, ...]
    static_bytes: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    tensors: tuple[Net, ...]
    group_of: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.times_s)

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
    plain = Graph(
        times_s=tuple(work.forward_s + work.backward_s for work in problem.works),
        static_bytes=tuple(work.static_bytes for work in problem.works),
        edges=problem.precedence,
        tensors=tuple(
            Net(net.forward_s + net.backward_s, frozenset((net.producer, *net.consumers))) for net in problem.nets
        ),
        group_of=tuple(range(len(problem.works))),
    )
    first: dict[object, int] = {}
    names = (work.colocation_group for work in problem.works)
    return merge(plain, [index if name is None else first.setdefault(name, index) for index, name in enumerate(names)])


def merge(graph: Graph, labels: Sequence[int]) -> Graph:
    """Return the graph in which groups of equal label, and the cycles that this makes, are one group.

    Tensors between the same groups are one; those that cost nothing, or lie in one group, are left out.
    """
    labels = _close_cycles(labels, graph.edges)
    size = max(labels) + 1
    static, times = [0] * size, [0.0] * size
    for old, new in enumerate(labels):
        times[new] += graph.times_s[old]
        static[new] += graph.static_bytes[old]
    costs_s: dict[frozenset[int], float] = {}
    for tensor in graph.tensors:
        ends = frozenset(labels[end] for end in tensor.ends)
        if tensor.cost_s and len(ends) > 1:
            costs_s[ends] = costs_s.get(ends, 0.0) + tensor.cost_s
    return Graph(
        times_s=tuple(times),
        static_bytes=tuple(static),
        edges=frozenset((labels[tail], labels[head]) for tail, head in graph.edges if labels[tail] != labels[head]),
        tensors=tuple(Net(cost_s, ends) for ends, cost_s in costs_s.items()),
        group_of=tuple(labels[group] for group in graph.group_of),
    )


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
