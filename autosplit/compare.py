"""Whether numbers are equal: tolerances, tensors, two runs, and digests. Serves recordings, proofs and `verify`.

             float64  float32  float16  bfloat16   explained by
ROUNDING     1e-12    1e-5     5e-3     4e-2       another kernel; a sum over microbatches
REORDERED    1e-9     1e-3     3e-2     5e-2       another number of rows, another order of all additions

Differences are shares of the largest value of the expected tensor. A digest is what is kept of a tensor in order to
compare it later: its kind, and three numbers per block of its elements.

    elements   e0 e1 e2 ...  | blocks of 1024
    numbers    Σ e     Σ e·w     how many are not finite          w: fixed, different at every place in the block
    scale      |e|₂ of the block, and its share of the tensor's

Gradients and outputs of a large model are never held twice: each is digested as it arrives. A value that is wrong, or
two that changed places, move one of the sums; equal bits have equal digests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
REORDERED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 5e-2}
_OTHER_DEVICES = 1e-6
"""The same kernel on the same values, where it adds in no fixed order."""
_SMALLEST = 1e-9
"""The smallest scale of a tensor: values far below it are rounding errors of larger ones."""
_SMALL = 0.1
"""Gradients below this share of the model's largest one are rounding errors, and compared relative to that share."""
_SMALLEST_OF_RUNS = 1e-6
_MISSING = object()
Parts = Mapping[tuple[str, str], Any]
"""What a run left, by kind and name: tensors in host memory or their digests, and other values."""
_BLOCK = 1024
_PART = 1024 * _BLOCK


def tolerance(table: Mapping[torch.dtype, float], *dtypes: torch.dtype) -> float:
    """Return a table's entry for the least precise of some dtypes, with autocast's where it is on; 0 for integers."""
    low = [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return max(table.get(dtype, 0.0) for dtype in (*(dtype.to_real() for dtype in dtypes), *low))


@dataclass(frozen=True)
class Deviation:
    """The largest difference relative to the largest expected value; infinity, with the reason, for other kinds."""

    share: float
    detail: str = ""


def difference(actual: torch.Tensor, expected: torch.Tensor, *, floor: float = _SMALLEST) -> Deviation:
    """Compare two tensors; ``floor`` is the smallest value that a difference is measured against.

    NaNs and infinities are equal to themselves, and have to be in the same places.
    """
    if (actual.shape, actual.dtype, actual.layout) != (expected.shape, expected.dtype, expected.layout):
        return Deviation(math.inf, f"{kind_of(actual)} instead of {kind_of(expected)}")
    if actual.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    if torch.equal(actual, expected):
        return Deviation(0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        return Deviation(math.inf, f"{int((actual != expected).sum())} of {expected.numel()} entries differ")
    actual, expected = _real(actual), _real(expected)
    apart = float((actual - expected).abs().max())
    if not math.isfinite(apart):
        outside = ~(actual.isfinite() & expected.isfinite())
        if not torch.equal(actual[outside].nan_to_num(0.5), expected[outside].nan_to_num(0.5)):
            return Deviation(math.inf, "infinities or NaNs are not where the plain model's are")
        actual, expected = actual.masked_fill(outside, 0), expected.masked_fill(outside, 0)
        apart = float((actual - expected).abs().max())
    return Deviation(apart / max(float(expected.abs().max()), floor))


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


# -- digests ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, repr=False)
class Digest:
    """A tensor's kind (shape, dtype, more) and its numbers; on the meta device there are none."""

    kind: tuple[Any, ...]
    numbers: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype: torch.dtype = self.kind[1]
        return dtype

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


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return sum, weighted sum, count of what is not finite, and norm of every block, whatever autocast is on."""
    with torch.autocast(tensor.device.type, enabled=False):
        return _precise_numbers(tensor)


@cache
def _weights(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    places = torch.arange(_BLOCK, dtype=torch.float64, device=device)
    return torch.stack((torch.ones_like(places), places.mul(1.7).add(0.3).cos()), 1).to(dtype)


def _precise_numbers(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    if tensor.dtype != torch.float32:
        tensor = tensor.to(torch.float32 if half else torch.float64)
    table = F.pad(tensor, (0, -len(tensor) % _BLOCK)).view(-1, _BLOCK)
    sums, norms = table @ _weights(tensor.dtype, tensor.device), table.norm(dim=1, keepdim=True)
    if bool(norms.isfinite().all()):
        return torch.cat((sums, torch.zeros_like(norms), norms), 1)
    wide = table.double()
    outside = ~wide.isfinite()
    wide = torch.where(outside, 0, wide)
    count = outside.sum(1, keepdim=True).double()
    return torch.cat((wide @ _weights(torch.float64, tensor.device), count, wide.norm(dim=1, keepdim=True)), 1)


# -- two runs, part by part ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Item:
    """One thing that was compared.

    Attributes:
        run: "train", "eval" or "train_step".
        kind: "output", "input" (as the call left it), "gradient", "buffer", "loss" or "draws".
        name: which one, by its qualified name or position.
        difference: the largest absolute difference as a share of the plain model's largest value; infinity where
            shapes, dtypes or whole numbers differ.
        tolerance: what rounding explains.
        detail: what differs where that is no number.
    """

    run: str
    kind: str
    name: str
    difference: float
    tolerance: float
    detail: str = ""

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance


def compare(run: str, actual: Parts, plain: Parts, tolerance: Callable[[torch.dtype], float]) -> list[Item]:
    """Compare what two runs left, part by part."""
    tensors = [t for (kind, _), t in plain.items() if kind == "gradient" and isinstance(t, torch.Tensor) and t.numel()]
    floor = _SMALL * max((float(t.abs().max()) for t in tensors if not t.is_sparse), default=0.0)
    items = []
    for kind, name in dict.fromkeys((*plain, *actual)):
        mine, other = actual.get((kind, name), _MISSING), plain.get((kind, name), _MISSING)
        difference = _difference(mine, other, max(floor if kind == "gradient" else 0.0, _SMALLEST_OF_RUNS))
        allowed = tolerance(other.dtype) if isinstance(other, (torch.Tensor, Digest)) else 0.0
        items.append(Item(run, kind, name, difference.share, allowed, difference.detail))
    return items


def _difference(mine: Any, other: Any, floor: float) -> Deviation:
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return difference(mine, other, floor=floor)
    if isinstance(mine, Digest) and isinstance(other, Digest) and mine.kind == other.kind:
        return Deviation(distance(mine, other))
    same = mine is other or (type(mine) is type(other) and not isinstance(mine, Digest) and bool(mine == other))
    return Deviation(0.0) if same else Deviation(math.inf, f"{_told(mine)} instead of {_told(other)}")


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return kind_of(value)
    if isinstance(value, bytes):
        return "another one"
    return "nothing" if value is None else "missing" if value is _MISSING else repr(value)
