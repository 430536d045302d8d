"""Shapes of results where torch's own shape functions refuse what its kernels take.

Tried on torch 2.13: ``_grouped_mm`` on meta and fake tensors takes bfloat16 only, though the kernels take other floats;
``histc`` of integers on fake CPU tensors asks the CPU's kernel, though CUDA has one. ``bincount`` has as many counts as
its largest value says: a graph holds where ``minlength`` is enough for all values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPED_MM, _HISTC = torch.ops.aten._grouped_mm.default, torch.ops.aten.histc.default
_BINCOUNT = torch.ops.aten.bincount.default
_GROUPED = frozenset((torch.float32, torch.bfloat16, torch.float16))
_COUNTED = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))


class New(NamedTuple):
    """A new contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def new_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> New | None:
    """Return the new tensor that an operation gives; None: torch works it out."""
    if func is _GROUPED_MM:
        return _grouped_mm(args, kwargs)
    if func is _BINCOUNT:
        return _counts(*args, **kwargs)
    return _histogram(args, kwargs) if func is _HISTC else None


def bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Count integers as `torch.bincount` does; raise RuntimeError where ``minlength`` is not enough for all of them."""
    counts = torch.bincount(input, weights, minlength)
    if len(counts) != minlength:
        raise RuntimeError(
            f"bincount has {len(counts)} counts where minlength={minlength} was recorded: a graph has a fixed number; "
            "pass a minlength= above all values"
        )
    return counts


def ruled(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the result of an operation on tensors without values by a rule; None where torch works it out."""
    if func not in (_GROUPED_MM, _HISTC, _BINCOUNT):
        return None
    if not (isinstance(args[0], FakeTensor) or args[0].is_meta):
        return None
    new = new_tensor(func, args, kwargs)
    return None if new is None else args[0].new_empty(new.shape, dtype=new.dtype)


class ShapeRules(TorchDispatchMode):
    """Applies the rules to all operations that run inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = ruled(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if answer is None else answer


def _grouped_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> New | None:
    """Products of groups of rows."""
    left, other, *rest = args
    groups = (rest[0] if rest else kwargs.get("offs")) if left.dim() == other.dim() == 2 else None
    if left.dtype is not other.dtype or left.dtype not in _GROUPED or len(rest) > 1 or kwargs.keys() - {"offs"}:
        return None
    leads = ((len(groups),) if groups is not None else ()) if left.dim() == other.dim() == 2 else left.shape[:-2]
    rows, width = left.shape[-2], other.shape[-1]
    return New((*(leads if other.dim() == left.dim() else ()), rows, width), left.dtype)


def _histogram(args: Sequence[Any], kwargs: Mapping[str, Any]) -> New | None:
    """Counts in the values' own dtype."""
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    return New((bins,), args[0].dtype) if args[0].dtype in _COUNTED and bins > 0 else None


def _counts(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> New | None:
    """Counts of integers below ``minlength``, or sums of their weights."""
    floats = torch.float32 if weights is not None and weights.dtype is torch.float32 else torch.float64
    return New((minlength,), torch.int64 if weights is None else floats) if minlength else None
