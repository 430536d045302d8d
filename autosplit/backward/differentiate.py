"""The backward of one cell, straight from autograd's engine, and gradients that the engine is given to keep.

``torch.autograd.grad`` spends more time in Python on checks of its arguments than the backward of a small cell takes.
``Variable._execution_engine`` is private, but is what ``torch.autograd.grad`` itself calls. Tried on torch 2.11, 2.13
and 2.15.

A gradient that Python still holds is copied where it meets a leaf without one, and the sum with another is new memory.
One that comes out of a node's backward, and is nobody else's, becomes ``.grad`` itself, and others are added to it in
place. So sums of microbatches reach the engine through a node that lets go of them:

    donate_gradients(tensors, gradients) ─► backward: every tensor gets its gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

_ENGINE = torch.autograd.Variable._execution_engine


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


def donate_gradients(tensors: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a root, on the first tensor's device, whose backward gives every tensor its gradient.

    The list is empty afterwards; who holds a gradient elsewhere has it copied, or added to out of place.
    """
    with torch.enable_grad():
        return InjectGradients.apply(gradients, *tensors)


class InjectGradients(torch.autograd.Function):
    """Gives tensors gradients, and lets go of them: the engine adds to them in place."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return a root for the tensors."""
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Return the gradients."""
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients
