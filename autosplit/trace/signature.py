"""What a recording depends on: two calls of equal signature run the same program."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.trace.calls import Ambient
from autosplit.trace.formula import Length
from autosplit.trace.identity import Identity
from autosplit.trace.layouts import layout_of, one_tensor
from autosplit.trace.lengths import consistent, sizes_at, varying, without_lengths
from autosplit.trace.outside import OutsideValues
from autosplit.trace.python_state import Passing, Place, signature
from autosplit.trace.scope import CONTAINERS

_SHORT = 32
_OWN = frozenset(nn.Module().__dict__)
Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Key:
    """A call's signature: all but the shapes, and the shapes; the first of ``rest`` are the modes."""

    rest: Any
    shapes: Shapes


@dataclass(frozen=True)
class Kind:
    """A recording's signature: shapes without the rows, where the rows were, and which dimensions are symbols."""

    rest: Any
    shapes: Shapes
    batch_dims: tuple[int | None, ...]
    lengths: tuple[Length, ...] = ()

    def lengths_in(self, key: Key) -> dict[str, int] | None:
        """Return a call's lengths if it is of this kind but for them; None if it is of another."""
        if self.rest != key.rest:
            return None
        own, given = _tensors(self.shapes), _tensors(without_rows(key.shapes, self.batch_dims))
        if [len(shape) for shape in own] != [len(shape) for shape in given]:
            return None
        if without_lengths(own, self.lengths) != without_lengths(given, self.lengths):
            return None
        return sizes_at(self.lengths, given) if consistent(self.lengths, given) else None

    def varying(self, key: Key) -> tuple[Length, ...] | None:
        """Return as symbols the dimensions in which a call differs from this kind; None if it differs otherwise."""
        if self.rest != key.rest:
            return None
        return varying(_tensors(self.shapes), _tensors(without_rows(key.shapes, self.batch_dims)), self.lengths)


def key_of(
    model: nn.Module, leaves: Sequence[Any], spec: Any, *, outside: OutsideValues, without: Collection[Place] = ()
) -> Key:
    """Return a call's signature from the flattened inputs and their structure.

    It covers grad mode and autocast; each module's type, mode and plain attributes; the parameters' dtypes and ties;
    the values ``outside`` of the modules that their functions name; the inputs' structure, shapes, dtypes, devices,
    layouts and constants, and which of them are one tensor. Places ``without`` are left out.
    """
    modes: list[Any] = [Ambient.current()]
    structure: list[Any] = []
    ties: dict[int, int] = {}
    seen: set[int] = set()
    kinds_of_modules: set[type] = set()
    for path, module in model.named_modules():
        kind = type(module)
        kinds_of_modules.add(kind)
        modes.append(module.training)
        if isinstance(module, CONTAINERS) or not kind.__module__.startswith("torch.nn"):
            structure.append(len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks))
        structure.append(kind)
        for parameter in module._parameters.values():
            tie = None if parameter is None else ties.setdefault(id(parameter), len(ties))
            structure.append(tie if parameter is None else (parameter.dtype, parameter.requires_grad, tie))
        structure += [(name, buffer is None) for name, buffer in module._buffers.items()]
        declared = _declared(kind)  # type: ignore[arg-type]
        for key, value in module.__dict__.items():
            if key in _OWN or key in declared or isinstance(value, Passing):
                continue
            if (path, key) in without:
                signature(value, seen)  # nor is it part of it where another module has the same object
            elif not declared or isinstance(value, (bool, int, float, str, torch.Tensor, type(None))):
                structure += _attribute(value, seen)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            structure.append(module.p)
    structure.append(outside.signature(frozenset(kinds_of_modules), without))
    shapes = tuple(_shape(v) if isinstance(v, torch.Tensor) else None for v in leaves)
    kinds = tuple(_tensor_kind(v) if isinstance(v, torch.Tensor) else (type(v), _constant(v)) for v in leaves)
    structure.append(one_tensor(leaves))
    return Key((tuple(modes), tuple(structure), spec, kinds), shapes)


@functools.cache
def _declared(kind: type) -> frozenset[str]:
    """Return the attributes that a layer of ``torch.nn`` declares: its own code reads them when it runs."""
    if not kind.__module__.startswith("torch.nn"):
        return frozenset()
    tables = (vars(one).get(table, ()) for one in kind.__mro__ for table in ("__annotations__", "__constants__"))
    return frozenset(("training", *(name for table in tables for name in table)))


def _attribute(value: Any, seen: set[int]) -> Sequence[Any]:
    """Return what of a module's attribute is part of a signature."""
    if isinstance(value, (bool, int, float, str)):
        return ((type(value), value),)
    if value is None:
        return (None,)
    if callable(value) or isinstance(value, torch.Tensor):
        return Identity(value), signature(value, seen, _part)
    if type(value) in (list, tuple, dict, set) and _is_plain(value):
        return (repr(value),)
    plain = signature(value, seen, _part)
    return () if plain is None else (plain,)


def _part(value: Any) -> Any:
    """Return what tells a part of an attribute, which is no number or text, from another."""
    return value if isinstance(value, (torch.dtype, torch.device)) else Identity(value)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout is torch.strided:
        raise InputError(
            "an input is a nested tensor of the strided layout, which has no shape: give one of layout=torch.jagged, "
            "or a padded tensor and a mask"
        )
    return tuple(tensor.shape)


def _tensor_kind(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return a tensor's dtype and the rest; under ``torch.func`` every input requires a gradient of the transform's."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return tensor.dtype, (tensor.device, False, None, False)
    return tensor.dtype, (tensor.device, tensor.requires_grad, layout_of(tensor), isinstance(tensor, nn.Parameter))


def _constant(value: Any) -> Any:
    """Return what tells one input that is no tensor from another."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return Identity(value) if isinstance(value, type) else repr(value)


def _is_plain(value: Any) -> bool:
    """Tell whether a container is short and holds nothing but numbers, text and None."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return len(value) <= _SHORT and all(part is None or isinstance(part, (bool, int, float, str)) for part in parts)


def _tensors(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if shape is not None]


def rows_of(shapes: Shapes, dims: Sequence[int | None]) -> int:
    """Return the batch size, or 0 when the inputs disagree or are empty."""
    pairs = ((shape, d) for shape, d in zip(shapes, dims, strict=True) if shape is not None and d is not None)
    rows = {shape[d] if d < len(shape) else 0 for shape, d in pairs}
    return rows.pop() if len(rows) == 1 else 0


def without_rows(shapes: Shapes, dims: Sequence[int | None]) -> Shapes:
    """Return the shapes with -1 where the rows are."""
    return tuple(
        shape if shape is None or d is None or d >= len(shape) else (*shape[:d], -1, *shape[d + 1 :])
        for shape, d in zip(shapes, dims, strict=True)
    )
