"""Which row each entry of a tensor belongs to, followed exactly through operations that only move values.

A tensor is a *stack* when its batch dimension holds the rows one after the other, each with the same number of
entries. Views and permutations leave that order and come back to it:

    [S, B, D] ──reshape──► [S * B, D]   entry i belongs to row i % B
              ◄─reshape──               a stack again

The operation itself runs on a tensor of row numbers, so no table says what it does. An index that depends on values
must pick from the row itself, whichever row's index stands there: ``x[arange(B), i]`` does, ``x[keys.argsort()]`` not.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autosplit.errors import is_internal
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.structure import flatten_output
from autosplit.trace.rows.kinds import moved_and_index
from autosplit.trace.rows.neighbours import Layout, Values, result_of, shuffled, tensors_of

_SHUFFLES = 4


class Layouts:
    """How rows lie in the values of a run.

    Args:
        root: the root on which the graph runs.
        run: the run.
        rows: its number of rows.
        valued: the nodes whose values depend on rows' values, not on their number alone.
    """

    def __init__(self, root: nn.Module, run: fx.Interpreter, *, rows: int, valued: Collection[fx.Node]) -> None:
        self.root, self.run, self.rows, self.valued = root, run, rows, valued
        self.noted: dict[fx.Node, list[Layout | None]] = {}
        """How rows lie in nodes that are no stacks; None: in no order along the batch dimension."""
        self.known: dict[Hashable, list[Layout | None]] = {}

    def of(self, node: fx.Node) -> list[Layout | None]:
        """Return how rows lie in each tensor of a node that has been run; None for tensors without rows."""
        if node in self.noted or INFO not in node.meta:
            return self.noted.get(node, [])
        pairs = zip(tensors_of(self.run.env[node]), node.meta[INFO].tensors, strict=True)
        return [None if (d := i.batch_dim) is None else Layout.stack(d, t.shape[d], self.rows) for t, i in pairs]

    def computed(self, node: fx.Node, operands: Sequence[fx.Node], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Note how rows lie in what is computed from operands; False where they lie in several orders."""
        noted = [layout for n in operands for layout in self.noted.get(n, ())]
        if not noted:
            return True
        tensors = node.meta[INFO].tensors
        if len(noted) < len(operands) or None in noted or any(t.batch_dim is None for t in tensors):
            return False
        pairs = [(t.batch_dim, shape[t.batch_dim]) for t, shape in zip(tensors, shapes, strict=True)]
        found = [{layout.after(dim, size) for layout in noted if layout is not None} for dim, size in pairs]
        if any(len(orders) != 1 or None in orders for orders in found):
            return False
        self.noted[node] = [next(iter(orders)) for orders in found]
        return True

    def moved(self, node: fx.Node, kind: Hashable, suspects: Collection[str]) -> bool | None:
        """Follow rows through an operation that moves values: False where its index may pick from other rows.

        None where the operation cannot be followed: it moves nothing that depends on rows, or knows no integers. What
        is known of one operation without an index holds for all of its kind.
        """
        operands, picking = moved_and_index(node, self.root)
        index = [n for n in picking if n in self.valued]
        stated = [n for n in picking if n not in self.valued and self._has_rows(n) and n in self._stated]
        if not any(n in self.valued for n in operands) or any(INFO not in n.meta for n in index):
            return None
        if any(None in self.noted.get(n, ()) for n in operands):
            self.noted[node] = [None]
            return True
        try:
            numbers = {n: self._numbers(n) for n in operands} if picking or kind not in self.known else {}
            found = self.known[kind] if not numbers else self._after(node, numbers)
            if stated and not self._stays(node, {**numbers, **{n: torch.zeros_like(self.run.env[n]) for n in stated}}):
                return False
            if index:
                return self._picks_own(node, numbers, index, suspects)
        except Exception as error:  # it takes no row numbers
            if is_internal(error):
                raise
            return None
        if not picking:
            self.known[kind] = found
        if not all(layout is not None and layout.is_stack for layout in found):
            self.noted[node] = found
        return True

    def _picks_own(self, node: fx.Node, numbers: Values, index: Sequence[fx.Node], suspects: Collection[str]) -> bool:
        """Tell whether all rows stay in place, whichever row's index stands in a row: it must be that row's own."""
        if any(n in self.noted or n.meta[INFO].name in suspects for n in index):
            return False
        generator = torch.Generator().manual_seed(0)
        for draw in range(_SHUFFLES):
            values = dict(numbers)
            for n in index if draw else ():
                values[n] = shuffled(self.run.env[n], self.of(n), self.rows, generator)
            if not self._stays(node, values):
                return False
        return True

    def _stays(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
        return all(layout is not None and layout.is_stack for layout in self._after(node, values))

    def _has_rows(self, node: fx.Node) -> bool:
        return INFO in node.meta and any(tensor.batch_dim is not None for tensor in node.meta[INFO].tensors)

    @cached_property
    def _stated(self) -> set[fx.Node]:
        """The nodes whose numbers depend on parameters, buffers, or arguments without rows: others in the next call."""
        found: set[fx.Node] = set()
        own = {name for name, _ in (*self.root.named_parameters(), *self.root.named_buffers())}
        for node in self.run.graph.nodes:
            if node.op == "placeholder":
                stated = bool(node.meta.get(INFO) and node.meta[INFO].tensors) and not self._has_rows(node)
            else:
                held = node.op == "get_attr" and str(node.target) in own
                stated = held or any(n in found for n in node.all_input_nodes)
            if stated:
                found.add(node)
        return found

    def _after(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Layout | None]:
        pairs = zip(result_of(node, self.run, values), node.meta[INFO].tensors, strict=True)
        return [Layout.of(tensor, info, self.rows) for tensor, info in pairs]

    def _numbers(self, node: fx.Node) -> Any:
        """Return a node's value with row numbers in the place of its values; -1 where there are no rows."""
        flat, rebuild = flatten_output(self.run.env[node])
        layouts = iter(self.of(node))

        def numbered(tensor: torch.Tensor) -> torch.Tensor:
            layout = next(layouts, None)
            return torch.full(tensor.shape, -1, dtype=torch.int16) if layout is None else layout.numbers(tensor)

        return rebuild([numbered(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
