"""Shapes of results where torch's own shape functions refuse what its kernels take.

Tried on torch 2.13: ``_grouped_mm`` on meta and fake tensors takes bfloat16 only, though the kernels take other floats;
``histc`` of integers on fake CPU tensors asks the CPU's kernel, though CUDA has one. ``bincount`` has as many counts as
its largest value says: a graph holds where ``minlength`` is enough for all values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.trace.inputs.objects import storage_key, tensors_in

_GROUPED_MM, _HISTC = torch.ops.aten._grouped_mm.default, torch.ops.aten.histc.default
_BINCOUNT = torch.ops.aten.bincount.default
_RULED = frozenset((_GROUPED_MM, _HISTC, _BINCOUNT))
_GROUPED = frozenset((torch.float32, torch.bfloat16, torch.float16))
_PLAIN = (torch.Tensor, torch.nn.Parameter)
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


class ShapeRules:
    """Runs operations: on tensors without values by the rules, on meta as one like it went: equal layers ask the same.

    Torch works shapes on meta out in Python, which takes longer than all else in a recording.
    """

    def __init__(self) -> None:
        self._results: dict[Any, list[tuple[Any, ...]]] = {}
        """Shapes, strides and dtypes of what operations give, by what they are and are given."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that draws no random numbers."""
        if func in _RULED and (isinstance(args[0], FakeTensor) or args[0].is_meta):
            new = new_tensor(func, args, kwargs)
            return func(*args, **kwargs) if new is None else args[0].new_empty(new.shape, dtype=new.dtype)
        if not _makes_new(func):
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), *map(_form, args), *((k, _form(v)) for k, v in kwargs.items())
            known = self._results.get(key)
        except TypeError:  # there are values, or what cannot be a key
            return func(*args, **kwargs)
        if known is not None:
            alike = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for dtype, shape, strides in known]
            return tuple(alike) if len(func._schema.returns) > 1 else alike[0]
        out = func(*args, **kwargs)
        outs = out if isinstance(out, tuple) else (out,)
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        if given.isdisjoint(map(storage_key, outs)):  # some operations give back what they are given
            with contextlib.suppress(TypeError):
                self._results[key] = [*map(_form, outs)]
        return out


@functools.cache
def _makes_new(func: Any) -> bool:
    """Tell whether an operation of torch's own gives new tensors only, whose shapes hang on no values."""
    schema = func._schema
    own = func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
    aliases = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return own and bool(schema.returns) and not aliases and all(str(r.type) == "Tensor" for r in schema.returns)


def _form(value: Any) -> Any:
    """Return what tells an argument from others; raise TypeError for a tensor that is not plain, or not on meta."""
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or not value.is_meta or value.layout is not torch.strided or value.is_complex():
            raise TypeError
        return value.dtype, value.shape, value.stride()
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


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
