"""How far apart two tensors are, and how far rounding takes them.

             float64  float32  float16  bfloat16   explained by
ROUNDING     1e-12    1e-5     5e-3     4e-2       another kernel; a sum over microbatches
REORDERED    1e-9     1e-3     3e-2     5e-2       another number of rows, another order of all additions

Differences are shares of the largest value of the expected tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
REORDERED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 5e-2}
_OTHER_DEVICES = 1e-6
"""The same kernel on the same values, where it adds in no fixed order."""
_SMALLEST = 1e-9
"""The smallest scale of a tensor: what is far below it is rounding of larger values."""


def tolerance(table: Mapping[torch.dtype, float], *dtypes: torch.dtype) -> float:
    """Return a table's entry for the least precise of some dtypes, with autocast's where it is on; 0 for integers."""
    low = [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return max(table.get(dtype, 0.0) for dtype in (*(dtype.to_real() for dtype in dtypes), *low))


@dataclass(frozen=True)
class Difference:
    """The largest difference as a share of the largest expected value; infinity and what differs where it is none."""

    share: float
    detail: str = ""


def difference(actual: torch.Tensor, expected: torch.Tensor, *, floor: float = _SMALLEST) -> Difference:
    """Compare two tensors; ``floor`` is the smallest value that a difference is measured against.

    NaNs and infinities are equal to themselves, and have to be in the same places.
    """
    if (actual.shape, actual.dtype, actual.layout) != (expected.shape, expected.dtype, expected.layout):
        return Difference(math.inf, f"{kind_of(actual)} instead of {kind_of(expected)}")
    if actual.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    if torch.equal(actual, expected):
        return Difference(0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        return Difference(math.inf, f"{int((actual != expected).sum())} of {expected.numel()} entries differ")
    actual, expected = _real(actual), _real(expected)
    apart = float((actual - expected).abs().max())
    if not math.isfinite(apart):
        outside = ~(actual.isfinite() & expected.isfinite())
        if not torch.equal(actual[outside].nan_to_num(0.5), expected[outside].nan_to_num(0.5)):
            return Difference(math.inf, "infinities or NaNs are not where the plain model's are")
        actual, expected = actual.masked_fill(outside, 0), expected.masked_fill(outside, 0)
        apart = float((actual - expected).abs().max())
    return Difference(apart / max(float(expected.abs().max()), floor))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two results of one kernel for equal values are equal."""
    return difference(actual, expected).share <= (0.0 if actual.device.type == "cpu" else _OTHER_DEVICES)


def same_rounded(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two results of equal values are equal, in whatever groups they were computed."""
    return difference(actual, expected).share <= tolerance(ROUNDING, actual.dtype)


def same_reordered(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two results are equal up to another order of additions."""
    return difference(actual, expected).share <= tolerance(REORDERED, actual.dtype)


def kind_of(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.float() if real.dtype in (torch.float16, torch.bfloat16) else real
