"""Which row each entry of a tensor belongs to.

A tensor is a *stack* when its batch dimension holds the rows one after the other, each with the same number of
entries. Views and permutations leave that order and come back to it:

    [S, B, D] ──reshape──► [S * B, D]   entry i belongs to row i % B
              ◄─reshape──               a stack again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.trace.graph import TensorInfo


@dataclass(frozen=True)
class RowMap:
    """The row of each entry along a tensor's batch dimension."""

    dim: int
    rows: tuple[int, ...]

    @classmethod
    def stack(cls, dim: int, size: int, rows: int) -> RowMap:
        """Return the layout of a stack of ``rows`` rows."""
        return cls(dim, tuple(entry * rows // size for entry in range(size)))

    @classmethod
    def of(cls, numbers: torch.Tensor, info: TensorInfo, rows: int) -> RowMap | None:
        """Return the layout of a tensor of row numbers; None where rows do not lie along the batch dimension alone."""
        dim = info.batch_dim
        if dim is None:
            return None
        if not numbers.numel():
            return cls.stack(dim, numbers.shape[dim], rows)
        others = [d for d in range(numbers.dim()) if d != dim]
        least, most = (numbers.amin(others), numbers.amax(others)) if others else (numbers, numbers)
        row_numbers = tuple(least.tolist())
        entries = Counter(row_numbers)
        evenly = all(entries[row] * rows == len(row_numbers) for row in range(rows))
        return cls(dim, row_numbers) if evenly and torch.equal(least, most) else None

    @property
    def is_stack(self) -> bool:
        """Whether the rows follow each other."""
        return all(a <= b for a, b in zip(self.rows, self.rows[1:], strict=False))

    def select(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        """Return a row's entries of a tensor."""
        return tensor.index_select(self.dim, self._entries(row, tensor.device))

    def put(self, tensor: torch.Tensor, row: int, entries: torch.Tensor) -> torch.Tensor:
        """Write entries to the places of a row in a tensor, and return that."""
        return tensor.index_copy_(self.dim, self._entries(row, tensor.device), entries)

    def _entries(self, row: int, device: torch.device) -> torch.Tensor:
        return torch.tensor([entry for entry, owner in enumerate(self.rows) if owner == row], device=device)

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return row numbers in the shape of a tensor."""
        shape = [1] * tensor.dim()
        shape[self.dim] = len(self.rows)
        return torch.tensor(self.rows, dtype=torch.int32, device=tensor.device).reshape(shape).expand(tensor.shape)

    def after(self, dim: int, size: int) -> RowMap | None:
        """Return the layout of a result with this batch dimension, computed entry by entry; None for another size."""
        if size % len(self.rows):
            return None
        return RowMap(dim, tuple(row for row in self.rows for _ in range(size // len(self.rows))))


def from_layout(
    tensor: torch.Tensor, few: RowMap | None, many: RowMap | None, rows: int, sources: Sequence[int]
) -> torch.Tensor:
    """Return the given rows of a tensor on ``rows`` rows, laid out as ``many``; without a layout, a copy."""
    if few is None or many is None:
        return tensor.clone()
    by_row = torch.tensor(few.rows).argsort(stable=True).reshape(rows, len(few.rows) // rows)
    places = torch.tensor(many.rows).argsort(stable=True)
    entries = torch.empty_like(places).index_copy_(0, places, by_row[list(sources)].reshape(-1))
    return tensor.index_select(few.dim, entries.to(tensor.device))


def from_sources(tensor: torch.Tensor, dim: int | None, rows: int, sources: Sequence[int]) -> torch.Tensor:
    """Return a stack of the given rows of a stack of rows; without a batch dimension, a copy."""
    if dim is None:
        return tensor.clone()
    size = tensor.shape[dim] // rows
    entries = [row * size + entry for row in sources for entry in range(size)]
    return tensor.index_select(dim, torch.tensor(entries, dtype=torch.long, device=tensor.device))
