"""What operations give on the meta device, worked out once per kind of operands.

Most of torch's kernels for the meta device are Python and take a tenth of a millisecond or more; the blocks of a large
model ask them the same again and again. What a kernel makes of new memory follows from the kinds of its operands alone:

    func, shapes, strides, dtypes, numbers  ─► seen? ─► an empty tensor of the known shape, strides and dtype
                                            └► no   ─► the kernel itself; known from now on if its result is new memory

Views, in-place operations, what draws random numbers and what is no operation of torch's own run as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.shape_rules import New, new_tensor

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_OTHER = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


_VIEW, _UNSAFE_VIEW = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default


class _Made(NamedTuple):
    """A tensor that an operation makes, and whether the result is a tuple of such."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Unknown(Exception):
    """An operand is not of a kind that tells all."""


class MetaKernels(TorchDispatchMode):
    """Runs operations; those of which the result is known are not run. One object serves one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, tuple[_Made | None, ...]] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` gives."""
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = _makes_new(func)
        if func is _UNSAFE_VIEW:
            return _VIEW(*args, **kwargs)  # the same memory, without the detour through Python
        if not makes_new:
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _kinds(args), _kinds(kwargs.items()) if kwargs else ())
        except _Unknown:
            return func(*args, **kwargs)
        found = self._known.get(key, _UNSEEN)
        if found is _UNSEEN and (new := new_tensor(func, args, kwargs)) is not None:
            found = self._known[key] = _contiguous(new)
        if found is _UNSEEN:
            out = func(*args, **kwargs)
            self._known[key] = _made(out, args, kwargs)
            return out
        if found is None:
            return func(*args, **kwargs)
        several, parts = found
        made = tuple(None if p is None else torch.empty_strided(*p[:2], dtype=p.dtype, device="meta") for p in parts)
        return made if several else made[0]


_UNSEEN: Any = object()


def _makes_new(func: Any) -> bool:
    """Tell whether an operation is one of torch's own that says that it neither changes nor returns its operands."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and not any(tag in func.tags for tag in _OTHER)
        and not any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
        and all(str(value.type) == "Tensor" for value in schema.returns)
        and bool(schema.returns)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _kinds(values: Any) -> tuple[Any, ...]:
    """Return all that a kernel for the meta device can see of its operands."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            if not value.is_meta or value.layout is not torch.strided or value.is_neg() or value.is_conj():
                raise _Unknown
            found.append((value.shape, value.stride(), value.storage_offset(), value.dtype))
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind is list or kind is tuple:
            found.append(_kinds(value))
        else:
            raise _Unknown
    return tuple(found)


def _contiguous(new: New) -> tuple[bool, tuple[_Made | None, ...]]:
    """Return a new contiguous tensor as what an operation made."""
    strides = torch.empty(new.shape, device="meta").stride()
    return False, (_Made(new.shape, strides, new.dtype),)


def _made(out: Any, args: Any, kwargs: Any) -> tuple[bool, tuple[_Made | None, ...]] | None:
    """Return what an operation made; None where an empty tensor would not be the same."""
    parts = out if isinstance(out, tuple) else (out,)
    taken = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
    found = []
    for part in parts:
        if type(part) is not torch.Tensor or not part.is_meta or part.layout is not torch.strided:
            return None
        storage = part.untyped_storage()
        shape, strides = tuple(part.shape), tuple(part.stride())
        fresh = torch.empty_strided(shape, strides, dtype=part.dtype, device="meta")
        if storage._cdata in taken or part.storage_offset() or fresh.untyped_storage().nbytes() != storage.nbytes():
            return None
        if part.is_neg() or part.is_conj():
            return None
        taken.add(storage._cdata)
        found.append(_Made(shape, strides, part.dtype))
    return isinstance(out, tuple), tuple(found)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
