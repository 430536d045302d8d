"""Does an operation, taken by itself, let rows influence each other? Asked with made-up neighbours.

    values as they are   rows  0  1  2  3  ─► result  0 [1] 2  3
    one row kept         rows  ?  1  ?  ?  ─► result  ? [1] ?  ?     the kept row's result must be the same bits

The neighbours are other rows in another order, copies of the kept row, random values in the range of the operand's own,
and values far outside of it; the kept row changes from draw to draw, and some draws make it up too. So it does not
matter what the model's values are: a comparison that is false in the whole sample, a tie, a gate that is zero or a row
that is masked hides influence in a run of the model, and a sort of four keys leaves a row in its place now and then. A
draw that raises says nothing: where all with other integers or masks do, those of the run are put into other
arrangements, and what never runs on another arrangement mixes rows.
Each kind of operation is asked once; a kind is a function, its other arguments and its operands' shapes. Operations
that only move values are followed on row numbers instead. Whether a row's place or the number of rows
matters, and whether moved rows come back to their places in other batches, is asked with more: see `more_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autosplit.compare import same_bits, same_rounded
from autosplit.errors import ForeignSuppressed, is_internal
from autosplit.trace.graph import INFO, Size, TracedNode, size_at
from autosplit.trace.on_cpu import OnCpu
from autosplit.trace.rows.kinds import (
    function_of,
    is_opaque,
    is_torchs,
    leaves_unset,
    picks_part,
    rearranges,
    takes_shape_only,
)
from autosplit.trace.rows.more_rows import MoreRows, counts_of_rows
from autosplit.trace.rows.row_values import (
    ARRANGEMENTS,
    FEW_KINDS,
    KINDS,
    ROWS,
    Layouts,
    Values,
    changed_by,
    has_rows,
    is_discrete,
    is_rearranged,
    result_of,
    takes_zero_only,
    with_neighbours,
)


class OperatorProbe:
    """Asks the operations of one graph, in order, each before it runs on the values that it has in a run.

    On the meta device a run has no values: see `without_values`.
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
        self.answers: dict[Any, bool] = {}
        self.rearranged = False
        """Whether the operation that is asked has run on other integers or masks than the recorded ones."""
        self.numbered: set[fx.Node] = set()
        """Nodes whose values depend on the number of rows alone, and differ from row to row."""
        counts = counts_of_rows(graph, rows, sample_rows)
        self.places = [MoreRows(self.layouts, count=count, lengths=lengths) for count in counts]

    def is_moved(self, node: fx.Node) -> bool:
        """Tell whether rows are out of order in a node's result or in what it changes, or numbered by its values."""
        return node in self.numbered or any(
            n in self.layouts.noted for n in (node, *([] if node.meta[INFO].tensors else changed_by(node)))
        )

    def mixes(self, node: fx.Node, suspects: Collection[str]) -> bool:
        """Tell whether an operation mixes rows in a way that no later operation undoes."""
        operands = [n for n in node.all_input_nodes if n in self.valued and INFO in n.meta]
        info: TracedNode = node.meta[INFO]
        if info.writes or takes_shape_only(node, self.root) or leaves_unset(node, self.root):
            return False
        if any(tensor.batch_dim is None for tensor in info.tensors):
            return False  # certain by its shape
        if not operands:
            by_number = node in self.layouts.stated or any(n in self.numbered for n in node.all_input_nodes)
            answers = [places.differs(node) for places in self.places]  # all of them note its value
            if not info.random and (any(answers) or (by_number and None in answers)):
                self.numbered.add(node)
            return False
        return self._mixes_values(node, operands, suspects) or self._depends_on_place(node)

    def mixes_made_up(self, node: fx.Node) -> bool:
        """Tell whether an operation that keeps its operand's shape lets rows influence each other, as a softmax may.

        An index is not made up: what it picks depends on the model's own values.
        """
        operands = [n for n in node.all_input_nodes if INFO in n.meta]
        infos = [tensor for n in operands for tensor in n.meta[INFO].tensors]
        kept = {tensor.shape for tensor in infos}.issuperset(tensor.shape for tensor in node.meta[INFO].tensors)
        floats = all(tensor.dtype.is_floating_point for tensor in infos)
        asked = infos and kept and floats and not node.meta[INFO].writes
        if not asked or takes_shape_only(node, self.root) or not is_torchs(node, self.root):
            return False
        if picks_part(node):  # made up is the part alone, not the structure that it is picked from
            return False
        return self._once("influence", node, lambda: self._is_influenced(node, operands))

    def _mixes_values(self, node: fx.Node, operands: Sequence[fx.Node], suspects: Collection[str]) -> bool:
        info: TracedNode = node.meta[INFO]
        if rearranges(node, self.root):
            followed = self.layouts.moved(node, suspects)
            if followed is not None:
                return not followed or not self._moves_alike(node, suspects)
        if not self.layouts.computed(node, operands, [t.shape_at(self.rows, self.lengths) for t in info.tensors]):
            return True
        if not self._moves_alike(node, suspects):
            return True
        return self._once("influence", node, lambda: self._is_influenced(node, operands))

    def _moves_alike(self, node: fx.Node, suspects: Collection[str]) -> bool:
        """Tell whether rows that are a stack again behind a node are one for the larger numbers of rows too."""
        followed = [places.follows(node, suspects) for places in self.places]  # all of them note its layout
        return all(followed)

    def _once(self, question: str, node: fx.Node, ask: Callable[[], bool]) -> bool:
        """Return the answer to a question, asked once for all operations of a kind."""
        kind = self._kind(node)
        if kind is None:
            return ask()
        if (question, kind) not in self.answers:
            self.answers[question, kind] = ask()
        return self.answers[question, kind]

    def _depends_on_place(self, node: fx.Node) -> bool:
        """Tell whether a row's result depends on its place: on the row's number, or as seen where rows are a stack."""
        operands = [n for n in node.all_input_nodes if INFO in n.meta]
        moved = any(n in self.layouts.noted for n in operands)
        if any(n in self.numbered for n in operands) and (moved or not rearranges(node, self.root)):
            return True
        if node.meta[INFO].random or self.layouts.has_lost(node):
            return False

        def ask() -> bool:
            return any(places.differs(node) for places in self.places)

        by_number = any(n not in self.valued and has_rows(n) for n in operands)
        return ask() if by_number else self._once("place", node, ask)

    def _is_influenced(self, node: fx.Node, operands: Sequence[fx.Node]) -> bool:
        plain = None
        with ForeignSuppressed():
            plain = result_of(node, self.run, {})
        if plain is None:  # runs of the model say all that can be said
            return False
        self.rearranged = not any(is_discrete(self.run.env[n]) for n in operands)
        generator = torch.Generator().manual_seed(0)
        kinds = KINDS if self._is_light(node) else FEW_KINDS
        draws = [((draw + 1) % self.rows, kind) for draw, kind in enumerate(kinds)]
        if any(self._changes_row(*draw, node, operands, plain, generator) for draw in draws):
            return True
        if self.rearranged:
            return False
        middle = [(1 + draw % (self.rows - 2), kind) for draw, kind in enumerate(ARRANGEMENTS)]
        return any(self._changes_row(*draw, node, operands, plain, generator) for draw in middle) or not (
            self.rearranged or all(takes_zero_only(self.run.env[n]) for n in operands)
        )

    def _changes_row(
        self,
        kept: int,
        kind: str,
        node: fx.Node,
        operands: Sequence[fx.Node],
        plain: Sequence[torch.Tensor],
        generator: torch.Generator,
    ) -> bool:
        """Tell whether a row has another result beside neighbours of a kind; the values of a draw live in here only."""
        base: Values = {}
        if kind.startswith("all "):
            base = self._with_neighbours(operands, {}, None, kind, generator)
        values = self._with_neighbours(operands, base, kept, kind, generator)
        try:
            after = result_of(node, self.run, values)
            before = result_of(node, self.run, base) if base else plain
        except Exception as error:  # the operation takes no such values, which says nothing about rows
            if is_internal(error) and not isinstance(error, IndexError):
                raise
            return False
        self.rearranged |= kind not in ROWS and any(is_rearranged(values[n], self.run.env[n]) for n in operands)
        same = same_rounded if is_opaque(node, self.root) else same_bits
        results = zip(before, after, self.layouts.of_result(node, plain), strict=True)
        return not all(
            layout is None or same(layout.select(b, kept), layout.select(a, kept)) for a, b, layout in results
        )

    def _with_neighbours(
        self, operands: Sequence[fx.Node], base: Values, kept: int | None, kind: str, generator: torch.Generator
    ) -> Values:
        return {
            n: with_neighbours(
                base.get(n, self.run.env[n]), self.layouts.of(n), self.rows, kept=kept, kind=kind, generator=generator
            )
            for n in operands
        }

    def _is_light(self, node: fx.Node) -> bool:
        """Tell whether an operation is torch's own and has no weights."""
        function = function_of(node, self.root)
        weights = isinstance(function, nn.Module) and any(True for _ in function.parameters())
        weights = weights or any(isinstance(self.run.env.get(n), nn.Parameter) for n in node.all_input_nodes)
        return is_torchs(node, self.root) and not weights

    def _kind(self, node: fx.Node) -> Any:
        """Return what tells an operation from others, except for values; None where there is no such thing."""
        if not is_torchs(node, self.root):
            return None
        function = function_of(node, self.root)
        if isinstance(function, nn.Module):
            function = (repr(function), function.training)
        parts: list[Any] = []

        def described(n: fx.Node) -> str:
            parts.append(self._operand(n))
            return f"%{len(parts)}"

        call = fx.node.map_arg((node.args, node.kwargs), described)
        return node.op, str(function), repr(call), tuple(parts)

    def _operand(self, node: fx.Node) -> Any:
        value = self.run.env[node]
        if node.op == "get_attr" and not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return node.target
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, (int, float, str, bool)) else id(node)
        layouts = (self.layouts, *self.places)
        noted = [tuple(known.of(node)) if node in known.noted else () for known in layouts]
        batch = [t.batch_dim for t in node.meta[INFO].tensors] if INFO in node.meta else []
        return tuple(value.shape), value.stride(), value.dtype, node in self.valued, tuple(batch), tuple(noted)


def _valued(graph: fx.Graph, root: nn.Module) -> set[fx.Node]:
    """Return the nodes whose values depend on rows' values; others depend on the number of rows at most."""
    valued: set[fx.Node] = set()
    for node in graph.nodes:
        info = node.meta.get(INFO)
        rows = info is not None and any(tensor.varying_dims for tensor in info.tensors)
        if node.op == "placeholder":
            depends = rows
        elif rows and (info.random or info.mutated):
            depends = True
        else:
            depends = any(n in valued for n in node.all_input_nodes) and not takes_shape_only(node, root)
        if depends:
            valued.add(node)
    return valued


# -- without values ------------------------------------------------------------------------------------------------
_MADE_UP_ROWS = 7
_MADE_UP_ENTRIES = 4


class _MadeUp(dict[fx.Node, Any]):
    """What stands for a run's values: random tensors of a few rows, at most four entries in any other dimension."""

    def __init__(self, run: fx.Interpreter) -> None:
        super().__init__()
        self.run = run

    def __missing__(self, node: fx.Node) -> Any:
        self[node] = value = self._value(node)
        return value

    def _value(self, node: fx.Node) -> Any:
        if INFO in node.meta:
            tensors = [torch.rand([self._entries(size) for size in info.shape]) for info in node.meta[INFO].tensors]
            return tensors[0] if len(tensors) == 1 else tensors
        if node.op == "get_attr":
            value = self.run.fetch_attr(str(node.target))
            scalar = (
                isinstance(value, torch.Tensor) and value.is_meta and not value.dim()
            )  # that of `free_sources`, say
            return torch.zeros((), dtype=value.dtype) if scalar else value
        return size_at(node, _MADE_UP_ROWS, self.__getitem__)

    def _entries(self, size: Size) -> int:
        return size.at(_MADE_UP_ROWS) if size.per_row else min(size.constant, _MADE_UP_ENTRIES)


def without_values(graph: fx.Graph, root: nn.Module) -> OperatorProbe:
    """Return a probe for a graph of a model on the meta device; ask it `OperatorProbe.mixes_made_up`."""
    run = OnCpu(root, graph=graph)
    run.env = _MadeUp(run)
    return OperatorProbe(graph, root, run, rows=_MADE_UP_ROWS, lengths={}, sample_rows=0)
