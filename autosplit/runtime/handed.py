"""Gradients that autograd's engine is given to keep.

A gradient that Python still holds is copied where it meets a leaf without one, and the sum with another is new memory.
One that comes out of a node's backward, and is nobody else's, becomes ``.grad`` itself, and others are added to it in
place. So sums of microbatches reach the engine through a node that lets go of them:

    handed(tensors, gradients) ─► backward: every tensor gets its gradient
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosplit.profile.engine_nodes import Handed


def handed(tensors: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a root, on the first tensor's device, whose backward gives every tensor its gradient.

    The list is empty afterwards; who holds a gradient elsewhere has it copied, or added to out of place.
    """
    with torch.enable_grad():
        return Handed.apply(gradients, *tensors)
