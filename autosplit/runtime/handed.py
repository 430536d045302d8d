"""Gradients that autograd's engine is given to keep.

A gradient that Python still holds is copied where it meets a leaf without one, and the sum with another is new memory.
One that comes out of a node's backward, and is nobody else's, becomes ``.grad`` itself, and others are added to it in
place. So sums of microbatches reach the engine through a node that lets go of them:

    handed(tensors, gradients) ─► backward: every tensor gets its gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def handed(tensors: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a root, on the first tensor's device, whose backward gives every tensor its gradient.

    The list is empty afterwards; who holds a gradient elsewhere has it copied, or added to out of place.
    """
    with torch.enable_grad():
        return _Handed.apply(gradients, *tensors)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients
