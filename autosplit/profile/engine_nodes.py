"""Nodes of an autograd graph: one that hands sums to the engine, in the runtime too, others for what does not run."""

from __future__ import annotations

from typing import Any

import torch


class Handed(torch.autograd.Function):
    """Gives leaves what was summed so far, and lets go of it: the engine adds to it in place."""

    @staticmethod
    def forward(ctx: Any, sums: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        """Return a root for the leaves."""
        ctx.sums = sums
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Return the sums."""
        sums = (None, *ctx.sums)
        ctx.sums.clear()
        return sums


class Guess(torch.autograd.Function):
    """Stands for an operation that does not run: its results follow from what it is given."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the first values, as made from the others."""
        ctx.save_for_backward(*values[count:])
        ctx.count = count
        made = tuple(value.view_as(value) for value in values[:count])
        ctx.mark_non_differentiable(*(t for t in made if not (t.is_floating_point() or t.is_complex())))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Return new gradients for whoever wants one."""
        wanted = ctx.needs_input_grad[1 + ctx.count :]
        found = (torch.empty_like(t) if need else None for t, need in zip(ctx.saved_tensors, wanted, strict=True))
        return (None,) * (1 + ctx.count) + tuple(found)
