"""Rows sorted into groups and back, as mixtures of experts do it: they stay independent of each other.

    keys ─► sort ─► order ─► x[order] ─► grouped_mm(·, weights, offs) ─► ... ─► ·[back] ─► rows as they were
                └► keys in order ─► histc ─► cumsum ──────┘

Between the sort and the way back a tensor's rows stand in an order of their own, which depends on all rows; a row's
values do not, as long as every operation on the way treats rows one by one. That is a matter of structure: what meets
the sorted rows must be in the same order, or have no rows; a product in groups must take its bounds from the same keys;
and nothing may leave but by the way back. A sort of which one of these does not hold is left as it is: it mixes rows.
The value probe puts sorted rows back before it compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from autosplit.trace.graph import INFO, TensorInfo
from autosplit.trace.rows.kinds import called, takes_shape_only

_CASTS = frozenset("to float double half bfloat16 int long short type contiguous clone detach reshape view".split())
_PRODUCTS = frozenset(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"))
_COUNTS = frozenset(("histc", "bincount"))
_INDEX = frozenset(("getitem", "index_select"))
_ADDS = frozenset(("index_add", "index_add_", "index_copy", "index_copy_"))


@dataclass(frozen=True)
class Grouped:
    """The sorts of a graph that come back.

    Attributes:
        order: nodes whose first dimension stands in a sort's order, and the node of that sort.
        back: nodes in which sorted rows come back.
        bounds: per product in groups, the operand that holds the groups' bounds.
        sorting: nodes that make or use an order: sorts, ways back, what an order picks, counts of keys, products.
    """

    order: Mapping[fx.Node, fx.Node]
    back: frozenset[fx.Node]
    bounds: Mapping[fx.Node, fx.Node]
    sorting: frozenset[fx.Node]


def grouped(graph: fx.Graph, root: nn.Module) -> Grouped:
    """Find the sorts whose rows come back."""
    sorts = [_Sort(graph, root, node) for node in graph.nodes if _is_sort(node, root)]
    good = [sort for sort in sorts if sort.follow()]
    return Grouped(
        {node: sort.node for sort in good for node in sort.kind},
        frozenset(node for sort in good for node in sort.back),
        {node: bounds for sort in good for node, bounds in sort.bounds.items()},
        frozenset(node for sort in good for node in sort.sorting()),
    )


def _is_sort(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node sorts a vector that has entries for every row."""
    name, args = called(node, root)
    if name not in ("sort", "argsort") or INFO not in node.meta or not args or not isinstance(args[0], fx.Node):
        return False
    tensors: tuple[TensorInfo, ...] = args[0].meta[INFO].tensors if INFO in args[0].meta else ()
    return len(tensors) == 1 and len(tensors[0].shape) == 1 and tensors[0].batch_dim == 0


class _Sort:
    """Follows one sort: ``kind`` says of every node on the way what it holds: order, keys, rows, or the way back."""

    def __init__(self, graph: fx.Graph, root: nn.Module, node: fx.Node) -> None:
        self.root, self.node = root, node
        self.graph = graph
        name, args = called(node, root)
        self.keys = args[0]
        self.size = node.meta[INFO].tensors[0].shape[0]
        self.kind: dict[fx.Node, str] = {node: "order" if name == "argsort" else "sort"}
        self.ways: set[fx.Node] = set()
        self.back: set[fx.Node] = set()
        self.picks: set[fx.Node] = set()
        """Nodes that bring unsorted rows into the order, by the order itself or by what is computed of it."""
        self.bounds: dict[fx.Node, fx.Node] = {}

    def follow(self) -> bool:
        """Walk through the graph behind the sort; tell whether all rows come back by the structure alone."""
        behind = False
        for node in self.graph.nodes:
            behind = behind or node is self.node
            touched = [n for n in node.all_input_nodes if n in self.kind or n in self.ways]
            if not behind or node is self.node or not touched or takes_shape_only(node, self.root):
                continue
            if node.op == "output" or not self._step(node):
                return False
        return bool(self.back)

    def sorting(self) -> set[fx.Node]:
        """Return the nodes that make or use the order, and are no operation row by row."""
        orders = {n for n, kind in self.kind.items() if kind in ("sort", "order", "keys")}
        nodes = orders | self.ways | self.back | self.picks
        users = {user for n in nodes - self.back - self.picks for user in n.users}
        return nodes | users | {n for n in self.graph.nodes if n in self.bounds}

    def _step(self, node: fx.Node) -> bool:
        """Take one node that meets sorted rows; tell whether it treats rows one by one."""
        name, args = called(node, self.root)
        if len(args) > 1 and args[0] is self.node and name == "getitem" and self.kind[self.node] == "sort":
            self.kind[node] = "keys" if args[1] == 0 else "order"
            return True
        if name == "setitem":
            return self._set(*args)
        if name in _ADDS:
            self.back.add(node)
            return args[0] not in self.kind and all(n in self.kind for n in args[2:4])
        if name in _COUNTS:
            return self._is_keys(args[0]) and all(self._bounds_only(user) for user in node.users)
        if name == "argsort" and self.kind.get(args[0]) == "order":
            self.ways.add(node)
            return True
        if name in _PRODUCTS and self._product(node, args):
            return True
        if name in _INDEX:
            return self._index(node, args[0], args[-1])
        return self._by_row(node)

    def _set(self, target: fx.Node, index: Any, value: Any) -> bool:
        """``back[order] = arange(n)``, or ``result[order] = rows``."""
        if (
            target in self.kind
            or not isinstance(index, fx.Node)
            or self.kind.get(index) != "order"
            or not isinstance(value, fx.Node)
        ):
            return False
        if called(value, self.root)[0] == "arange":
            self.ways.add(target)
            return len([a for a in called(value, self.root)[1] if not _is_zero(a)]) == 1
        self.back.add(target)
        return value in self.kind

    def _index(self, node: fx.Node, value: fx.Node, index: Any) -> bool:
        if isinstance(index, fx.Node) and index in self.ways:
            self.back.add(node)
            return value in self.kind
        first = index[0] if isinstance(index, tuple) and index else index
        if not isinstance(first, fx.Node):  # a slice, which has no hash before Python 3.12, or a number
            return self._by_row(node)
        if first in self.kind and value not in self.kind and value not in self.ways:
            self.picks.add(node)
            return self._sorted(node, "rows")
        return first not in self.kind and self._by_row(node)

    def _product(self, node: fx.Node, args: tuple[Any, ...]) -> bool:
        bounds = node.kwargs.get("offs", args[2] if len(args) > 2 else None)
        if args[0] not in self.kind or not isinstance(bounds, fx.Node) or not self._is_bounds(bounds):
            return False
        self.bounds[node] = bounds
        return self._sorted(node, "rows")

    def _is_keys(self, node: Any) -> bool:
        """Tell whether a node holds the keys themselves, in any type."""
        while isinstance(node, fx.Node) and node is not self.keys and self.kind.get(node) != "keys":
            name, args = called(node, self.root)
            if name not in _CASTS:
                return False
            node = args[0]
        return isinstance(node, fx.Node)

    def _is_bounds(self, node: fx.Node) -> bool:
        """Tell whether a node holds where the groups of keys end."""
        while True:
            name, args = called(node, self.root)
            if name in _COUNTS:
                return self._is_keys(args[0])
            if name not in _CASTS and name != "cumsum":
                return False
            node = args[0]

    def _bounds_only(self, node: fx.Node) -> bool:
        name, _ = called(node, self.root)
        return name in _PRODUCTS or ((name in _CASTS or name == "cumsum") and all(map(self._bounds_only, node.users)))

    def _by_row(self, node: fx.Node) -> bool:
        """Tell whether all that an operation takes is in this order or has no rows, and so is what it gives."""
        for operand in node.all_input_nodes:
            rows = INFO in operand.meta and any(t.varying_dims for t in operand.meta[INFO].tensors)
            if operand in self.ways or (rows and operand not in self.kind):
                return False
        kinds = {self.kind[n] for n in node.all_input_nodes if n in self.kind}
        return self._sorted(node, "keys" if kinds == {"keys"} and called(node, self.root)[0] in _CASTS else "rows")

    def _sorted(self, node: fx.Node, kind: str) -> bool:
        self.kind[node] = kind
        tensors = node.meta[INFO].tensors if INFO in node.meta else ()
        return bool(tensors) and all(t.batch_dim == 0 and t.shape[0] == self.size for t in tensors)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0
