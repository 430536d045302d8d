"""What is kept of a tensor in order to compare it later: its kind, and three numbers per block of its elements.

    elements   e0 e1 e2 ...  | blocks of 1024
    numbers    Σ e     Σ e·w     how many are not finite          w: fixed, different at every place in the block
    scale      |e|₂ of the block, and its share of the tensor's

Gradients and outputs of a large model are never held twice: each is digested as it arrives. A value that is wrong, or
two that changed places, move one of the sums; equal bits have equal digests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

_BLOCK = 1024
_PART = 1024 * _BLOCK


@dataclass(frozen=True, repr=False)
class Digest:
    """A tensor's kind (shape, dtype, more) and its numbers; on the meta device there are none."""

    kind: tuple[Any, ...]
    numbers: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        found: torch.dtype = self.kind[1]
        return found

    def __repr__(self) -> str:
        shape, dtype, *more = self.kind
        return " ".join((f"{str(dtype).removeprefix('torch.')}{list(shape)}", *map(str, more)))


def digest(tensor: torch.Tensor, *more: Any) -> Digest:
    """Return what is kept of a tensor; ``more`` joins its kind."""
    kind = (tuple(tensor.shape), tensor.dtype, *more)
    values = tensor.detach()
    if values.is_meta:
        return Digest(kind)
    if values.is_sparse:
        values = values.coalesce()
        parts = _parts(values.indices()) + _parts(values.values())
    else:
        parts = _parts(values if values.layout is torch.strided else values.to_dense())
    table = torch.cat(parts).to("cpu", torch.float64) if parts else torch.zeros(0, 4, dtype=torch.float64)
    share = float(table[:, 3].norm()) / math.sqrt(max(1, len(table)))
    return Digest(kind, table[:, :3].contiguous(), table[:, 3] + share)


def distance(actual: Digest, expected: Digest) -> float:
    """Return the largest difference between two digests of one kind, as a share of what the blocks hold.

    Zero means equal bits (up to chance); infinity that values are finite in one tensor only.
    """
    if actual.numbers is None or expected.numbers is None or torch.equal(actual.numbers, expected.numbers):
        return 0.0
    apart = (actual.numbers - expected.numbers).abs()
    if bool(apart[:, 2].any()):
        return math.inf
    assert expected.scale is not None
    return float((apart[:, :2].amax(1) / expected.scale.clamp(min=torch.finfo(torch.float64).tiny)).max())


def _parts(values: torch.Tensor) -> list[torch.Tensor]:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)
    return [_numbers(flat[start : start + _PART]) for start in range(0, len(flat), _PART)]


def _numbers(part: torch.Tensor) -> torch.Tensor:
    """Return sum, weighted sum, count of what is not finite, and norm of every block."""
    half = part.dtype in (torch.float16, torch.bfloat16)
    if part.dtype != torch.float32:
        part = part.to(torch.float32 if half else torch.float64)
    table = F.pad(part, (0, -len(part) % _BLOCK)).view(-1, _BLOCK)
    places = torch.arange(_BLOCK, dtype=torch.float64, device=part.device)
    weights = torch.stack((torch.ones_like(places), places.mul(1.7).add(0.3).cos()), 1).to(part.dtype)
    sums, norms = table @ weights, table.norm(dim=1, keepdim=True)
    if bool(norms.isfinite().all()):
        return torch.cat((sums, torch.zeros_like(norms), norms), 1)
    wide = table.double()
    outside = ~wide.isfinite()
    wide = torch.where(outside, 0, wide)
    count = outside.sum(1, keepdim=True).double()
    return torch.cat((wide @ weights.double(), count, wide.norm(dim=1, keepdim=True)), 1)
