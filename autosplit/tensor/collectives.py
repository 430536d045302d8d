"""The moves between states of a value as modules: what a rank does forward and backward."""

from __future__ import annotations

from collections.abc import Callable
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
        waiting: entered around each collective, outside of compiled code.
        alone: nothing is sent, and values are of the right sizes only: for what a rank computes by itself.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    alone: bool = False

    def added(self, value: Tensor, how: str = "sum") -> Tensor:
        """Return the sum of all ranks' values, or their "max"."""
        return value.clone() if self.alone else self._sent("all_reduce", value, how)

    def gathered(self, value: Tensor) -> Tensor:
        """Return the values of all ranks, stacked."""
        if self.alone:
            return value.new_empty((self.ranks, *value.shape))
        return self._sent("all_gather_into_tensor", value.unsqueeze(0), self.ranks)

    def scattered(self, parts: Tensor) -> Tensor:
        """Return the sum of what all ranks have for this one, of a stack for all ranks."""
        return parts[0] if self.alone else self._sent("reduce_scatter_tensor", parts, "sum", self.ranks).squeeze(0)

    def exchanged(self, parts: Tensor) -> Tensor:
        """Return what each rank has for this one, stacked, of a stack for all ranks."""
        each = [1] * self.ranks
        return parts if self.alone else self._sent("all_to_all_single", parts, each, each)

    def _sent(self, kind: str, value: Tensor, *options: Any) -> Tensor:
        with nullcontext() if torch.compiler.is_compiling() else self.waiting():
            return send(self.group, kind, value.contiguous(), *options)


def send(group: dist.ProcessGroup | None, kind: str, value: Tensor, *options: Any) -> Tensor:
    """Run a functional collective of torch, which its compiler takes into graphs, and wait for what it gives."""
    operations, group = torch.ops._c10d_functional, group or dist.group.WORLD
    assert group is not None
    result: Tensor = operations.wait_tensor(getattr(operations, kind)(value, *options, group.group_name))
    return result


class Move(nn.Module):
    """Moves a tensor from one placement to another among the ranks that share it."""

    def __init__(self, source: Placement, target: Placement, sharing: Sharing) -> None:
        super().__init__()
        self.source, self.target, self.sharing = source, target, sharing

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
            zeros = value.new_zeros((1, *value.shape))
            before, behind = zeros.expand(rank, *value.shape), zeros.expand(ranks - rank - 1, *value.shape)
            return put_together(torch.cat((before, value.unsqueeze(0), behind)), source)
        if isinstance(target, Shard) and isinstance(source, Shard):
            return put_together(sharing.exchanged(_all_parts(value, target, ranks)), source)
        if isinstance(target, Shard) and source is PARTIAL:
            return sharing.scattered(_all_parts(value, target, ranks))
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


def _pieces(tensor: Tensor, shard: Shard, ranks: int) -> list[Tensor]:
    """Return views of a whole tensor in which the sharded dimension is three: pieces, ranks, elements."""
    groups = tensor.split([count * length for count, length in shard.pieces], shard.dim)
    counts = [count for count, _ in shard.pieces]
    return [group.unflatten(shard.dim, (count, ranks, -1)) for group, count in zip(groups, counts, strict=True)]


def local_part(tensor: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """Return a copy of a rank's part of a whole tensor; one that is not sharded is returned itself."""
    if not isinstance(placement, Shard):
        return tensor
    dim = placement.dim
    parts = [piece.select(dim + 1, rank).flatten(dim, dim + 1) for piece in _pieces(tensor, placement, ranks)]
    return torch.cat(parts, dim)


def _all_parts(tensor: Tensor, shard: Shard, ranks: int) -> Tensor:
    """Return all ranks' parts of a whole tensor, stacked."""
    dim = shard.dim + 1
    parts = [piece.movedim(dim, 0).flatten(dim, dim + 1) for piece in _pieces(tensor, shard, ranks)]
    return torch.cat(parts, dim)


def put_together(parts: Tensor, shard: Shard) -> Tensor:
    """Return the whole of all ranks' parts, which are stacked."""
    dim, ranks = shard.dim, len(parts)
    groups = parts.split([count * length // ranks for count, length in shard.pieces], dim + 1)
    pieces = [
        group.unflatten(dim + 1, (count, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)
        for group, (count, _) in zip(groups, shard.pieces, strict=True)
    ]
    return torch.cat(pieces, dim)


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
