"""The two halves of a reduction over the batch: what every row gives, and what makes the whole value of that.

    value [rows * k, ...] ─► sum_rows(value) [rows, 1, ...] ─► total(...)          rows: per microbatch; total: once

In ``dims`` the batch dimension is one of the reduced ones. A row's part keeps them all with size 1, the batch dimension
with one entry per row, so that the same ``dims`` reduce it further. All functions are importable by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autosplit.trace.reductions.losses import class_weights


def sum_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sum over all of ``dims`` but the rows."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.sum(inner, keepdim=True, dtype=dtype).squeeze(batch_dim + 1)


def mean_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Average over all of ``dims`` but the rows; all rows have equally many values."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.mean(inner, keepdim=True, dtype=dtype).squeeze(batch_dim + 1)


def batch_mean_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sum over all of ``dims`` but the first; average over the entries of that one that belong to one row."""
    return sum_rows(value, rows, batch_dim, dims, dtype) / (value.shape[0] // rows)


def weigh_rows(
    each: Tensor,
    target: Tensor,
    rows: int,
    batch_dim: int,
    ignore_index: int,
    dtype: torch.dtype,
    weight: Tensor | None,
) -> Tensor:
    """Return ``[rows, 2]``: the sum of each row's losses, and what torch's mean divides by.

    That is the number of targets that are not ignored, or the sum of their class weights.
    """
    counts = class_weights(target, ignore_index, weight)
    dims = tuple(range(each.dim()))
    sums = [sum_rows(value, rows, batch_dim, dims, dtype).reshape(rows) for value in (each, counts)]
    return torch.stack(sums, -1)


def total(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Add up what the rows gave."""
    return parts.sum(dims, keepdim=keepdim).to(dtype)


def average(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Average the rows' averages: all rows have equally many values."""
    return parts.mean(dims, keepdim=keepdim).to(dtype)


def ratio(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the sum of the first column by the sum of the second."""
    return (parts[:, 0].sum() / parts[:, 1].sum(dtype=torch.float64)).to(dtype)


def _by_row(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Split the batch dimension into rows and what belongs to one row; return also what to reduce then."""
    parts = value.unflatten(batch_dim, (rows, value.shape[batch_dim] // rows))
    return parts, [dim + (dim > batch_dim) for dim in dims if dim != batch_dim] + [batch_dim + 1]
