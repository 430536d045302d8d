"""Facts of an input besides its shape, dtype and values that a forward may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Layout = tuple[int, ...] | str | None
GAPS = "gaps"


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the order of a tensor's dimensions in memory; None: it is contiguous, `GAPS`: it is not dense."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else GAPS


def empty_in_layout(layout: Layout, shape: Sequence[Any], **options: Any) -> torch.Tensor:
    """Return an empty tensor whose memory has a layout of `layout_of`."""
    if layout is None:
        return torch.empty(shape, **options)
    if isinstance(layout, str):
        return torch.empty([*shape, 2], **options)[..., 0]
    permuted = torch.empty([shape[dim] for dim in layout], **options)
    return permuted.permute([layout.index(dim) for dim in range(len(layout))])


def one_tensor(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each leaf the position of the first leaf that is the same tensor; its own for other values."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), position) if isinstance(leaf, torch.Tensor) else position
        for position, leaf in enumerate(leaves)
    )
