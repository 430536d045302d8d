"""The moves between states of a value as modules: what a rank does forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.tensor.axes import Shard
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED, Whole

Placement = Whole | Shard
"""How a tensor lies on the ranks."""


class Move(nn.Module):
    """Moves a tensor from one placement to another among the ranks of a group."""

    def __init__(self, source: Placement, target: Placement, group: dist.ProcessGroup | None, *, width: int) -> None:
        super().__init__()
        self.source, self.target, self.group, self.width = source, target, group, width

    def forward(self, value: Tensor) -> Tensor:
        """Move a tensor, and in the backward its gradient the other way round."""
        return _Moved.apply(value, self)

    def extra_repr(self) -> str:
        """Return both placements."""
        return f"{self.source} -> {self.target}"

    def moved(self, value: Tensor, source: Placement, target: Placement) -> Tensor:
        """Move values: sums over ranks and parts of them put together, then what the target has of that."""
        rank = dist.get_rank(self.group)
        ranks = dist.get_world_size(self.group)
        if source == target or (source in _SAME and target in _SAME):
            return value
        if isinstance(source, Shard) and target is PARTIAL:
            whole = value.new_zeros([*value.shape[: source.dim], self.width, *value.shape[source.dim + 1 :]])
            return whole.index_copy(source.dim, _indices(source, rank, ranks, value.device), value)
        if source is PARTIAL and isinstance(target, Shard):
            parts = [value.index_select(target.dim, _indices(target, n, ranks, value.device)) for n in range(ranks)]
            result = torch.empty_like(parts[0])
            dist.reduce_scatter(result, parts, group=self.group)
            return result
        if isinstance(source, Shard):
            value = self._gathered(value, source)
        elif source is PARTIAL:
            value = value.contiguous().clone()
            dist.all_reduce(value, group=self.group)
        if isinstance(target, Shard):
            return value.index_select(target.dim, _indices(target, rank, ranks, value.device))
        if target is PARTIAL:
            return value if rank == 0 else torch.zeros_like(value)
        return value

    def _gathered(self, value: Tensor, source: Shard) -> Tensor:
        ranks = dist.get_world_size(self.group)
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, value.contiguous(), group=self.group)
        if source.plain:
            return torch.cat(parts, source.dim)
        order = torch.cat([_indices(source, rank, ranks, value.device) for rank in range(ranks)])
        return torch.cat(parts, source.dim).index_select(source.dim, order.argsort())


_SAME = (REPLICATED, COPIED)


def _indices(shard: Shard, rank: int, ranks: int, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in shard.indices(rank, ranks)])


def local_part(tensor: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a whole tensor."""
    if not isinstance(placement, Shard):
        return tensor
    return tensor.index_select(placement.dim, _indices(placement, rank, ranks, tensor.device))


def _of_gradient(placement: Placement) -> Placement:
    """Return how the gradient of a value lies; see :mod:`autosplit.tensor.ways`."""
    if placement is COPIED:
        return PARTIAL
    return REPLICATED if placement is PARTIAL else placement


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, move: Move) -> Tensor:
        ctx.move = move
        moved = move.moved(value, move.source, move.target)
        return moved.view_as(moved) if moved is value else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        move: Move = ctx.move
        return move.moved(gradient, _of_gradient(move.target), _of_gradient(move.source)), None
