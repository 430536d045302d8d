"""What a rank holds of a sharded parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.errors import InputError
from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Sharing, local_part, put_together


@dataclass(frozen=True)
class ShardLayout:
    """How replicas share out a tensor: all of a DTensor but its elements.

    Attributes:
        mesh, placements: which replicas have which shards.
        size, stride: of all shards together.
    """

    mesh: Any
    placements: Any
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: DTensor) -> ShardLayout:
        """Return that of a DTensor."""
        return ShardLayout(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def around(self, shard: Tensor) -> DTensor:
        """Return the DTensor of which this replica has a shard."""
        layout: dict[str, Any] = {"shape": self.size, "stride": self.stride}
        return DTensor.from_local(shard, self.mesh, self.placements, run_check=False, **layout)


@dataclass(frozen=True)
class Part:
    """Which part of a whole tensor a rank holds.

    Attributes:
        shard: how the tensor is cut.
        size: that of the whole.
        sharing: the ranks that share it.
        layout: how replicas share out the part, of which this rank holds a shard; None: it holds all of the part.
    """

    shard: Shard
    size: torch.Size
    sharing: Sharing
    layout: ShardLayout | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor."""
        local, layout = local_part(whole, self.shard, self.sharing.rank, self.sharing.ranks), self.layout
        if layout is None:
            return local
        return distribute_tensor(local, layout.mesh, layout.placements, src_data_rank=None).to_local()

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor; all ranks that share it call it."""
        local = local.detach() if self.layout is None else self.layout.around(local.detach()).full_tensor()
        return put_together(self.sharing.gathered(local), self.shard)

    def offsets(self, local: Tensor) -> tuple[int, ...]:
        """Return where what this rank holds begins in the part, by dimension."""
        if self.layout is None:
            return (0,) * local.dim()
        (chunk,) = self.layout.around(local.detach()).__create_chunk_list__()
        return tuple(chunk.offsets)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(begin in the whole, begin here, length)`` of each run of elements along the sharded dimension."""
        here = 0
        for run in self.shard.indices(self.sharing.rank, self.sharing.ranks):
            yield run.start, here, len(run)
            here += len(run)


PARTS: Any = WeakIdKeyDictionary()
"""The part that each sharded parameter holds."""


def size_of(tensor: Tensor) -> torch.Size:
    """Return the size of the whole tensor of which a parameter, or an entry of a state, is a part."""
    piece = PARTS.get(tensor)
    return tensor.size() if piece is None else piece.size


def refuse_parts(model: nn.Module) -> InputError | None:
    """Return an error where parameters of a model hold a rank's part: what is computed from them is none of its own."""
    parted = next((name for name, parameter in model.named_parameters() if parameter in PARTS), None)
    if parted is None:
        return None
    return InputError(f"{parted!r} holds this rank's part for another pipe; call unsplit() of that pipe first")
