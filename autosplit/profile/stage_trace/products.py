"""Which parameters' gradients can wait for the weight gradients of a backward in two parts: those of products alone.

It is the rule by which the runtime puts gradients off (`autosplit.runtime.put_off`), read off the same graph: a weight
all of whose uses are products of matrices or convolutions, and a bias that is added by such products only. The names of
autograd's nodes are private to torch; tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

_PRODUCTS = {"AddmmBackward0": ((2, 1), 0), "MmBackward0": ((1, 0), None), "ConvolutionBackward0": ((1,), 2)}
"""By node: which inputs may be the weight, and which is the bias."""
_PASSED = ("TBackward0", "ToCopyBackward0")


def late(arrivals: Counter[Any], products: Sequence[Any], leaves: Collection[int]) -> set[int]:
    """Return the leaves, by identity, whose gradients can wait; ``leaves`` are all that want one.

    The others are what :func:`products_in` returns.
    """
    weights: Counter[int] = Counter()
    biases: Counter[int] = Counter()
    ends: dict[int, Any] = {}
    for node in products:
        places, bias = _PRODUCTS[type(node).__name__]
        following = [end for end, _ in node.next_functions]
        found = next((leaf for place in places if (leaf := _leaf(following[place], arrivals, leaves))), None)
        if found is None:
            continue
        ends[id(found.variable)] = found
        weights[id(found.variable)] += 1
        if bias is not None and (added := _leaf(following[bias], arrivals, leaves)) and added.variable.dim() == 1:
            ends[id(added.variable)] = added
            biases[id(added.variable)] += 1
    return {leaf for uses in (weights, biases) for leaf, count in uses.items() if count == arrivals[ends[leaf]]}


def products_in(
    roots: Sequence[torch.Tensor], kinds: Collection[str] = _PRODUCTS.keys()
) -> tuple[Counter[Any], list[Any]]:
    """Return how many edges lead to each node of a graph, and the nodes of some kinds, by the names of their types."""
    arrivals: Counter[Any] = Counter(root.grad_fn for root in roots if root.grad_fn is not None)
    todo = list(arrivals)
    seen = set(todo)
    products = []
    wanted: dict[type, bool] = {}
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind not in wanted:
            wanted[kind] = kind.__name__ in kinds
        if wanted[kind]:
            products.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                arrivals[following] += 1
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return arrivals, products


def _leaf(end: Any, arrivals: Counter[Any], leaves: Collection[int]) -> Any:
    """Return the node of the leaf that an edge leads to, straight, transposed or cast; None where there is none."""
    for kind in _PASSED:
        if type(end).__name__ == kind and arrivals[end] == 1:
            end = end.next_functions[0][0]
    variable = getattr(end, "variable", None)
    return None if variable is None or id(variable) not in leaves or variable.is_complex() else end
