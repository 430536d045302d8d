"""What a rank holds of a sharded parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.errors import InputError
from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Sharing, local_part, put_together


@dataclass(frozen=True)
class Part:
    """Which part of a whole tensor a rank holds.

    Attributes:
        shard: how the tensor is cut.
        size: that of the whole.
        sharing: the ranks that share it.
    """

    shard: Shard
    size: torch.Size
    sharing: Sharing

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return local_part(whole, self.shard, self.sharing.rank, self.sharing.ranks)

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor; all ranks that share it call it."""
        return put_together(self.sharing.gathered(local.detach()), self.shard)

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
