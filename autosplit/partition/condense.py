"""Merges that no optimal solution minds, so that fewer ideals remain to be searched.

Let ``head`` have ``tail`` as its only predecessor and lie in a later stage. Moving it into its tail's stage
adds to that stage at most ``time(head) + outgoing(head)`` and takes away the tensors that only they share, and
takes from its old stage its time and those same tensors, adding at most ``outgoing(head)``:

    A [.. tail ]--private-->[ head ]--outgoing--> ..  B          A [.. tail head ]--outgoing--> ..  B

So when ``time + outgoing <= private`` neither load grows and no third stage notices. The mirror image moves a tail
with one successor down to its head. Bytes obey the same argument with storages in the place of tensors.
A stage may become empty: the search for exactly N non-empty stages treats the result as a relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.partition.graph import Graph, merge


@dataclass(frozen=True)
class Concern:
    """What a merge must not make worse in any stage: its load, its bytes, or both."""

    loads: bool
    bytes: bool


def condense(graph: Graph, *, concern: Concern) -> Graph:
    """Return the graph after all merges that keep the best value over any number of non-empty stages."""
    while True:
        smaller = merge(graph, _merge_heads(graph, concern))
        smaller = merge(smaller, _merge_tails(smaller, concern))
        if smaller.size == graph.size:
            return smaller
        graph = smaller


def glue_costly(graph: Graph, *, bound_s: float) -> Graph:
    """Merge what a solution no worse than ``bound_s`` cannot separate: a cut there alone would cost a stage more."""
    limit = bound_s * (1 + 1e-9)
    while True:
        labels = list(range(graph.size))
        for tensor in graph.tensors:
            sole = tensor.cost_s + graph.times_s[min(tensor.consumers)] if len(tensor.consumers) == 1 else 0.0
            if max(tensor.cost_s + graph.times_s[tensor.producer], sole) > limit:
                for consumer in tensor.consumers:
                    _join(labels, consumer, tensor.producer)
        smaller = merge(graph, [_root(labels, group) for group in range(graph.size)])
        if smaller.size == graph.size:
            return graph
        graph = smaller


def _merge_heads(graph: Graph, concern: Concern) -> list[int]:
    """Label each group that may join its only predecessor with that predecessor's label."""
    slack = _slack(graph, concern, toward_tail=True)
    labels = list(range(graph.size))
    for head, before in enumerate(graph.predecessors()):
        if len(before) == 1:
            tail = min(before)
            if slack.allows(head, tail=tail, head=head):
                labels[head] = labels[tail]
    return labels


def _merge_tails(graph: Graph, concern: Concern) -> list[int]:
    """Label each group that may join its only successor with that successor's label."""
    slack = _slack(graph, concern, toward_tail=False)
    labels = list(range(graph.size))
    for tail, after in reversed(list(enumerate(graph.successors()))):
        if len(after) == 1:
            head = min(after)
            if slack.allows(tail, tail=tail, head=head):
                labels[tail] = labels[head]
    return labels


@dataclass(frozen=True)
class _Slack:
    """What a moved group brings along at worst, and what a pair of groups shares with nobody else."""

    graph: Graph
    concern: Concern
    brings_s: Sequence[float]
    brings_bytes: Sequence[int]
    private_s: dict[tuple[int, int], float]
    private_bytes: dict[tuple[int, int], int]
    spared_bytes: dict[tuple[int, int], int]

    def allows(self, moved: int, *, tail: int, head: int) -> bool:
        """Tell whether ``moved`` may join the other of ``tail`` and ``head`` without making any stage worse."""
        graph, pair = self.graph, (tail, head)
        if self.concern.loads and self.brings_s[moved] > self.private_s.get(pair, 0.0):
            return False
        if not self.concern.bytes:
            return True
        other = tail if moved == head else head
        return (
            graph.static_bytes[moved] == 0
            and graph.transient_bytes[moved] <= graph.transient_bytes[other]
            and self.brings_bytes[moved] - self.spared_bytes.get(pair, 0) <= self.private_bytes.get(pair, 0)
        )


def _slack(graph: Graph, concern: Concern, *, toward_tail: bool) -> _Slack:
    brings_s, private_s = list(graph.times_s), dict[tuple[int, int], float]()
    for tensor in graph.tensors:
        for group in (tensor.producer,) if toward_tail else tensor.consumers:
            brings_s[group] += tensor.cost_s
        if len(tensor.consumers) == 1:
            pair = (tensor.producer, min(tensor.consumers))
            private_s[pair] = private_s.get(pair, 0.0) + tensor.cost_s
    brings_bytes, private_bytes = list(graph.resident_bytes), dict[tuple[int, int], int]()
    spared_bytes: dict[tuple[int, int], int] = {}
    for storage in graph.storages:
        for group in storage.pins:
            brings_bytes[group] += storage.bytes
        if storage.producer is None:
            continue
        # Both stages hold a storage that crosses between them, so moving a pin of it to its other side adds nothing.
        for consumer in storage.consumers:
            pair = (storage.producer, consumer)
            spared_bytes[pair] = spared_bytes.get(pair, 0) + storage.bytes
            if len(storage.consumers) == 1 and not storage.savers:
                private_bytes[pair] = private_bytes.get(pair, 0) + storage.bytes
    return _Slack(graph, concern, brings_s, brings_bytes, private_s, private_bytes, spared_bytes)


def _root(labels: list[int], group: int) -> int:
    while labels[group] != group:
        group = labels[group]
    return group


def _join(labels: list[int], left: int, right: int) -> None:
    left, right = _root(labels, left), _root(labels, right)
    labels[max(left, right)] = min(left, right)
