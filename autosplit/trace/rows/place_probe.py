"""Does a row's result depend on its place, or on how many rows there are? Asked with more rows than the probe's runs.

    rows of a run     0 1 2 3                      ─► result  0 1 2 3
    many rows         0 1 2 3 2 0 3 1 1 ...        ─► result  0 1 2 3 2 0 3 1 1 ...   equal rows have equal results

``h.roll(4, 0)`` returns four rows to their places, ``h.T.tril(3)`` and ``arange(B) < 5`` treat the first four alike:
none of that shows in a run on four rows. What depends on the number of rows alone (positions, masks, slices of tables)
is computed at the larger number; all other operands are rows of the run, repeated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autosplit.compare.tensors import same_reordered
from autosplit.errors import is_internal
from autosplit.trace.graph import INFO
from autosplit.trace.rows.neighbours import call_with, copied, from_sources, result_of, size_at, tensors_of
from autosplit.trace.rows.row_layout import Layouts

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


class PlaceProbe:
    """The operations of one graph, asked one after the other at one number of rows.

    Args:
        run: a run on few rows; it holds the operands' values.
        layouts: how rows lie in its values.
        valued: the nodes whose values depend on rows' values, not on their number alone.
        rows: the number of rows in the run.
        count: the number of rows to ask about.
        lengths: the lengths of the inputs in the run.
    """

    def __init__(
        self,
        run: fx.Interpreter,
        layouts: Layouts,
        valued: Collection[fx.Node],
        *,
        rows: int,
        count: int,
        lengths: Mapping[str, int],
    ) -> None:
        self.run, self.layouts, self.valued = run, layouts, valued
        self.rows, self.count, self.lengths = rows, count, lengths
        drawn = torch.randint(rows, (count - rows,), generator=torch.Generator().manual_seed(0))
        self.sources = [*range(rows), *drawn.tolist()]  # the first in place: an index of theirs names them here too
        self.numbered: dict[fx.Node, Any] = {}
        """Values, at this number of rows, of nodes that depend on the number of rows alone."""

    def differs(self, node: fx.Node) -> bool:
        """Tell whether equal rows have unequal results; False also where the operation does not run on so many."""
        if self.count > 2 * self.rows + 1 and max(self._elements(node), default=0) > _LARGEST:
            return False
        try:
            given = {n: self._operand(n) for n in node.all_input_nodes}
            made = call_with(node, self.run, given)
            plain = result_of(node, self.run, {})
        except Exception as error:  # a table may be too short for so many rows
            if is_internal(error):
                raise
            return False
        infos = node.meta[INFO].tensors
        changed = [n for n in given if not infos and INFO in n.meta and n.meta[INFO].mutated]
        many = tensors_of(made) if infos else [t for n in changed for t in tensors_of(given[n])]
        infos = infos or [info for n in changed for info in n.meta[INFO].tensors]
        if any(t.shape != i.shape_at(self.count, self.lengths) for t, i in zip(many, infos, strict=True)):
            return False
        if node not in self.valued:
            self.numbered[node] = made
        dims = [info.batch_dim for info in infos]
        expected = (from_sources(t, d, self.rows, self.sources) for t, d in zip(plain, dims, strict=True))
        return any(not same_reordered(a, b) for a, b in zip(many, expected, strict=True))

    def _operand(self, node: fx.Node) -> Any:
        if node in self.numbered:
            return copied(self.numbered[node])
        value = self.run.env[node]
        if INFO not in node.meta:
            return size_at(node, self.run, self.count) if isinstance(value, (int, float)) else value
        infos = iter(node.meta[INFO].tensors)
        return copied(value, lambda t: from_sources(t, next(infos).batch_dim, self.rows, self.sources))

    def _elements(self, node: fx.Node) -> Iterator[int]:
        for n in (node, *node.all_input_nodes):
            for info in n.meta[INFO].tensors if INFO in n.meta else ():
                yield math.prod(info.shape_at(self.count, self.lengths))
