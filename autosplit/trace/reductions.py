"""The two halves of a reduction over the batch: what every row gives, and what makes the whole value of that.

    value [rows * k, ...] ─► sum_rows(value) [rows, 1, ...] ─► total(...)          rows: per microbatch; total: once

In ``dims`` the batch dimension is one of the reduced ones. A row's part keeps them all with size 1, the batch dimension
with one entry per row, so that the same ``dims`` reduce it further. All functions are importable by name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def any_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> Tensor:
    """Tell whether any value of a row is true."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.any(inner, keepdim=True).squeeze(batch_dim + 1)


def all_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> Tensor:
    """Tell whether all values of a row are true."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return parts.all(inner, keepdim=True).squeeze(batch_dim + 1)


def count_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> Tensor:
    """Count the values of a row that are not zero."""
    return sum_rows(value != 0, rows, batch_dim, dims, torch.int64)


def norm_rows(
    value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype, order: float
) -> Tensor:
    """Return the vector norm of every row."""
    parts, inner = _by_row(value, rows, batch_dim, dims)
    return torch.linalg.vector_norm(parts, order, inner, keepdim=True, dtype=dtype).squeeze(batch_dim + 1)


def moment_rows(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return mean, sum of squared distances from it and number of values of every row, stacked in a last dimension."""
    parts, inner = _by_row(value.to(dtype), rows, batch_dim, dims)
    mean = parts.mean(inner, keepdim=True)
    spread = (parts - mean).square().sum(inner, keepdim=True)
    count = torch.full_like(mean, math.prod(parts.shape[dim] for dim in inner))
    return torch.stack([mean, spread, count], -1).squeeze(batch_dim + 1)


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
    counts = target != ignore_index
    if weight is not None:
        counts = weight.detach()[target.where(counts, 0)].where(counts, 0)
    dims = tuple(range(each.dim()))
    sums = [sum_rows(value, rows, batch_dim, dims, dtype).reshape(rows) for value in (each, counts)]
    return torch.stack(sums, -1)


def total(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Add up what the rows gave."""
    return parts.sum(dims, keepdim=keepdim).to(dtype)


def average(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Average the rows' averages: all rows have equally many values."""
    return parts.mean(dims, keepdim=keepdim).to(dtype)


def any_of(parts: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Tell whether any row has a true value."""
    return parts.any(dims, keepdim=keepdim)


def all_of(parts: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Tell whether all rows have true values only."""
    return parts.all(dims, keepdim=keepdim)


def norm_of(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, order: float) -> Tensor:
    """Return the norm of the rows' norms: the norm of all."""
    return torch.linalg.vector_norm(parts, order, dims, keepdim=keepdim).to(dtype)


def variance(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, correction: float) -> Tensor:
    """Return the variance from the rows' moments (Chan, Golub, LeVeque 1983): stable at large means."""
    return _variance(parts, dims, keepdim, correction).to(dtype)


def deviation(parts: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, correction: float) -> Tensor:
    """Return the standard deviation from the rows' moments; its gradient at zero is zero, as torch's is."""
    squared = _variance(parts, dims, keepdim, correction)
    zero = squared == 0
    return squared.masked_fill(zero, 1).sqrt().masked_fill(zero, 0).to(dtype)


def ratio(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the sum of the first column by the sum of the second."""
    return (parts[:, 0].sum() / parts[:, 1].sum(dtype=torch.float64)).to(dtype)


def _variance(parts: Tensor, dims: tuple[int, ...], keepdim: bool, correction: float) -> Tensor:
    means, spreads, counts = parts.unbind(-1)
    count = counts.sum(dims, keepdim=True)
    mean = (means * counts).sum(dims, keepdim=True) / count
    spread = (spreads + counts * (means - mean).square()).sum(dims, keepdim=keepdim)
    return spread / (count.reshape(spread.shape) - correction).clamp(min=0)


def _by_row(value: Tensor, rows: int, batch_dim: int, dims: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Split the batch dimension into rows and what belongs to one row; return also what to reduce then."""
    parts = value.unflatten(batch_dim, (rows, value.shape[batch_dim] // rows))
    return parts, [dim + (dim > batch_dim) for dim in dims if dim != batch_dim] + [batch_dim + 1]
