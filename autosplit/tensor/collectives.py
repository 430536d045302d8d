"""The moves between states of a value as modules: what a rank does forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.tensor.axes import Shard
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED, Whole

Placement = Whole | Shard
"""How a tensor lies on the ranks."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that share tensors.

    Attributes:
        rank: this one.
        ranks: how many they are.
        group: their process group; None: the default one.
        waiting: entered around each collective.
        alone: nothing is sent, and values are of the right sizes only: for what a rank computes by itself.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    alone: bool = False

    def added(self, value: Tensor) -> Tensor:
        """Return the sum of all ranks' values."""
        total = value.contiguous().clone()
        if not self.alone:
            with self.waiting():
                dist.all_reduce(total, group=self.group)
        return total

    def gathered(self, value: Tensor) -> list[Tensor]:
        """Return the values of all ranks."""
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        if not self.alone:
            with self.waiting():
                dist.all_gather(parts, value.contiguous(), group=self.group)
        return parts

    def scattered(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of what all ranks have for this one."""
        total = torch.empty_like(parts[0])
        if not self.alone:
            with self.waiting():
                dist.reduce_scatter(total, parts, group=self.group)
        return total


class Move(nn.Module):
    """Moves a tensor from one placement to another among the ranks that share it."""

    def __init__(self, source: Placement, target: Placement, sharing: Sharing, *, width: int) -> None:
        """``width``: the size of the dimension that is sharded."""
        super().__init__()
        self.source, self.target, self.sharing, self.width = source, target, sharing, width

    def forward(self, value: Tensor) -> Tensor:
        """Move a tensor, and in the backward its gradient the other way round."""
        return _Moved.apply(value, self)

    def extra_repr(self) -> str:
        """Return both placements."""
        return f"{self.source} -> {self.target}"

    def moved(self, value: Tensor, source: Placement, target: Placement) -> Tensor:
        """Move values: sums over ranks and parts of them put together, then what the target has of that."""
        sharing = self.sharing
        rank, ranks = sharing.rank, sharing.ranks
        if source == target or (source in _SAME and target in _SAME):
            return value
        if isinstance(source, Shard) and target is PARTIAL:
            whole = value.new_zeros([*value.shape[: source.dim], self.width, *value.shape[source.dim + 1 :]])
            return whole.index_copy(source.dim, _indices(source, rank, ranks, value.device), value)
        if source is PARTIAL and isinstance(target, Shard):
            return sharing.scattered([local_part(value, target, n, ranks) for n in range(ranks)])
        if isinstance(source, Shard):
            value = put_together(sharing.gathered(value), source)
        elif source is PARTIAL:
            value = sharing.added(value)
        if isinstance(target, Shard):
            return local_part(value, target, rank, ranks)
        if target is PARTIAL:
            return value if rank == 0 else torch.zeros_like(value)
        return value


_SAME = (REPLICATED, COPIED)


def _indices(shard: Shard, rank: int, ranks: int, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in shard.indices(rank, ranks)])


def put_together(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the whole of all ranks' parts."""
    whole = torch.cat([*parts], shard.dim)
    if shard.plain:
        return whole
    order = torch.cat([_indices(shard, rank, len(parts), whole.device) for rank in range(len(parts))])
    return whole.index_select(shard.dim, order.argsort())


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
