"""How rows lie in the values of a run, and values in which other rows stand in the place of some.

An operation that only moves values runs on a tensor of row numbers, so no table says what it does. An index that
depends on values must pick from the row itself, whichever row's index stands there: ``x[arange(B), i]`` does,
``x[keys.argsort()]`` not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autosplit.errors import ForeignSuppressed
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, TensorInfo, size_at
from autosplit.trace.inputs.objects import leaves_of, take_apart
from autosplit.trace.rows.kinds import moved_and_index
from autosplit.trace.rows.layout import RowMap, from_sources

Values = dict[fx.Node, Any]
KINDS = ("other rows", "equal rows", "far", "random", "all random", "far", "other rows", "all random")
"""What the neighbours are, draw by draw, of which each keeps the next row; in ``all random`` it is drawn too."""
FEW_KINDS = ("other rows", "equal rows", "all random")
ARRANGEMENTS = ("rearranged", "all rearranged", "thinned") * 5
"""For integers and masks that take no random values: other places for the same sum, or zeros in the places of some."""
ROWS = ("other rows", "equal rows")
"""The kinds of neighbours that hold no other values than the recorded rows."""
_FAR = 100.0
_DRAWN = 65_537
"""Random values that are drawn; larger tensors repeat them. A prime, so that rows do not repeat."""
_SHUFFLES = 4


class Layouts:
    """How rows lie in the values of a run; ``valued``: the nodes whose values depend on rows' values."""

    def __init__(self, root: nn.Module, run: fx.Interpreter, *, rows: int, valued: Collection[fx.Node]) -> None:
        self.root, self.run, self.rows, self.valued = root, run, rows, valued
        self.noted: dict[fx.Node, list[RowMap | None]] = {}
        """How rows lie in nodes that are no stacks; None: in no order along the batch dimension."""

    def value_of(self, node: fx.Node) -> Any:
        """Return a node's value on this number of rows."""
        return self.run.env[node]

    def of(self, node: fx.Node) -> list[RowMap | None]:
        """Return how rows lie in each tensor of a node that has been run; None for tensors without rows."""
        if node in self.noted or INFO not in node.meta:
            return self.noted.get(node, [])
        return self.stacks(tensors_of(self.value_of(node)), node.meta[INFO].tensors)

    def of_result(self, node: fx.Node, result: Sequence[torch.Tensor]) -> list[RowMap | None]:
        """Return the layouts of rows in the results of a node that was probed, or in what it changed."""
        infos = node.meta[INFO].tensors
        if not infos:
            return [layout for n in changed_by(node) for layout in self.of(n)]
        return self.noted.get(node) or self.stacks(result, infos)

    def has_moved(self, node: fx.Node) -> bool:
        """Tell whether a node or one of its operands is no stack of rows."""
        return any(n in self.noted for n in (node, *node.all_input_nodes))

    def has_lost(self, node: fx.Node) -> bool:
        """Tell whether rows lie in no order along the batch dimension of a node or of one of its operands."""
        return any(None in self.noted.get(n, ()) for n in (node, *node.all_input_nodes))

    def stacks(self, tensors: Sequence[torch.Tensor], infos: Sequence[TensorInfo]) -> list[RowMap | None]:
        """Return the layouts of stacks of rows; None for tensors without rows."""
        pairs = zip(tensors, infos, strict=True)
        return [None if (d := i.batch_dim) is None else RowMap.stack(d, t.shape[d], self.rows) for t, i in pairs]

    def computed(self, node: fx.Node, operands: Sequence[fx.Node], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Note the layout of rows in a result that is computed from operands; False if the operands' orders differ."""
        noted = [layout for n in operands for layout in self.noted.get(n, ())]
        if not noted:
            return True
        tensors = node.meta[INFO].tensors
        if len(noted) < len(operands) or None in noted or any(t.batch_dim is None for t in tensors):
            return False
        pairs = [(t.batch_dim, shape[t.batch_dim]) for t, shape in zip(tensors, shapes, strict=True)]
        layouts = [{layout.after(dim, size) for layout in noted if layout is not None} for dim, size in pairs]
        if any(len(orders) != 1 or None in orders for orders in layouts):
            return False
        self.noted[node] = [next(iter(orders)) for orders in layouts]
        return True

    def moved(self, node: fx.Node, suspects: Collection[str]) -> bool | None:
        """Follow rows through an operation that moves values: False where its index may pick from other rows.

        None where the operation cannot be followed: it moves nothing that depends on rows, or knows no integers.
        """
        operands, picking = moved_and_index(node, self.root)
        index = [n for n in picking if n in self.valued]
        stated = [n for n in picking if n not in self.valued and has_rows(n) and n in self.stated]
        if not any(n in self.valued for n in operands) or any(INFO not in n.meta for n in index):
            return None
        if any(None in self.noted.get(n, ()) for n in operands):
            self.noted[node] = [None]
            return True
        with ForeignSuppressed():
            numbers = {n: self._numbers(n) for n in operands}
            layouts = self._after(node, numbers)
            if stated and not self._stays(node, {**numbers, **{n: torch.zeros_like(self.value_of(n)) for n in stated}}):
                return False
            if index:
                return self._picks_own(node, numbers, index, suspects)
            if not all(layout is not None and layout.is_stack for layout in layouts):
                self.noted[node] = layouts
            return True
        return None  # it takes no row numbers

    def _picks_own(self, node: fx.Node, numbers: Values, index: Sequence[fx.Node], suspects: Collection[str]) -> bool:
        """Tell whether all rows stay in place, whichever row's index stands in a row: it must be that row's own."""
        if any(n in self.noted or n.meta[INFO].name in suspects for n in index):
            return False
        generator = torch.Generator().manual_seed(0)
        for draw in range(_SHUFFLES):
            values = dict(numbers)
            for n in index if draw else ():
                values[n] = with_neighbours(
                    self.value_of(n), self.of(n), self.rows, kept=None, kind="other rows", generator=generator
                )
            if not self._stays(node, values):
                return False
        return True

    def _stays(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
        return all(layout is not None and layout.is_stack for layout in self._after(node, values))

    @cached_property
    def stated(self) -> set[fx.Node]:
        """The nodes whose numbers depend on parameters, buffers, or arguments without rows: others in the next call."""
        nodes: set[fx.Node] = set()
        names = {name for name, _ in (*self.root.named_parameters(), *self.root.named_buffers())}
        for node in self.run.graph.nodes:
            if node.op == "placeholder":
                stated = bool(node.meta.get(INFO) and node.meta[INFO].tensors) and not has_rows(node)
            else:
                held = node.op == "get_attr" and str(node.target) in names
                stated = held or any(n in nodes for n in node.all_input_nodes)
            if stated:
                nodes.add(node)
        return nodes

    def _after(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> list[RowMap | None]:
        pairs = zip(result_of(node, self.run, values, self.value_of), node.meta[INFO].tensors, strict=True)
        return [RowMap.of(tensor, info, self.rows) for tensor, info in pairs]

    def _numbers(self, node: fx.Node) -> Any:
        """Return a node's value with row numbers in the place of its values; -1 where there are no rows."""
        flat, rebuild = take_apart(self.value_of(node))
        layouts = iter(self.of(node))

        def numbered(tensor: torch.Tensor) -> torch.Tensor:
            layout = next(layouts, None)
            return torch.full_like(tensor, -1, dtype=torch.int32) if layout is None else layout.numbers(tensor)

        return rebuild([numbered(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])


# -- an operation on other values ------------------------------------------------------------------------------
def has_rows(node: fx.Node) -> bool:
    """Tell whether a node has a tensor with a batch dimension."""
    return INFO in node.meta and any(tensor.batch_dim is not None for tensor in node.meta[INFO].tensors)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value, in the order of its `TensorInfo`."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def result_of(
    node: fx.Node,
    run: fx.Interpreter,
    values: Mapping[fx.Node, Any],
    value_of: Callable[[fx.Node], Any] | None = None,
) -> list[torch.Tensor]:
    """Run a node on copies of its operands, or of ``values`` in their place; return what it makes or changes.

    Operands without a value in ``values`` have the run's, or that of ``value_of``.
    """
    value_of = value_of or run.env.__getitem__
    operands = {n: values[n] if n in values else value_of(n) for n in node.all_input_nodes}
    copies = {n: copied(value) if INFO in n.meta else value for n, value in operands.items()}
    return made_or_changed(node, call_with(node, run, copies), copies)


def made_or_changed(node: fx.Node, out: Any, inputs: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of a node made, or those of the given operands that it changed."""
    return tensors_of(out) if node.meta[INFO].tensors else [t for n in changed_by(node) for t in tensors_of(inputs[n])]


def made_or_changed_infos(node: fx.Node) -> tuple[TensorInfo, ...]:
    """Return what is known about the tensors that a node makes, or about those that it changes."""
    infos: tuple[TensorInfo, ...] = node.meta[INFO].tensors
    return infos or tuple(info for n in changed_by(node) for info in n.meta[INFO].tensors)


def rows_of(node: fx.Node, run: fx.Interpreter, rows: int, sources: Sequence[int]) -> Any:
    """Return a copy of a node's value, a stack in a run on ``rows`` rows, for the given rows; sizes for as many."""
    value = run.env[node]
    if INFO not in node.meta:
        return size_at(node, len(sources), run.env.__getitem__) if isinstance(value, (int, float)) else value
    infos = iter(node.meta[INFO].tensors)
    return copied(value, lambda tensor: from_sources(tensor, next(infos).batch_dim, rows, sources))


def call_with(node: fx.Node, run: fx.Interpreter, operands: Mapping[fx.Node, Any]) -> Any:
    """Run a node on the given operands; what it draws is drawn from one seed."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    with contextlib.ExitStack() as stack:
        if node.meta[INFO].random:
            stack.enter_context(random_state())
            torch.manual_seed(0)
        return getattr(run, node.op)(node.target, args, kwargs)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose storage some operation changes."""
    return [n for n in node.all_input_nodes if INFO in n.meta and n.meta[INFO].mutated]


def with_neighbours(
    value: Any, layouts: Sequence[RowMap | None], rows: int, *, kept: int | None, kind: str, generator: torch.Generator
) -> Any:
    """Return a value in which all rows but the kept one are made up; see `KINDS`."""
    sources = torch.randint(rows, (rows,), generator=generator).tolist()
    if kept is not None:
        sources = [kept if kind == "equal rows" or row == kept else source for row, source in enumerate(sources)]

    def made_up(tensor: torch.Tensor, layout: RowMap) -> torch.Tensor:
        if kind in ARRANGEMENTS and _is_discrete(tensor):
            others = layout.numbers(tensor) != (-1 if kept is None else kept)
            return tensor.clone().masked_scatter_(others, _arranged(tensor[others], kind, generator))
        if kind in (*ROWS, *ARRANGEMENTS) or tensor.is_complex():
            return _from_rows(tensor, layout, sources)
        drawn = tensor.clone().copy_(_random(tensor, generator, _FAR if kind == "far" else 1.0))
        if kept is None:
            return drawn
        return layout.put(drawn, kept, layout.select(tensor, kept))

    flat, rebuild = take_apart(value)
    rest = iter(layouts)

    def changed(leaf: Any) -> Any:
        layout = next(rest, None) if isinstance(leaf, torch.Tensor) else None
        return leaf if layout is None else made_up(leaf.detach(), layout)

    return rebuild([changed(leaf) for leaf in flat])


def _from_rows(tensor: torch.Tensor, layout: RowMap, sources: Sequence[int]) -> torch.Tensor:
    result = tensor.clone()
    for row, source in enumerate(sources):
        layout.put(result, row, layout.select(tensor, source))
    return result


def _arranged(flat: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return integers or truth values in another arrangement: with the same sum, except for the thinned ones."""
    if kind == "thinned":
        return flat * torch.randint(2, flat.shape, generator=generator).to(flat)
    order = torch.randperm(len(flat), generator=generator).to(flat.device)
    if flat.dtype != torch.bool and flat.device.type == "cpu":  # a larger index is an error there, and no fault
        giving, taking = order[: len(flat) // 2], order[len(flat) // 2 :][: len(flat) // 2]
        ones = flat[giving].clamp(0, 1)
        flat = flat.index_add(0, giving, -ones).index_add(0, taking, ones)
    return flat[torch.randperm(len(flat), generator=generator).to(flat.device)]


def is_discrete(value: Any) -> bool:
    """Tell whether a value holds integers or truth values, which may be counts, places or masks."""
    return any(_is_discrete(tensor) for tensor in tensors_of(value))


def is_rearranged(value: Any, recorded: Any) -> bool:
    """Tell whether a value holds other integers or truth values than a recorded one."""
    pairs = zip(tensors_of(value), tensors_of(recorded), strict=True)
    return any(_is_discrete(a) and not torch.equal(a, b) for a, b in pairs)


def takes_zero_only(value: Any) -> bool:
    """Tell whether a value that takes no others holds zeros, as the index of a table with one row; masks may differ."""
    discrete = [tensor for tensor in tensors_of(value) if _is_discrete(tensor)]
    return not any(tensor.dtype == torch.bool or bool(tensor.any()) for tensor in discrete)


def _is_discrete(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _random(tensor: torch.Tensor, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Return random values: integers are some of the tensor's own, as most are indices; far from zeros are ones."""
    if _is_discrete(tensor):
        flat = tensor.reshape(-1)
        if tensor.dtype == torch.bool:
            return torch.randint(2, tensor.shape, generator=generator).bool()
        picked = flat[torch.randint(max(1, flat.numel()), tensor.shape, generator=generator)]
        if scale == 1.0 or bool(picked.any()):
            return picked
        return torch.randint(2, tensor.shape, generator=generator).to(picked.dtype)
    low, high = range_of(tensor)
    if scale != 1.0 or low == high:
        reach = scale * max(abs(low), abs(high), 1.0)
        low, high = -reach, reach
    drawn = torch.rand(min(_DRAWN, tensor.numel()), generator=generator, dtype=torch.float64).mul_(high - low).add_(low)
    repeated = drawn.to(tensor.dtype).repeat(tensor.numel() // max(1, len(drawn)) + 1)
    return repeated[: tensor.numel()].reshape(tensor.shape)


def range_of(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest finite value; 0 and 1 if there is none."""
    if not tensor.numel():
        return 0.0, 1.0
    low, high = map(float, tensor.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    finite = tensor[tensor.isfinite()]
    return (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)


def copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a value with copies of its tensors."""
    flat, rebuild = take_apart(value)
    return rebuild([copy(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
