"""A rank's part of a tensor in a state, as checkpoints see it: runs of elements of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autosplit.tensor.part import Part, ShardLayout


class TensorPart(Tensor):
    """A rank's part of a tensor, in a state; ``torch.distributed.checkpoint`` saves and loads it as part of the whole.

    ``size()``, which that compares with what was saved, is the whole tensor's; ``shape`` is the part's.
    """

    part: Part
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole."""
        return self.part.size if dim is None else self.part.size[dim]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rank's elements alone."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return as_part(self.as_subclass(Tensor).clone(), self.part)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, int]]:
        """Yield the runs as chunks of the whole, and where each begins here."""
        dim, offsets, sizes = self.part.shard.dim, [*self.part.offsets(self)], [*self.shape]
        first, last = offsets[dim], offsets[dim] + sizes[dim]
        for begin, here, length in self.part.runs() if self.numel() else ():
            low, high = max(here, first), min(here + length, last)
            if low < high:
                offsets[dim], sizes[dim] = begin + low - here, high - low
                yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), low - first

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what to write of it."""
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.part.size),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what to read of it."""
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a run."""
        chunk, here = next(entry for entry in self._chunks() if entry[0].offsets == index.offset)
        dim = self.part.shard.dim
        return self.as_subclass(Tensor).narrow(dim, here, chunk.sizes[dim])


def as_part(value: Any, piece: Part | None) -> Any:
    """Return what a rank holds for a state: with its place in the whole where it is a part."""
    if piece is None or not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        value, piece = value.to_local(), replace(piece, layout=ShardLayout.of(value))
    result = value.as_subclass(TensorPart)
    result.part = piece
    return result


def without_part(value: Any) -> Any:
    """Return what an entry of a state is without its place in the whole: a tensor, or shards of one."""
    if not isinstance(value, TensorPart):
        return value
    local, layout = value.as_subclass(Tensor), value.part.layout
    return local if layout is None else layout.around(local)


def here(value: Any, piece: Part | None) -> Any:
    """Return what a rank holds of a value in a state: the whole's, or its part already."""
    if piece is None or not isinstance(value, Tensor) or isinstance(value, TensorPart):
        return value
    return piece.of(value) if value.shape == piece.size else value
