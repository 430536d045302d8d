"""What a recording's problem has whatever the size of its microbatches: its works, who takes what, and their order."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autosplit.planning.apply import sources
from autosplit.profile.stage_pieces import block_paths, in_units
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode


class Outline:
    """The works of a recording by number, and what lies between them; full nodes are one work, the last.

    Attributes:
        micro, full: the nodes that run per microbatch, a work each, and those that run once per step.
        count: how many works there are.
        sources: what the tensors that each micro node takes are called, and then each full one.
        consumers: the works that take the result of each micro node, once per use.
        inputs: the works that take each input with a batch dimension.
        first: every node's work: itself, or for a shared node the first that it serves.
        blocks: the number of the block in which nodes lie; the solver takes any other for a block of its own.
        order: pairs of works of which the first must not lie in a later stage than the second.
    """

    def __init__(self, traced: TracedGraph) -> None:
        nodes = list(traced.compute_nodes())
        micro = [(node, info) for node, info in nodes if info.node_class is NodeClass.MICRO]
        full = [(node, info) for node, info in nodes if info.node_class is NodeClass.FULL]
        self.micro, self.full = [info for _, info in micro], [info for _, info in full]
        self.count = len(micro) + bool(full)
        work_of = {info.name: index for index, info in enumerate(self.micro)}
        work_of.update({info.name: len(micro) for info in self.full})
        taken = {node: sources(node) for node, _ in nodes}
        self.sources = [[source.meta[INFO].name for source in taken[node]] for node, _ in (*micro, *full)]
        users: dict[str, list[int]] = {}
        for info, own in zip((*self.micro, *self.full), self.sources, strict=True):
            for name in own:
                users.setdefault(name, []).append(work_of[info.name])
        self.consumers = [users.get(info.name, []) for info in self.micro]
        self.inputs = {name: tuple(dict.fromkeys(users.get(name, ()))) for name in _inputs(traced)}
        self.first = self._first(nodes, taken, work_of)
        self.blocks = _blocks(traced, micro)
        self.order = self._order(traced, {node.name: work_of[info.name] for node, info in (*micro, *full)})

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The stable names that each work stands for."""
        full = tuple(info.name for info in self.full)
        return (*((info.name,) for info in self.micro), *((full,) if full else ()))

    def _first(
        self, nodes: list[tuple[fx.Node, TracedNode]], taken: Mapping[fx.Node, list[fx.Node]], work_of: dict[str, int]
    ) -> dict[str, int | None]:
        first: dict[str, int | None] = dict(work_of)
        users: dict[fx.Node, list[fx.Node]] = {}
        for node, _ in nodes:
            for source in taken[node]:
                users.setdefault(source, []).append(node)
        for node, info in reversed(nodes):
            if info.node_class is NodeClass.SHARED:
                served = [first.get(u.meta[INFO].name) for u in users.get(node, ())]
                first[info.name] = min((s for s in served if s is not None), default=0 if self.count else None)
        return first

    def _order(self, traced: TracedGraph, work_of: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        pairs = [(work_of[a], work_of[b]) for a, b in traced.order if a in work_of and b in work_of]
        order = [(a, b) for a, b in pairs if a != b]
        if self.full:
            order += [(index, len(self.micro)) for index in range(len(self.micro))]
        return tuple(dict.fromkeys(order))


def _inputs(traced: TracedGraph) -> list[str]:
    """Return the names of the inputs that differ from microbatch to microbatch."""
    infos = [node.meta[INFO] for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    return [info.name for info in infos if info.node_class is NodeClass.MICRO]


def _blocks(traced: TracedGraph, micro: list[tuple[fx.Node, TracedNode]]) -> dict[str, int]:
    pieces = in_units([node for node, _ in micro], block_paths(traced.root, (info.module for _, info in micro)))
    return {n.meta[INFO].name: number for number, (unit, own) in enumerate(pieces) if unit for n in own}
