"""Two runs of a model compared, part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.compare.digest import Digest, distance
from autosplit.compare.tensors import Difference, difference, kind_of

_SMALL = 0.1
"""A gradient far below the model's largest one is rounding: it is measured against this share of that one."""
_SMALLEST = 1e-6
_MISSING = object()
Parts = Mapping[tuple[str, str], Any]
"""What a run left, by kind and name: tensors in host memory or their digests, and other values."""


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
        found = _difference(mine, other, max(floor if kind == "gradient" else 0.0, _SMALLEST))
        allowed = tolerance(other.dtype) if isinstance(other, (torch.Tensor, Digest)) else 0.0
        items.append(Item(run, kind, name, found.share, allowed, found.detail))
    return items


def _difference(mine: Any, other: Any, floor: float) -> Difference:
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return difference(mine, other, floor=floor)
    if isinstance(mine, Digest) and isinstance(other, Digest) and mine.kind == other.kind:
        return Difference(distance(mine, other))
    same = mine is other or (type(mine) is type(other) and not isinstance(mine, Digest) and bool(mine == other))
    return Difference(0.0) if same else Difference(math.inf, f"{_told(mine)} instead of {_told(other)}")


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return kind_of(value)
    if isinstance(value, bytes):
        return "another one"
    return "nothing" if value is None else "missing" if value is _MISSING else repr(value)
