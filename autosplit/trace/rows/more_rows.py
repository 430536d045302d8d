"""The operations of a graph on more rows than a run has: does a row's place matter, and do moved rows come back?

    rows of a run     0 1 2 3                      ─► result  0 1 2 3
    many rows         0 1 2 3 2 0 3 1 1 ...        ─► result  0 1 2 3 2 0 3 1 1 ...   equal rows have equal results

``h.roll(4, 0)`` returns four rows to their places, ``h.T.tril(3)`` and ``arange(B) < 5`` treat the first four alike:
none of that shows in a run on four rows. What depends on the number of rows alone (positions, masks, slices of tables)
is computed at the larger number; all other operands are rows of the run, repeated. Where rows are moved, their order is
followed at the larger number too: ``x.flip(0).roll(4, 0).flip(0)`` is a stack of four rows again, but not one of nine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autosplit.compare import same_reordered
from autosplit.errors import ForeignSuppressed
from autosplit.trace.graph import INFO
from autosplit.trace.rows.kinds import rearranges
from autosplit.trace.rows.layout import from_layout
from autosplit.trace.rows.row_values import (
    Layouts,
    call_with,
    copied,
    made_or_changed,
    made_or_changed_infos,
    result_of,
    rows_of,
)

_LARGEST = 1 << 20
"""Elements of a tensor above which only the smallest of the larger numbers of rows is tried."""
_FAR = 512
"""Constants up to this may be places; larger ones are sizes, as a rule."""


def counts_of_rows(graph: fx.Graph, rows: int, sample_rows: int) -> list[int]:
    """Return the numbers of rows to try: a few, the sample's own, and one beyond all constants of the graph."""
    constants = [0]

    def note(value: Any) -> Any:
        if type(value) is int and abs(value) <= _FAR:
            constants.append(abs(value))
        return value

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), note)
    few = 2 * rows + 1
    return sorted({few, max(few, sample_rows), 2 * max(constants) + 4 * rows + 1})


class MoreRows(Layouts):
    """The operations of one graph, asked one after the other at ``count`` rows: those of a run on fewer, repeated."""

    def __init__(self, few: Layouts, *, count: int, lengths: Mapping[str, int]) -> None:
        super().__init__(few.root, few.run, rows=count, valued=few.valued)
        self.few, self.lengths = few, lengths
        drawn = torch.randint(few.rows, (count - few.rows,), generator=torch.Generator().manual_seed(0))
        # the first in place: an index of theirs names them here too
        self.sources = [*range(few.rows), *drawn.tolist()]
        self.numbered: dict[fx.Node, Any] = {}
        """Values, at this number of rows, of nodes that depend on the number of rows alone."""
        self.unknown: set[fx.Node] = set()
        """Nodes that depend on the number of rows, or whose rows are moved, of which nothing is known at this one."""

    def value_of(self, node: fx.Node) -> Any:
        """Return a node's value at this number of rows as if they lay one after the other."""
        if node in self.numbered:
            return copied(self.numbered[node])
        return rows_of(node, self.run, self.few.rows, self.sources)

    def follows(self, node: fx.Node, suspects: Collection[str]) -> bool:
        """Note how rows lie in a node; False where they are a stack on few rows, and none here.

        What cannot be followed at the smallest number is False as well; at a larger one it is left out.
        """
        if not (self.few.has_moved(node) or self.has_moved(node)) or self.few.has_lost(node):
            return True
        followed = None if self._is_unknown(node) else self._follow(node, suspects)
        if followed is None:
            self.unknown.add(node)
            return self._is_larger
        return followed and (node in self.few.noted or node not in self.noted)

    def _follow(self, node: fx.Node, suspects: Collection[str]) -> bool | None:
        if rearranges(node, self.root):
            return self.moved(node, suspects)
        operands = [n for n in node.all_input_nodes if n in self.valued and INFO in n.meta]
        shapes = [tensor.shape_at(self.rows, self.lengths) for tensor in node.meta[INFO].tensors]
        return self.computed(node, operands, shapes)

    def differs(self, node: fx.Node) -> bool | None:
        """Tell whether equal rows have unequal results; None where the operation does not run on so many."""
        differs = None if self._is_unknown(node) else self._differs(node)
        if differs is None and node not in self.valued:
            self.unknown.add(node)
        return differs

    @property
    def _is_larger(self) -> bool:
        return self.rows > 2 * self.few.rows + 1

    def _is_unknown(self, node: fx.Node) -> bool:
        near = (node, *node.all_input_nodes)
        tensors = [tensor for n in near if INFO in n.meta for tensor in n.meta[INFO].tensors] if self._is_larger else []
        large = any(math.prod(tensor.shape_at(self.rows, self.lengths)) > _LARGEST for tensor in tensors)
        return large or not self.unknown.isdisjoint(near)

    def _differs(self, node: fx.Node) -> bool | None:
        plain = None
        with ForeignSuppressed():
            operands = {n: self._value(n) for n in node.all_input_nodes}
            result = call_with(node, self.run, operands)
            plain = result_of(node, self.run, {})
        if plain is None:  # a table may be too short for so many rows
            return None
        many, infos = made_or_changed(node, result, operands), made_or_changed_infos(node)
        if any(t.shape != i.shape_at(self.rows, self.lengths) for t, i in zip(many, infos, strict=True)):
            return None
        if node not in self.valued:
            self.numbered[node] = result
        layouts = zip(self.few.of_result(node, plain), self.of_result(node, many), strict=True)
        expected = (from_layout(t, *pair, self.few.rows, self.sources) for t, pair in zip(plain, layouts, strict=True))
        return any(not same_reordered(a, b) for a, b in zip(many, expected, strict=True))

    def _value(self, node: fx.Node) -> Any:
        """Return a node's value at this number of rows, which lie in it as followed."""
        if node not in self.few.noted and node not in self.noted:
            return self.value_of(node)
        layouts = zip(self.few.of(node), self.of(node), strict=True)
        return copied(self.run.env[node], lambda t: from_layout(t, *next(layouts), self.few.rows, self.sources))
