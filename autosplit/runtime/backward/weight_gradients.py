"""Weight gradients that are put off: what is left of a cell's backward when the gradients of its input are made.

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

from autosplit.profile.stage_trace.products import products_in

Make = Callable[[torch.Tensor, bool], Sequence[torch.Tensor]]
"""Takes the gradient that came in, and whether the bias wants one, and returns the weight's and the bias's."""


@dataclass(slots=True)
class Product:
    """One product whose weight gradients are put off.

    Attributes:
        make: makes its gradients.
        ways: what they pass on their way to their leaves: the weight, and the bias where that is put off too.
        came_in: the gradient that came in; None until the input gradient is made, and where none came.
    """

    make: Make
    ways: tuple[Way, ...]
    came_in: torch.Tensor | None = None

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep what came in; the engine calls this before the product's own backward."""
        self.came_in = gradients[0]

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each leaf and its gradient, new memory."""
        if self.came_in is not None:
            for way, gradient in zip(self.ways, self.make(self.came_in, len(self.ways) > 1), strict=True):
                gradient = gradient.t() if way.transposed else gradient
                yield way.leaf, gradient.to(way.leaf.dtype)


@dataclass(slots=True)
class DeferredWeightGrads:
    """What is put off of one cell, in the order in which the whole backward would come to it.

    Attributes:
        edges: what to ask the engine for besides: gradients that come in where nothing further down is asked for.
        caught: the products that those come to.
    """

    products: list[Product] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    caught: list[Product] = field(default_factory=list)

    def catch(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Keep what came in at :attr:`edges`."""
        for product, gradient in zip(self.caught, gradients, strict=True):
            product.came_in = gradient

    @property
    def leaves(self) -> set[int]:
        """The leaves, by identity, whose gradients are put off."""
        return {id(way.leaf) for product in self.products for way in product.ways}


class Way(NamedTuple):
    """The way from a product to a leaf: the leaf's own node, and whether the gradient is transposed on it."""

    end: Any
    leaf: torch.Tensor
    transposed: bool


class _Use(NamedTuple):
    """A product in a graph: what makes its gradients, the ways to its weight and its bias, and its other inputs."""

    node: Any
    make: Make
    weight: Way
    bias: Way | None
    others: int


def defer_weight_gradients(roots: Sequence[torch.Tensor], leaves: Collection[int]) -> DeferredWeightGrads:
    """Find the products in a graph whose weight gradients can wait; ``leaves``, by identity, may be put off."""
    arrivals, products = products_in(roots, _KINDS)
    leaves = set(leaves) - {id(root) for root in roots}
    uses = [use for node in products if (use := _use(node, arrivals, leaves)) is not None]
    weights = Counter(use.weight.end for use in uses)
    uses = [use for use in uses if weights[use.weight.end] == arrivals[use.weight.end]]
    biases = Counter(use.bias.end for use in uses if use.bias is not None)
    result = DeferredWeightGrads()
    for use in sorted(uses, key=lambda use: -use.node._sequence_nr()):
        bias = use.bias if use.bias is not None and biases[use.bias.end] == arrivals[use.bias.end] else None
        product = Product(use.make, (use.weight,) if bias is None else (use.weight, bias))
        result.products.append(product)
        if use.others or (bias is None and use.bias is not None):
            use.node.register_prehook(product.take)
        else:
            result.edges.append(GradientEdge(use.node, 0))
            result.caught.append(product)
    return result


def _way(end: Any, arrivals: Counter[Any], leaves: Collection[int]) -> Way | None:
    """Return the way from a product's edge to a leaf that may be put off: straight, transposed, or cast on it."""
    transposed = False
    for kind in ("TBackward0", "ToCopyBackward0"):
        if type(end).__name__ == kind and arrivals[end] == 1:
            transposed |= kind == "TBackward0"
            end = end.next_functions[0][0]
    leaf = getattr(end, "variable", None)
    return None if leaf is None or id(leaf) not in leaves or leaf.is_complex() else Way(end, leaf, transposed)


def _use(node: Any, arrivals: Counter[Any], leaves: Collection[int]) -> _Use | None:
    kind = _KINDS[type(node).__name__]
    following = [end for end, _ in node.next_functions]
    for place in kind.weights:
        way = None if following[place] is None else _way(following[place], arrivals, leaves)
        make = None if way is None else kind.made(node, place)
        if way is not None and make is not None:
            end = None if kind.bias is None else following[kind.bias]
            bias = None if end is None else _way(end, arrivals, leaves)
            if bias is not None and (bias.transposed or bias.leaf.dim() != 1):
                bias = None
            known = 1 + (bias is not None)
            return _Use(node, make, way, bias, sum(end is not None for end in following) - known)
    return None


def _matrices(node: Any, place: int) -> Make | None:
    """Make the gradients of ``addmm`` and ``mm``: a weight on the right (``x @ w``), or on the left."""
    added = hasattr(node, "_saved_alpha")
    if added and (node._saved_alpha != 1 or node._saved_beta != 1):
        return None
    right = place == len(node.next_functions) - 1
    other = node._saved_mat2 if not right else node._saved_mat1 if added else node._saved_self
    if other.layout is not torch.strided:
        return None
    other = other.detach()  # it would keep the graph that it is of, and give its products one
    own = "mat2" if right else "mat1" if added else "self"
    sizes, strides = getattr(node, f"_saved_{own}_sym_sizes"), getattr(node, f"_saved_{own}_sym_strides")
    column_major = strides[0] == 1 and strides[1] == sizes[0]

    def make(came_in: torch.Tensor, with_bias: bool) -> Sequence[torch.Tensor]:
        if right:
            gradient = came_in.t().mm(other).t() if column_major else other.t().mm(came_in)
        else:
            gradient = other.mm(came_in.t()).t() if column_major else came_in.mm(other.t())
        return (gradient, came_in.sum_to_size(came_in.shape[-1])) if with_bias else (gradient,)

    return make


def _convolution(node: Any, place: int) -> Make | None:
    """Make the gradients of a convolution of any number of dimensions, transposed or not."""
    given, weight = node._saved_input.detach(), node._saved_weight.detach()
    sizes = node._saved_bias_sym_sizes_opt
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    how = tuple(getattr(node, f"_saved_{name}") for name in names)

    def make(came_in: torch.Tensor, with_bias: bool) -> Sequence[torch.Tensor]:
        mask = [False, True, with_bias]
        found = torch.ops.aten.convolution_backward(came_in, given, weight, sizes, *how, mask)
        return found[1 : 2 + with_bias]

    return make


class _Kind(NamedTuple):
    """Which inputs of a product may be its weight, which one is its bias, and what reads off its node how to go on."""

    weights: tuple[int, ...]
    bias: int | None
    made: Callable[[Any, int], Make | None]


_KINDS = {
    "AddmmBackward0": _Kind((2, 1), 0, _matrices),
    "MmBackward0": _Kind((1, 0), None, _matrices),
    "ConvolutionBackward0": _Kind((1,), 2, _convolution),
}
