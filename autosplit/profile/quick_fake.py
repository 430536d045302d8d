"""Operations on fake tensors whose results are known from an equal call: their shapes are told again, not worked out.

``FakeTensorMode`` keeps such a memory of its own, whose keys cost as much as the operation; a trace asks for the same
few hundred calls ten thousand times. An equal call is the same operation on tensors of equal shapes, strides and types,
for views of equal offsets, with equal other arguments. Its results are new tensors, or views of the arguments that they
were views of.

Private torch API, used in this file only, tried on torch 2.11 and 2.13: ``FakeTensor`` and its mode, of which torch has
no public names, and ``torch._C._DisableTorchDispatch``, under which a meta tensor is made without asking the modes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosplit.trace.shape_rules import new_tensor

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_make = torch.Tensor._make_subclass
_UNKNOWN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


_LOOK = "_autosplit_look"
"""Under this name a tensor that was made here bears its looks, until an operation may have changed them."""


@dataclass(frozen=True, eq=False)
class _Look:
    """What a tensor looks like; one for all that look alike, so that they are compared as objects."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    anywhere: object
    """The same for all that look alike but for the offset."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One result: the argument, or the result before it, that it is or is a view of, by number; and its looks.

    Arguments come first; -1 stands for none.
    """

    same: bool
    source: int
    look: _Look


_Known = tuple[type | None, tuple[_Result | None, ...]]
"""The kind of sequence that an operation gives, None: one result; and the results."""


class QuickFake:
    """Runs operations on fake tensors, each kind of call once; what is known of one mode's tensors holds for any's."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._attributes: dict[str, Any] = {}
        self._known: dict[Hashable, _Known | None] = {}
        self._suited: dict[int, tuple[Any, bool, bool]] = {}
        """By the address of an operation, with the operation, whose own hash takes its time: whether it is suited, and
        whether its results may begin where its operands do."""
        self._looks: dict[Hashable, _Look] = {}
        self._anywhere: dict[Hashable, object] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operation returns."""
        if func is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args, **kwargs)
        place = id(func)
        if place not in self._suited:
            self._suited[place] = func, _is_suited(func), func is _UNSAFE_VIEW or getattr(func, "is_view", True)
        _, suited, views = self._suited[place]
        tensors: list[FakeTensor] = []
        parts: list[Any] = [place]
        if not suited or not self._tell_all(args, kwargs, parts, tensors, views=views) or not tensors:
            return self._worked_out(func, args, kwargs)
        key = tuple(parts)
        if key not in self._known and (new := new_tensor(func, args, kwargs)) is not None:
            strides = torch.empty(new.shape, device=_META).stride()
            self._known[key] = None, (_Result(False, -1, self._looking(new.shape, strides, 0, new.dtype)),)
        if key not in self._known:
            out = self._worked_out(func, args, kwargs)
            again: list[Any] = [place]
            untouched = self._tell_all(args, kwargs, again, [], views=views) and key == tuple(again)
            self._known[key] = self._results(func, out, tensors) if untouched else None
            return out
        known = self._known[key]
        if known is None:
            return self._worked_out(func, args, kwargs)
        kind, results = known
        sources: list[Any] = [*tensors]
        for result in results:
            sources.append(None if result is None else self._made(result, sources, tensors[0].fake_mode))
        return sources[-1] if kind is None else kind(sources[len(tensors) :])

    def _worked_out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation, which may change what its arguments look like."""
        try:
            return func(*args, **kwargs)
        finally:
            _forget((*args, *kwargs.values()))

    def _made(self, result: _Result, sources: Sequence[Any], mode: FakeTensorMode) -> Any:
        if result.same:
            return sources[result.source]
        look = result.look
        guard = torch._C._DisableTorchDispatch()
        empty = torch.empty_strided(look.shape, look.strides, dtype=look.dtype, device=_META)
        if result.source >= 0:
            storage = sources[result.source].untyped_storage()
            empty.set_(storage, look.offset, look.shape, look.strides)
        if self._mode is not mode:
            self._mode, self._attributes = mode, dict(vars(FakeTensor(mode, empty, _CPU)))
        made: FakeTensor = _make(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_CPU)
        del guard
        own = vars(made)
        own.update(self._attributes)  # all that the constructor would set, which takes its time over it
        own[_LOOK] = look
        return made

    def _tell_all(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: list[Any],
        tensors: list[FakeTensor],
        *,
        views: bool,
    ) -> bool:
        """Add what tells equal calls of an operation, and fill ``tensors``; False where an argument is unknown."""
        if not self._tell(args, parts, tensors, views):
            return False
        for name, value in kwargs.items():
            parts.append(name)
            if not self._tell((value,), parts, tensors, views):
                return False
        return True

    def _tell(self, values: Sequence[Any], parts: list[Any], tensors: list[FakeTensor], views: bool) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                look = vars(value).get(_LOOK)
                if look is None:
                    if value.layout is not torch.strided or value.dtype.is_complex or value.constant is not None:
                        return False
                    look = self._look(value)
                tensors.append(value)
                parts.append(look if views else look.anywhere)
            elif kind in (list, tuple):
                parts.extend((kind, len(value)))
                if not self._tell(value, parts, tensors, views):
                    return False
            elif kind in _PLAIN:
                parts.extend((kind, value))
            else:
                return False
        return True

    def _look(self, tensor: torch.Tensor) -> _Look:
        return self._looking(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _looking(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> _Look:
        look = shape, strides, offset, dtype
        if look not in self._looks:
            self._looks[look] = _Look(*look, self._anywhere.setdefault((shape, strides, dtype), object()))
        return self._looks[look]

    def _results(self, func: Any, out: Any, tensors: Sequence[FakeTensor]) -> _Known | None:
        """Return how to make the results of equal calls; None where that is not known."""
        kind = type(out) if isinstance(out, (list, tuple)) else None
        if kind not in (None, list, tuple):
            return None
        sources: list[Any] = [*tensors]
        found: list[_Result | None] = []
        for value in out if kind is not None else (out,):
            result = None if value is None else self._result(func, value, sources)
            if result is None and value is not None:
                return None
            sources.append(value)
            found.append(result)
        return kind, tuple(found)

    def _result(self, func: Any, value: Any, sources: Sequence[Any]) -> _Result | None:
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
            return None
        if value.fake_device != _CPU or value.dtype.is_complex:
            return None
        look = self._look(value)
        for number, source in enumerate(sources):
            if source is value:
                return _Result(True, number, look)
        storage = value.untyped_storage()
        for number, source in enumerate(sources):
            if source is not None and source.untyped_storage()._cdata == storage._cdata:
                return _Result(False, number, look) if func.is_view or func is _UNSAFE_VIEW else None
        plain = _bytes(look.shape, look.strides, value.element_size()) == storage.nbytes() and not look.offset
        return _Result(False, -1, look) if plain else None


def fake_mode() -> FakeTensorMode:
    """Return a mode for fake tensors that allows real ones, such as numbers that a forward makes.

    Its own memory of operations stays off: it is slower than `QuickFake`, and it forgets which results are one tensor.
    The first one imports torch's compiler, so it is made before there are tensors to trace: errors that are caught in
    an import keep the frames above, and what these hold, alive until the garbage collector comes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def blank(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor on the CPU that looks like a tensor, on a storage of its own; a parameter for one."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    twin = FakeTensor(mode, empty.requires_grad_(tensor.requires_grad), _CPU)
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


def _forget(values: Sequence[Any]) -> None:
    """Take the looks from tensors that an operation was given."""
    for value in values:
        if type(value) is FakeTensor:
            vars(value).pop(_LOOK, None)
        elif isinstance(value, (list, tuple)):
            _forget(value)


def _bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return what ``torch.empty_strided`` allocates."""
    return _elements(shape, strides) * item_bytes


def _elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and its last, both counted; 0 where it has none."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
