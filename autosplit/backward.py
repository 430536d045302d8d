"""What is asked of autograd's engine, by the runtime and by the profile that predicts it.

``torch.autograd.grad`` spends more time in Python on checks of its arguments than the backward of a small cell takes.
``Variable._execution_engine`` is private, but is what ``torch.autograd.grad`` itself calls. Tried on torch 2.11, 2.13
and 2.15.

A gradient that Python still holds is copied where it meets a leaf without one, and the sum with another is new memory.
One that comes out of a node's backward, and is nobody else's, becomes ``.grad`` itself, and others are added to it in
place. So large sums of microbatches reach the engine through a node that lets go of them:

    donate_gradients(tensors, gradients) ─► backward: every tensor gets its gradient

The node is Python, and takes as long as half the backward of a small cell: small sums are copied instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from autosplit.errors import InputError

_ENGINE = torch.autograd.Variable._execution_engine
LARGE_BYTES = 1 << 16
"""From here on a sum is worth being added to in place."""


def gradients(
    roots: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    *,
    keep: bool,
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of ``wanted``, None for what the roots do not depend on; ``keep`` keeps the graph."""
    return _ENGINE.run_backward(
        tuple(roots), tuple(seeds), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )


def accumulate(roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], *, keep: bool) -> None:
    """Add to the ``.grad`` of all leaves behind the roots; ``keep`` keeps the graph."""
    _ENGINE.run_backward(tuple(roots), tuple(seeds), keep, False, (), allow_unreachable=True, accumulate_grad=True)


def donate_gradients(tensors: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a root, on the first tensor's device, whose backward gives every tensor its gradient.

    The list is empty afterwards; who holds a gradient elsewhere has it copied, or added to out of place.
    """
    with torch.enable_grad():
        return InjectGradients.apply(gradients, *tensors)


def dtype_of_sums(tensor: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return what gradients of a tensor are added up in: its dtype, or a wider one that is asked for."""
    narrow = asked is not None and tensor.is_floating_point() and tensor.dtype.itemsize < asked.itemsize
    return asked if narrow and asked is not None else tensor.dtype


def apart(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients none of which lies in another's memory, as one row's of a class token lies in its positions'.

    The engine would leave them in ``.grad`` like that, where each is changed in place.
    """
    result, end = list(gradients), 0
    begins = {index: gradient.data_ptr() for index, gradient in enumerate(result) if gradient.layout is torch.strided}
    for index in sorted(begins, key=lambda index: begins[index]):
        if begins[index] < end:
            result[index] = result[index].clone()
        end = max(end, begins[index] + result[index].nbytes)
    return result


def begin_at_sums(
    leaves: Sequence[torch.Tensor],
    totals: dict[int, torch.Tensor],
    roots: list[torch.Tensor],
    seeds: list[torch.Tensor],
) -> None:
    """Have a backward begin at the sums of leaves too, ``totals`` by identity: what else comes is added to them.

    Large ones are taken out of ``totals`` and added to in place.
    """
    large = [leaf for leaf in leaves if leaf.numel() * leaf.element_size() >= LARGE_BYTES]
    small = [leaf for leaf in leaves if leaf.numel() * leaf.element_size() < LARGE_BYTES]
    roots += small
    seeds += [totals[id(leaf)] for leaf in small]
    if large:
        root = donate_gradients(large, [totals.pop(id(leaf)) for leaf in large])
        roots.append(root)
        seeds.append(root.detach())


def leaves_under(value: torch.Tensor, ends: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return the leaves of a value's graph, without what stands behind the tensors ``ends``."""
    leaves: list[torch.Tensor] = []
    seen = {tensor.grad_fn for tensor in ends if tensor.grad_fn is not None}
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        todo += [following for following, _ in node.next_functions]
    return leaves


def arrivals_in(roots: Sequence[torch.Tensor]) -> Counter[Any]:
    """Return how many edges lead to each node of a graph."""
    arrivals: Counter[Any] = Counter(root.grad_fn for root in roots if root.grad_fn is not None)
    todo = list(arrivals)
    seen = set(todo)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None:
                arrivals[following] += 1
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return arrivals


def has_several(
    values: Iterable[Sequence[torch.Tensor]], summed: Collection[torch.Tensor], others: Iterable[torch.Tensor]
) -> bool:
    """Tell whether a backward from values has several contributions for one of the leaves that are ``summed``.

    Raises InputError for parameters that are neither among these nor among the ``others``: their gradients would be
    lost.
    """
    ids = set(map(id, summed))
    known, several = ids.union(map(id, others)), False
    for node, count in arrivals_in(list(chain(*values))).items():
        leaf = getattr(node, "variable", None)
        several |= count > 1 and id(leaf) in ids
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise InputError(
                f"a hook, or a forward that no graph follows, computes with a parameter of shape {list(leaf.shape)} "
                "that its module does not have, or that it does not read from the module that it is called with; "
                "register the parameter in that module too and read it there, detach it, or call under torch.no_grad()"
            )
    return several


class InjectGradients(torch.autograd.Function):
    """Gives tensors gradients, and lets go of them: the engine adds to them in place."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return a root for the tensors: a real number, which may stand alone in a backward."""
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Return the gradients."""
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients
