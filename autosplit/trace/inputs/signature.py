"""What a recording depends on: two calls of equal signature run the same program."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.trace.borrowed.holders import HOOK_TABLES, Place
from autosplit.trace.borrowed.hooks import only_observes
from autosplit.trace.graph import LEAST, Length, lengths_in
from autosplit.trace.inputs.objects import layout_of, one_tensor
from autosplit.trace.inputs.python_state import Identity, OutsideValues, Walk, content, held

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
"""Tables of hooks that may change what a forward computes; those that only observe are told by their code."""
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

    def rows_in(self, key: Key) -> int:
        """Return a call's batch size, or 0 when its inputs disagree or are empty."""
        return rows_of(key.shapes, self.batch_dims)

    def lengths_in(self, key: Key) -> dict[str, int] | None:
        """Return a call's lengths if it is of this kind but for them; None if it is of another."""
        if self.rest != key.rest:
            return None
        own, given = _tensors(self.shapes), _tensors(without_rows(key.shapes, self.batch_dims))
        if [len(shape) for shape in own] != [len(shape) for shape in given]:
            return None
        sizes = lengths_in(self.lengths, given)
        return sizes if with_lengths(own, self.lengths, sizes) == given else None

    def varying(self, key: Key) -> tuple[Length, ...] | None:
        """Return as symbols the dimensions in which a call differs from this kind; None if it differs otherwise."""
        if self.rest != key.rest:
            return None
        return varying(_tensors(self.shapes), _tensors(without_rows(key.shapes, self.batch_dims)), self.lengths)


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one device type: whether it is on, and its dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class GradAutocastState:
    """The thread-local state under which an operation ran: grad mode and autocast."""

    grad: bool
    autocast: tuple[AutocastState, ...]

    @classmethod
    def current(cls) -> GradAutocastState:
        """Return the state of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        states = (AutocastState(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(torch.is_grad_enabled(), tuple(states))

    def differing(self, root: GradAutocastState) -> GradAutocastState:
        """Keep only the autocast states that are not the root's; the grad mode stays."""
        return GradAutocastState(self.grad, tuple(s for s in self.autocast if s not in root.autocast))


def key_of(
    model: nn.Module,
    leaves: Sequence[Any],
    spec: Any,
    *,
    outside: OutsideValues,
    without: Collection[Place] = (),
    touched: frozenset[Place] | None = None,
) -> Key:
    """Return a call's signature from the flattened inputs and their structure.

    It covers grad mode and autocast; each module's type, mode, children, hooks and attributes; the parameters' and
    buffers' dtypes, shapes and ties; the values ``outside`` of the modules that functions and classes name; the inputs'
    structure, shapes, dtypes, devices, layouts and constants, and which of them are one tensor. Places ``without`` are
    left out, and so are attributes that are not among those ``touched``, where (path, "") is all of a module's and None
    all there are.
    """
    modes: list[Any] = [GradAutocastState.current()]
    structure: list[Any] = []
    hooks: list[Any] = []
    paths = list(model.named_modules())
    walk = Walk.of(module for _, module in paths)
    ties = walk.ties
    names = None if touched is None else _by_path(touched)
    for path, module in paths:
        own = module.__dict__
        modes.append(module.training)
        for table in HOOK_TABLES:
            for hook in own.get(table, {}).values():
                structure.append(getattr(hook, "__code__", type(hook)))
                if table in _FORWARD and not only_observes(hook):
                    hooks.append(hook)
        structure.append(type(module))
        structure += [(name, None if m is None else ties[id(m)]) for name, m in module._modules.items()]
        for parameter in module._parameters.values():
            tie = None if parameter is None else ties.setdefault(id(parameter), len(ties))
            structure.append(tie if parameter is None else (*held(parameter), tie))
        structure += [(name, buffer if buffer is None else held(buffer)) for name, buffer in module._buffers.items()]
        known = None if names is None else names.get(path, ())
        if known is None or "" in known:
            known = [key for key in own if key not in _OWN]
        for key in (key for key in known if key in own):
            if (path, key) in without:
                content(own[key], replace(walk, ties={}))  # nor where another module has the same object
            else:
                structure.append((key, content(own[key], walk)))
    structure.append(outside.signature((*walk.named(), *hooks), without, skipped=walk.modules))
    for _, module in paths:
        for name, parameter in module._parameters.items():
            if parameter is not None and vars(parameter):
                structure += [(name, outside.attributes(parameter, walk))]
    shapes = tuple(_shape(v) if isinstance(v, torch.Tensor) else None for v in leaves)
    kinds = tuple(_tensor_kind(v) if isinstance(v, torch.Tensor) else (type(v), _constant(v)) for v in leaves)
    structure.append(one_tensor(leaves))
    return Key((tuple(modes), tuple(structure), spec, kinds), shapes)


@functools.lru_cache(maxsize=16)
def _by_path(places: frozenset[Place]) -> Mapping[str, Collection[str]]:
    """Return the attributes among places by the path of their module, without those that every module has."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, name in sorted(places):
        if name not in _OWN:
            found[path].append(name)
    return dict(found)


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


# -- lengths -----------------------------------------------------------------------------------------------------------
Shape = tuple[int, ...]


def varying(before: Sequence[Shape], now: Sequence[Shape], known: Sequence[Length]) -> tuple[Length, ...] | None:
    """Return as symbols the dimensions of the input tensors that differ between two calls, and those ``known``.

    Both shapes have -1 where the rows are. Dimensions that change together, from one size to one other, are one symbol.
    None when nothing differs, or more than sizes do.
    """
    if [len(shape) for shape in before] != [len(shape) for shape in now] or list(before) == list(now):
        return None
    places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    told = {place for length in known for place in length.places}
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        for dim, pair in enumerate(zip(old, new, strict=True)):
            if pair[0] != pair[1] or (position, dim) in told:
                places[pair].append((position, dim))
    if any(size < LEAST for pair in places for size in pair):
        return None
    return tuple(Length(f"dim{number}", tuple(own)) for number, own in enumerate(places.values()))


def with_lengths(shapes: Sequence[Shape], lengths: Sequence[Length], sizes: Mapping[str, int]) -> list[Shape]:
    """Return the shapes with the given sizes where symbols stand."""
    at = {place: sizes[length.name] for length in lengths for place in length.places}
    return [
        tuple(at.get((position, dim), size) for dim, size in enumerate(shape)) for position, shape in enumerate(shapes)
    ]
