"""Weight gradients can be put off: what is left of a cell's backward when the gradients of its input are made.

    whole backward     out ─► product ─┬─► gradient of the input ─► ...       the engine makes both at the product
                                       └─► gradient of the weight

    input gradient     out ─► product ───► gradient of the input ─► ...       the engine makes one, and frees the graph
                               └─ keeps what came in, and the saved input
    weight gradients           saved input ᵀ · what came in                   the other one, without any graph

Only products are put off (of matrices, and convolutions): there a weight has work of its own. What else parameters
want is made with the input's gradient, where it costs next to nothing: a scale, a bias alone, the sums of a norm. A
weight is put off when all its uses in the cell are such products.

What a product saved is read off its node (``_saved_*``), and its gradients are those of torch's ``derivatives.yaml``,
operation for operation, so that the bits are the whole backward's. These names are private; tried on torch 2.11, 2.13
and 2.15. A node of any other name is not put off: its gradients then are part of the input gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from autosplit.backward import arrivals_in

Make = Callable[[torch.Tensor, bool], Sequence[torch.Tensor]]
"""Takes the gradient that came in, and whether the bias wants one, and returns the weight's and the bias's: one of more
dimensions is yet to be summed to the bias's shape."""


@dataclass(slots=True)
class Product:
    """One product whose weight gradients are put off.

    Attributes:
        make: computes its gradients.
        ways: the paths to the leaves: that of the weight, and that of the bias if it is deferred too.
        came_in: the gradient of its result; None before the input gradient's backward, or if there is none.
    """

    make: Make
    ways: tuple[LeafPath, ...]
    came_in: torch.Tensor | None = None

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep what came in; the engine calls this before the product's own backward."""
        self.came_in = gradients[0]

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each leaf and its gradient, new memory."""
        if self.came_in is not None:
            for path, gradient in zip(self.ways, self.make(self.came_in, len(self.ways) > 1), strict=True):
                gradient = gradient.t() if path.transposed else gradient.sum_to_size(path.leaf.shape)
                yield path.leaf, gradient.to(path.leaf.dtype)


@dataclass(slots=True)
class DeferredWeightGrads:
    """The deferred products of one cell, in the order of a whole backward.

    Attributes:
        edges: further edges to ask the engine for: at products that it would not reach otherwise.
        caught: the products of these edges.
    """

    products: list[Product] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    caught: list[Product] = field(default_factory=list)

    @classmethod
    def of(cls, uses: Iterable[WeightUse]) -> DeferredWeightGrads:
        """Put off the weight gradients of products, before the graph's backward."""
        result = cls()
        for use in uses:
            product = Product(_KINDS[type(use.node).__name__].make(use.node, use.position), use.ways)
            result.products.append(product)
            if use.enters:  # the engine calls this behind hooks on the product's result, which an edge would miss
                use.node.register_prehook(product.take)
            else:
                result.edges.append(GradientEdge(use.node, 0))
                result.caught.append(product)
        return result

    def catch(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Keep what came in at :attr:`edges`."""
        for product, gradient in zip(self.caught, gradients, strict=True):
            product.came_in = gradient

    @property
    def leaves(self) -> set[int]:
        """The leaves, by identity, whose gradients are put off."""
        return {id(path.leaf) for product in self.products for path in product.ways}


class LeafPath(NamedTuple):
    """The path from a product to a leaf: the leaf's own node, and whether the gradient is transposed on it."""

    end: Any
    leaf: torch.Tensor
    transposed: bool


_BEFORE = 3
"""How many nodes at the end of a layer are looked at for its product: views of the result come behind it."""


class WeightUse(NamedTuple):
    """A product in a graph: which input its weight is, the paths to weight and bias, and its other inputs' nodes.

    ``enters``: whether the engine comes to it for what is asked for besides.
    """

    node: Any
    position: int
    weight: LeafPath
    bias: LeafPath | None
    others: tuple[Any, ...]
    enters: bool = False

    @property
    def ways(self) -> tuple[LeafPath, ...]:
        """The ways to what can wait."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def uses_to_defer(roots: Sequence[torch.Tensor], leaves: Collection[int], asked: Collection[int]) -> list[WeightUse]:
    """Return the products of a graph whose weight gradients are deferred, in the order of a whole backward.

    ``leaves`` (ids) may be deferred. ``asked`` (ids) are all leaves whose gradients are wanted; the engine is asked for
    those that are not deferred. It reaches a product only if one of these lies behind it, or another such product.
    """
    leads: dict[Any, bool] = {}
    uses = sorted(deferrable(roots, leaves), key=lambda use: use.node._sequence_nr())
    left = set(asked) - {id(path.leaf) for use in uses for path in use.ways}
    for number, use in enumerate(uses):
        uses[number] = use._replace(enters=any(_leads(node, left, leads) for node in use.others))
        leads[use.node] = True
    return uses[::-1]


def located(uses: Sequence[WeightUse], results: Sequence[Any]) -> list[tuple[WeightUse, int, int]] | None:
    """Return uses with the positions of their products, as (use, index of a result, number of nodes before it).

    ``results`` are the graph nodes of what the cell's layers return; None if a product is not near one of them.
    """
    places: dict[Any, tuple[int, int]] = {}
    for number, node in enumerate(results):
        for before in range(_BEFORE):
            if node is not None:
                places.setdefault(node, (number, before))
                node = node.next_functions[0][0] if node.next_functions else None
    placed = [(use, *places[use.node]) for use in uses if use.node in places]
    return placed if len(placed) == len(uses) else None


def uses_at(places: Iterable[tuple[WeightUse, int, int]], results: Sequence[Any]) -> list[WeightUse] | None:
    """Return the uses of a cell by those of another cell of the same stage; None where its graph is another one."""
    located = []
    for use, number, before in places:
        node = results[number]
        for _ in range(before):
            node = node.next_functions[0][0] if node is not None and node.next_functions else None
        if type(node) is not type(use.node):
            return None
        located.append(use._replace(node=node))
    return located


def deferrable(roots: Sequence[torch.Tensor], leaves: Collection[int], *, dense: bool = False) -> list[WeightUse]:
    """Find the products in a graph whose weight gradients can wait; ``leaves``, by identity, may be put off.

    ``dense``: no saved tensor is sparse, so that none is looked at, which would have a checkpoint run again.
    """
    arrivals = arrivals_in(roots)
    products = [node for node in arrivals if type(node).__name__ in _KINDS]
    leaves = set(leaves) - {id(root) for root in roots}
    uses = [use for node in products if (use := _use(node, arrivals, leaves, dense)) is not None]
    weights = Counter(use.weight.end for use in uses)
    uses = [use for use in uses if weights[use.weight.end] == arrivals[use.weight.end]]
    biases = Counter(use.bias.end for use in uses if use.bias is not None)
    return [
        use
        if use.bias is None or biases[use.bias.end] == arrivals[use.bias.end]
        else use._replace(bias=None, others=(*use.others, use.bias.end))
        for use in uses
    ]


def _way(end: Any, arrivals: Counter[Any], leaves: Collection[int]) -> LeafPath | None:
    """Return the way from a product's edge to a leaf that may be put off: straight, transposed, or cast on it."""
    transposed = False
    for kind in ("TBackward0", "ToCopyBackward0"):
        if type(end).__name__ == kind and arrivals[end] == 1:
            transposed |= kind == "TBackward0"
            end = end.next_functions[0][0]
    leaf = getattr(end, "variable", None)
    return None if leaf is None or id(leaf) not in leaves or leaf.is_complex() else LeafPath(end, leaf, transposed)


def _use(node: Any, arrivals: Counter[Any], leaves: Collection[int], dense: bool) -> WeightUse | None:
    kind = _KINDS[type(node).__name__]
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    following = [end for end, _ in node.next_functions]
    for index in kind.weights:
        path = None if following[index] is None else _way(following[index], arrivals, leaves)
        if path is not None and (
            dense or kind.make is not _matrices or _saved_other(node, index).layout is torch.strided
        ):
            end = None if kind.bias is None or kind.bias >= len(following) else following[kind.bias]
            bias = None if end is None else _way(end, arrivals, leaves)
            if bias is not None and (bias.transposed or bias.leaf.dim() != 1):
                bias = None
            known = (index, None if bias is None else kind.bias)
            others = (end for number, end in enumerate(following) if number not in known and end is not None)
            return WeightUse(node, index, path, bias, tuple(others))
    return None


def _leads(start: Any, asked: Collection[int], known: dict[Any, bool]) -> bool:
    """Tell whether a leaf that is asked for lies behind a node; ``known`` are the answers so far."""
    path = [(start, iter(start.next_functions))]
    while path:
        node, following = path[-1]
        if known.get(node) or id(getattr(node, "variable", None)) in asked:
            known.update(dict.fromkeys((passed for passed, _ in path), True))
            return True
        further = next((end for end, _ in following if end is not None and known.get(end, True)), None)
        if further is None:
            known[node] = False
            path.pop()
        else:
            path.append((further, iter(further.next_functions)))
    return False


def _saved_other(node: Any, index: int) -> torch.Tensor:
    """Return what ``addmm`` or ``mm`` multiplies a weight with: what is left of a weight on the right."""
    if index != len(node.next_functions) - 1:
        return node._saved_mat2
    return node._saved_mat1 if hasattr(node, "_saved_alpha") else node._saved_self


def _matrices(node: Any, index: int) -> Make:
    """Make the gradients of ``addmm`` and ``mm``: a weight on the right (``x @ w``), or on the left."""
    right = index == len(node.next_functions) - 1
    other = _saved_other(node, index).detach()  # it would keep the graph that it is of, and give its products one
    name = "mat2" if right else "mat1" if hasattr(node, "_saved_alpha") else "self"
    sizes, strides = getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")
    column_major = strides[0] == 1 and strides[1] == sizes[0]

    def make(came_in: torch.Tensor, with_bias: bool) -> Sequence[torch.Tensor]:
        if right:
            gradient = came_in.t().mm(other).t() if column_major else other.t().mm(came_in)
        else:
            gradient = other.mm(came_in.t()).t() if column_major else came_in.mm(other.t())
        return (gradient, came_in) if with_bias else (gradient,)

    return make


def _convolution(node: Any, index: int) -> Make:
    """Make the gradients of a convolution of any number of dimensions, transposed or not."""
    source, weight = node._saved_input.detach(), node._saved_weight.detach()
    sizes = node._saved_bias_sym_sizes_opt
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    how = tuple(getattr(node, f"_saved_{name}") for name in names)

    def make(came_in: torch.Tensor, with_bias: bool) -> Sequence[torch.Tensor]:
        mask = [False, True, with_bias]
        grads = torch.ops.aten.convolution_backward(came_in, source, weight, sizes, *how, mask)
        return grads[1 : 2 + with_bias]

    return make


def _gathered(node: Any, index: int) -> Make:
    """Make the gradients of a product of a gathered value, which its own backward leaves out (`tensor.products`)."""
    local, again = node.saved_tensors[0], node.again
    node.put_off = True

    def make(came_in: torch.Tensor, with_bias: bool) -> Sequence[torch.Tensor]:
        gradient = again.weight_gradient(came_in, local)
        return (gradient, came_in) if with_bias else (gradient,)

    return make


class _Kind(NamedTuple):
    """Which inputs of a product may be its weight, which one is its bias, and what makes the gradients."""

    weights: tuple[int, ...]
    bias: int | None
    make: Callable[[Any, int], Make]


_KINDS = {
    "AddmmBackward0": _Kind((2, 1), 0, _matrices),
    "MmBackward0": _Kind((1, 0), None, _matrices),
    "ConvolutionBackward0": _Kind((1,), 2, _convolution),
    "GatheredProductBackward": _Kind((2,), 3, _gathered),
}
