"""Does an operation, taken by itself, let rows influence each other? Asked with made-up neighbours.

    values as they are   rows  0  1  2  3  ─► result  0 [1] 2  3
    one row kept         rows  ?  1  ?  ?  ─► result  ? [1] ?  ?     the kept row's result must be the same bits

The neighbours are other rows in another order, copies of the kept row, random values in the range of the operand's own,
and values far outside of it; the kept row changes from draw to draw, and some draws make it up too. So it does not
matter what the model's values are: a comparison that is false in the whole sample, a tie, a gate that is zero or a row
that is masked hides influence in a run of the model, and a sort of four keys leaves a row in its place now and then.
Each kind of operation is asked once; a kind is a function, its other arguments and its operands' shapes. Operations
that only move values are followed on row numbers instead. Whether a row's place matters is asked of more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autosplit.compare.tensors import same_bits, same_rounded
from autosplit.errors import is_internal
from autosplit.trace.graph import INFO, TracedNode
from autosplit.trace.rows.kinds import (
    function_of,
    is_opaque,
    is_torchs,
    leaves_unset,
    rearranges,
    takes_shape_only,
)
from autosplit.trace.rows.neighbours import (
    FEW_KINDS,
    KINDS,
    Layout,
    Values,
    changed_by,
    result_of,
    with_neighbours,
    with_random_rows,
)
from autosplit.trace.rows.place_probe import PlaceProbe, counts_of_rows
from autosplit.trace.rows.row_layout import Layouts

Same = Callable[[torch.Tensor, torch.Tensor], bool]


class OperatorProbe:
    """Asks the operations of one graph, in order, each before it runs on the values that it has in a run.

    Args:
        graph: the graph.
        root: the root on which it runs.
        run: the run.
        rows: the number of rows in the run.
        lengths: the lengths of the inputs in the run.
        sample_rows: the number of rows in the sample.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        run: fx.Interpreter,
        *,
        rows: int,
        lengths: Mapping[str, int],
        sample_rows: int,
    ) -> None:
        self.root, self.run, self.rows = root, run, rows
        self.lengths = lengths
        self.valued = _valued(graph, root)
        self.layouts = Layouts(root, run, rows=rows, valued=self.valued)
        self.asked: dict[Any, bool] = {}
        self.numbered: set[fx.Node] = set()
        """Nodes that depend on the number of rows alone, and are not equal for all places."""
        self.places = [
            PlaceProbe(run, self.layouts, self.valued, rows=rows, count=count, lengths=lengths)
            for count in counts_of_rows(graph, rows, sample_rows)
        ]
        self.placed: dict[Any, bool] = {}

    def is_moved(self, node: fx.Node) -> bool:
        """Tell whether rows do not lie one after the other in a node or in what it changes, or are numbered there."""
        return node in self.numbered or any(
            n in self.layouts.noted for n in (node, *([] if node.meta[INFO].tensors else changed_by(node)))
        )

    def mixes(self, node: fx.Node, suspects: Collection[str]) -> bool:
        """Tell whether an operation lets rows influence each other in a way that no later operation puts right."""
        operands = [n for n in node.all_input_nodes if n in self.valued and INFO in n.meta]
        info: TracedNode = node.meta[INFO]
        if info.writes or takes_shape_only(node, self.root) or leaves_unset(node, self.root):
            return False
        if any(tensor.batch_dim is None for tensor in info.tensors):
            return False  # certain by its shape
        if not operands:
            differing = [places for places in self.places if places.differs(node)]  # all of them note its value
            if differing and not info.random:
                self.numbered.add(node)
            return False
        return self._mixes_values(node, operands, suspects) or self._depends_on_place(node, suspects)

    def _mixes_values(self, node: fx.Node, operands: Sequence[fx.Node], suspects: Collection[str]) -> bool:
        info: TracedNode = node.meta[INFO]
        kind = self._kind(node)
        if rearranges(node, self.root):
            followed = self.layouts.moved(node, kind, suspects)
            if followed is not None:
                return not followed
        if not self.layouts.computed(node, operands, [t.shape_at(self.rows, self.lengths) for t in info.tensors]):
            return True
        if kind is None:
            return self._is_influenced(node, operands)
        if kind not in self.asked:
            self.asked[kind] = self._is_influenced(node, operands)
        return self.asked[kind]

    def _depends_on_place(self, node: fx.Node, suspects: Collection[str]) -> bool:
        """Tell whether a row's result depends on its place, unless that is known, or rows are no stack."""
        operands = [n for n in node.all_input_nodes if INFO in n.meta]
        if node.meta[INFO].random or any(n in self.layouts.noted for n in (node, *operands)):
            return False
        if any(n.meta[INFO].name in suspects for n in operands) and not rearranges(node, self.root):
            return False
        kind = self._kind(node)
        if kind is None or any(n not in self.valued and _has_rows(n) for n in operands):
            return any(places.differs(node) for places in self.places)
        if kind not in self.placed:
            self.placed[kind] = any(places.differs(node) for places in self.places)
        return self.placed[kind]

    def _is_influenced(self, node: fx.Node, operands: Sequence[fx.Node]) -> bool:
        try:
            plain = result_of(node, self.run, {})
        except Exception as error:  # runs of the model say all that can be said
            if is_internal(error):
                raise
            return False
        generator = torch.Generator().manual_seed(0)
        for draw, kind in enumerate(KINDS if self._is_light(node) else FEW_KINDS):
            kept = (draw + 1) % self.rows
            base: Values = {}
            if kind == "all random":
                base = {n: with_random_rows(self.run.env[n], self.layouts.of(n), generator) for n in operands}
            values = {}
            for n in operands:
                value, layouts = base.get(n, self.run.env[n]), self.layouts.of(n)
                values[n] = with_neighbours(value, layouts, self.rows, kept=kept, kind=kind, generator=generator)
            try:
                made = result_of(node, self.run, values)
                before = result_of(node, self.run, base) if base else plain
            except Exception as error:  # the operation takes no such values
                if is_internal(error):
                    raise
                continue
            same = same_rounded if is_opaque(node, self.root) else same_bits
            if not _is_kept(kept, before, made, self._result_layouts(node, plain), same):
                return True
        return False

    def _result_layouts(self, node: fx.Node, made: Sequence[torch.Tensor]) -> list[Layout | None]:
        if node in self.layouts.noted:
            return self.layouts.noted[node]
        infos = node.meta[INFO].tensors
        if not infos:
            return [layout for n in changed_by(node) for layout in self.layouts.of(n)]
        pairs = zip(made, infos, strict=True)
        return [None if (d := i.batch_dim) is None else Layout.stack(d, t.shape[d], self.rows) for t, i in pairs]

    def _is_light(self, node: fx.Node) -> bool:
        """Tell whether an operation is torch's own and has no weights."""
        function = function_of(node, self.root)
        weights = isinstance(function, nn.Module) and any(True for _ in function.parameters())
        weights = weights or any(isinstance(self.run.env.get(n), nn.Parameter) for n in node.all_input_nodes)
        return is_torchs(node, self.root) and not weights

    def _kind(self, node: fx.Node) -> Any:
        """Return what tells an operation from others, but for values; None where there is no such thing."""
        if not is_torchs(node, self.root):
            return None
        function = function_of(node, self.root)
        if isinstance(function, nn.Module):
            function = (repr(function), function.training)
        parts: list[Any] = []

        def described(n: fx.Node) -> str:
            parts.append(self._operand(n))
            return f"%{len(parts)}"

        given = fx.node.map_arg((node.args, node.kwargs), described)
        return node.op, str(function), repr(given), tuple(parts)

    def _operand(self, node: fx.Node) -> Any:
        value = self.run.env[node]
        if node.op == "get_attr" and not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return node.target
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, (int, float, str, bool)) else id(node)
        own = tuple(self.layouts.of(node)) if node in self.layouts.noted else ()
        batch = [t.batch_dim for t in node.meta[INFO].tensors] if INFO in node.meta else []
        return tuple(value.shape), value.stride(), value.dtype, node in self.valued, tuple(batch), own


def _has_rows(node: fx.Node) -> bool:
    return any(tensor.batch_dim is not None for tensor in node.meta[INFO].tensors)


def _is_kept(
    row: int,
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    layouts: Sequence[Layout | None],
    same: Same,
) -> bool:
    """Tell whether a row has equal values in two results."""
    for old, new, layout in zip(before, after, layouts, strict=True):
        if layout is not None:
            at = layout.entries(row)
            if not same(new.index_select(layout.dim, at), old.index_select(layout.dim, at)):
                return False
    return True


def _valued(graph: fx.Graph, root: nn.Module) -> set[fx.Node]:
    """Return the nodes whose values depend on rows' values; others depend on the number of rows at most."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        info = node.meta.get(INFO)
        rows = info is not None and any(tensor.varying_dims for tensor in info.tensors)
        if node.op == "placeholder":
            given = rows
        elif rows and (info.random or info.mutated):
            given = True
        else:
            given = any(n in found for n in node.all_input_nodes) and not takes_shape_only(node, root)
        if given:
            found.add(node)
    return found
