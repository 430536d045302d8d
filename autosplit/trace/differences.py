"""Two runs of a model compared, part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Allowed differences, as shares of the largest value of a tensor; sums over microbatches round in another order."""
_SMALL = 0.1
"""A gradient far below the model's largest one is rounding: it is measured against this share of that one."""
MISSING = object()
Tensors = Mapping[tuple[str, str], Any]
"""What a run left, by kind and name; tensors in host memory."""


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


def compare(run: str, actual: Tensors, plain: Tensors, tolerance: Callable[[torch.dtype], float]) -> list[Item]:
    """Compare what two runs left, part by part."""
    gradients = [t for (kind, _), t in plain.items() if kind == "gradient" and t is not None and t.numel()]
    floor = _SMALL * max((float(t.abs().max()) for t in gradients if not t.is_sparse), default=0.0)
    items = []
    for kind, name in dict.fromkeys((*plain, *actual)):
        mine, other = actual.get((kind, name), MISSING), plain.get((kind, name), MISSING)
        if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
            apart, detail = _difference(mine, other, floor if kind == "gradient" else 0.0)
            items.append(Item(run, kind, name, apart, tolerance(other.dtype), detail))
        else:
            same = mine is other or (type(mine) is type(other) and bool(mine == other))
            detail = "" if same else f"{_told(mine)} instead of {_told(other)}"
            items.append(Item(run, kind, name, 0.0 if same else math.inf, 0.0, detail))
    return items


def _difference(actual: torch.Tensor, plain: torch.Tensor, floor: float) -> tuple[float, str]:
    """Return the largest difference as a share of the largest plain value, or infinity and what differs."""
    if (actual.shape, actual.dtype, actual.layout) != (plain.shape, plain.dtype, plain.layout):
        return math.inf, f"{_told(actual)} instead of {_told(plain)}"
    if actual.layout is not torch.strided:
        actual, plain = actual.to_dense(), plain.to_dense()
    if torch.equal(actual, plain):
        return 0.0, ""
    if not (plain.is_floating_point() or plain.is_complex()):
        return math.inf, f"{int((actual != plain).sum())} of {plain.numel()} entries differ"
    if plain.is_complex():
        actual, plain = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(plain.resolve_conj())
    actual, plain = actual.double(), plain.double()
    finite = plain.isfinite()
    if not torch.equal(torch.where(finite, 0, actual).nan_to_num(0.5), torch.where(finite, 0, plain).nan_to_num(0.5)):
        return math.inf, "infinities or NaNs are not where the plain model's are"
    actual, plain = actual[finite], plain[finite]
    apart = float((actual - plain).abs().max())
    if not math.isfinite(apart):
        return math.inf, "infinities or NaNs are not where the plain model's are"
    return apart / max(float(plain.abs().max()), floor, 1e-6), ""


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else "missing" if value is MISSING else repr(value)
