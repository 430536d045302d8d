"""Operations on fake tensors whose results are known from an equal call: their shapes are told again, not worked out.

``FakeTensorMode`` keeps such a memory of its own, whose keys cost as much as the operation; a trace asks for the same
few hundred calls ten thousand times. An equal call is the same operation on tensors of equal shapes, strides, offsets
and types, with equal other arguments. Its results are new tensors, or views of the arguments that they were views of.

Private torch API, used in this file only, tried on torch 2.13: ``FakeTensor`` and its mode, of which torch has no
public names, and ``torch._C._DisableTorchDispatch``, under which a meta tensor is made without asking the modes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_UNKNOWN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@dataclass(frozen=True)
class _Result:
    """One result: the argument, or the result before it, that it is or is a view of, by number; and its looks.

    Arguments come first; -1 stands for none.
    """

    same: bool
    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class QuickFake:
    """Runs operations on fake tensors, each kind of call once; what is known of one mode's tensors holds for any's."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._attributes: dict[str, Any] = {}
        self._known: dict[Hashable, tuple[type | None, tuple[_Result | None, ...]] | None] = {}
        self._suited: dict[Any, bool] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operation returns."""
        if func is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args, **kwargs)
        if func not in self._suited:
            self._suited[func] = _is_suited(func)
        tensors: list[FakeTensor] = []
        key = _key(func, args, kwargs, tensors) if self._suited[func] else None
        if key is None or not tensors:
            return func(*args, **kwargs)
        if key not in self._known:
            out = func(*args, **kwargs)
            untouched = key == _key(func, args, kwargs, [])
            self._known[key] = _results(func, out, tensors) if untouched else None
            return out
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        kind, results = known
        sources: list[Any] = [*tensors]
        for result in results:
            sources.append(None if result is None else self._made(result, sources))
        return sources[-1] if kind is None else kind(sources[len(tensors) :])

    def _made(self, result: _Result, sources: Sequence[Any]) -> Any:
        if result.same:
            return sources[result.source]
        guard = torch._C._DisableTorchDispatch()
        empty = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=_META)
        if result.source >= 0:
            storage = sources[result.source].untyped_storage()
            empty.set_(storage, result.offset, result.shape, result.strides)
        mode = sources[0].fake_mode
        if self._mode is not mode:
            self._mode, self._attributes = mode, dict(vars(FakeTensor(mode, empty, _CPU)))
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        del guard
        vars(made).update(self._attributes)  # all that the constructor would set, which takes its time over it
        return made


def blank(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor on the CPU that looks like a tensor, on a storage of its own; a parameter for one."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    twin = FakeTensor(mode, empty, _CPU, requires_grad=tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        twin._is_param = True  # what makes isinstance(twin, Parameter) true, as torch's own conversion does
    return twin


def _is_suited(func: Any) -> bool:
    """Tell whether results follow from what the arguments look like, and are views only where the operation says so."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    if any(tag in func.tags for tag in _UNKNOWN_TAGS) or func._schema.name.startswith("aten::lift"):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return not (func.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite))


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[FakeTensor]) -> Hashable:
    """Return what tells equal calls, and fill ``tensors``; None where an argument is of an unknown kind."""
    parts: list[Any] = [func]
    if not _tell(args, parts, tensors):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _tell((value,), parts, tensors):
            return None
    return tuple(parts)


def _tell(values: Sequence[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.layout is not torch.strided or value.dtype.is_complex or value.constant is not None:
                return False
            tensors.append(value)
            parts.extend((value.shape, value.stride(), value.storage_offset(), value.dtype))
        elif kind in (list, tuple):
            parts.extend((kind, len(value)))
            if not _tell(value, parts, tensors):
                return False
        elif kind in _PLAIN:
            parts.extend((kind, value))
        else:
            return False
    return True


def _results(
    func: Any, out: Any, tensors: Sequence[FakeTensor]
) -> tuple[type | None, tuple[_Result | None, ...]] | None:
    """Return how to make the results of equal calls; None where that is not known."""
    kind = type(out) if isinstance(out, (list, tuple)) else None
    if kind not in (None, list, tuple):
        return None
    sources: list[Any] = [*tensors]
    found: list[_Result | None] = []
    for value in out if kind is not None else (out,):
        result = None if value is None else _result(func, value, sources)
        if result is None and value is not None:
            return None
        sources.append(value)
        found.append(result)
    return kind, tuple(found)


def _result(func: Any, value: Any, sources: Sequence[Any]) -> _Result | None:
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return None
    if value.fake_device != _CPU or value.dtype.is_complex:
        return None
    look = tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype
    for number, source in enumerate(sources):
        if source is value:
            return _Result(True, number, *look)
    storage = value.untyped_storage()
    for number, source in enumerate(sources):
        if source is not None and source.untyped_storage()._cdata == storage._cdata:
            return _Result(False, number, *look) if func.is_view or func is _UNSAFE_VIEW else None
    plain = _bytes(look[0], look[1], value.element_size()) == storage.nbytes() and not look[2]
    return _Result(False, -1, *look) if plain else None


def _bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return what ``torch.empty_strided`` allocates."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * item_bytes
