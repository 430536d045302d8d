"""What a recording depends on: two calls of equal signature run the same program."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autosplit.errors import InputError
from autosplit.trace.borrowed.holders import (
    ENTRIES,
    HOOK_TABLES,
    Holder,
    Holders,
    Place,
    difference,
    is_apart,
    is_object,
)
from autosplit.trace.graph import Length, lengths_in
from autosplit.trace.inputs.lengths import Shapes, rows_of, varying, with_lengths, without_rows
from autosplit.trace.inputs.objects import layout_of, one_tensor

_DEPTH = 3
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_EXACT = frozenset(_VALUES) - {float, complex}
"""Types whose values are equal only where nothing tells them apart."""
_WEAK: tuple[Any, ...] = (weakref.ref, *weakref.ProxyTypes)
_OWN = frozenset(nn.Module().__dict__)


class ModuleEntry(NamedTuple):
    """What a signature has of a module; its children, parameters, buffers and attributes are pairs of name and value.

    :mod:`autosplit.trace.inputs.differences` tells by these names in what two signatures differ.
    """

    path: str
    training: bool
    kind: type
    hooks: tuple[Any, ...]
    children: tuple[Any, ...]
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]
    attributes: tuple[Any, ...]


class Rest(NamedTuple):
    """A signature but for the shapes of the inputs."""

    modes: GradAutocastState
    modules: tuple[ModuleEntry, ...]
    outside: tuple[Any, ...]
    """The values that functions and classes name, as pairs of place and content."""
    structure: Any
    """How the inputs are put together."""
    kinds: tuple[tuple[Any, Any], ...]
    """Of each input: dtype and the rest of a tensor, class and value of anything else."""
    same: Any
    """Which of the inputs are one tensor."""


@dataclass(frozen=True)
class Key:
    """A call's signature: all but the shapes, and the shapes; beside it, the attributes that signatures leave out."""

    rest: Rest
    shapes: Shapes
    left_out: tuple[tuple[Place, Any], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Kind:
    """A recording's signature: shapes without the rows, where the rows were, and which dimensions are symbols."""

    rest: Rest
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
    entries: list[ModuleEntry] = []
    left_out: list[tuple[Place, Any]] = []
    paths = list(model.named_modules())
    walk = _Walk.of(module for _, module in paths)
    ties = walk.ties
    names = None if touched is None else _by_path(touched)
    for path, module in paths:
        own = module.__dict__
        hooks: list[Any] = []
        for table in HOOK_TABLES:
            if registered := own.get(table):
                hooks += map(_hook, registered.values())
        children = [(name, None if m is None else ties[id(m)]) for name, m in module._modules.items()]
        parameters: list[Any] = []
        for name, parameter in module._parameters.items():
            tie = None if parameter is None else ties.setdefault(id(parameter), len(ties))
            parameters.append((name, tie if parameter is None else (*_held(parameter), tie)))
        buffers = [(name, buffer if buffer is None else _held(buffer)) for name, buffer in module._buffers.items()]
        known = None if names is None else names.get(path, ())
        if known is None or "" in known:
            known = [key for key in own if key not in _OWN]
        attributes: list[Any] = []
        for key in (key for key in known if key in own):
            if (path, key) in without:
                left_out.append(((path, key), _content(own[key], replace(walk, ties={}))))  # nor its ties elsewhere
            else:
                attributes.append((key, _content(own[key], walk)))
        tables = map(tuple, (hooks, children, parameters, buffers, attributes))
        entries.append(ModuleEntry(path, module.training, type(module), *tables))
    found = (*walk.modules.values(), *walk.seen.values())
    named = frozenset(value if isinstance(value, types.FunctionType) else type(value) for value in found)
    shapes = tuple(_shape(v) if isinstance(v, torch.Tensor) else None for v in leaves)
    kinds = tuple(_tensor_kind(v) if isinstance(v, torch.Tensor) else (type(v), _constant(v)) for v in leaves)
    modes, values = GradAutocastState.current(), outside.signature(named, without)
    return Key(Rest(modes, tuple(entries), values, spec, kinds, one_tensor(leaves)), shapes, tuple(left_out))


@functools.lru_cache(maxsize=16)
def _by_path(places: frozenset[Place]) -> Mapping[str, Collection[str]]:
    """Return the attributes among places by the path of their module, without those that every module has."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, name in sorted(places):
        if name not in _OWN:
            found[path].append(name)
    return dict(found)


def _hook(hook: Any) -> Any:
    """Return what tells a module's hook from another: its code, for a loop may register the same function anew."""
    return getattr(hook, "__code__", type(hook))


@dataclass(frozen=True)
class _Walk:
    """What a walk through the attributes of a model's modules has come to."""

    modules: dict[int, nn.Module]
    """The model's modules, by id."""
    ties: dict[int, int]
    """Numbers of modules, parameters and objects in the signature, by id."""
    seen: dict[int, Any] = field(default_factory=dict)
    """The objects that were looked at already, by id: modules share configs."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> _Walk:
        found = {id(module): module for module in modules}
        return cls(found, {key: number for number, key in enumerate(found)})


def _content(value: Any, walk: _Walk, depth: int = _DEPTH) -> Any:
    """Return what tells whether an attribute is as it was: its class and parts, three levels deep, each object once."""
    if type(value) in _EXACT:
        return type(value), value
    if type(value) is tuple and all(type(part) in _EXACT for part in value):
        return *map(type, value), value
    if issubclass(type(value), _WEAK):
        value = referent(value)
    if isinstance(value, _VALUES):
        return _known(value)
    if isinstance(value, (np.ndarray, np.generic)):
        small = value.size <= ENTRIES and not value.dtype.hasobject
        return (value.dtype.str, value.shape, value.tobytes()) if small else None
    if id(value) in walk.seen or id(value) in walk.modules:
        return walk.ties.get(id(value))
    if depth == 0:
        return None
    if isinstance(value, torch.Tensor):
        return (Identity(value), *_held(value))
    parts = _parts(value, walk.modules)
    if parts is not None or isinstance(value, types.FunctionType):
        walk.seen[id(value)] = value
        walk.ties[id(value)] = len(walk.ties)
    if parts is None:
        return _known(value)
    whole = callable(value) and depth == _DEPTH and not isinstance(value, (functools.partial, types.MethodType))
    own = tuple((str(key), _content(part, walk, depth - 1)) for key, part in parts)
    return Identity(value) if whole else type(value), own


def _parts(value: Any, modules: Collection[int]) -> list[tuple[Any, Any]] | None:
    """Return the parts of a container or object; None for what is compared as a whole."""
    parts: list[tuple[Any, Any]] | None = None
    if isinstance(value, (set, frozenset)) and len(value) <= ENTRIES:
        parts = [*enumerate(sorted(value, key=repr))]
    elif isinstance(value, (list, tuple, deque)) and len(value) <= ENTRIES:
        parts = [*enumerate(value)]
    elif isinstance(value, dict) and len(value) <= ENTRIES:
        parts = [*value.items()]
    elif isinstance(value, functools.partial):
        parts = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, types.MethodType):
        parts = [("func", value.__func__), ("self", value.__self__)]
    if is_object(value) or is_apart(value, modules):
        parts = [*(parts or ()), *vars(value).items()]
    return parts


def referent(value: Any) -> Any:
    """Return what a weak reference or proxy stands for, None where it is gone, and anything else as it is."""
    if type(value) in weakref.ProxyTypes:
        with contextlib.suppress(ReferenceError):
            return value.__init__.__self__
        return None
    return value() if isinstance(value, weakref.ref) else value


def objects_of(value: Any, model: nn.Module) -> set[int]:
    """Return the ids of what can change in an attribute's content, but for the modules of the model."""
    walk = _Walk.of(model.modules())
    _content(value, walk)
    fixed = (tuple, frozenset, types.FunctionType)
    return {key for key, part in walk.seen.items() if type(part) not in fixed}


def _held(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a recording sees of a tensor besides its values; a lazy or nested one has no shape to ask for."""
    return tensor.dtype, None if is_lazy(tensor) or tensor.is_nested else tensor.shape, tensor.requires_grad


def _known(value: Any) -> Any:
    """Return what tells a number, text, dtype or device from another by its value, anything else by its identity."""
    if isinstance(value, float):
        return float, repr(value)  # a NaN is equal to itself here
    return (type(value), value) if isinstance(value, _VALUES) else Identity(value)


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


# -- keys --------------------------------------------------------------------------------------------------------------
class Identity:
    """An object as part of a key: equal to the same object only, never to a later one at the same address.

    It is held by a weak reference, so that a key keeps no tensor alive; one that is gone equals nothing.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # it takes no weak reference
            self.value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Identity) and (value := self.value()) is not None and value is other.value()


# -- values outside of the modules -------------------------------------------------------------------------------------
class OutsideValues:
    """Reads the values that functions, also those of classes, name; walks them anew only where one is another."""

    def __init__(self) -> None:
        self._kinds: frozenset[Any] = frozenset()
        self._holders: list[tuple[Holder, Any]] = []
        self._parts: dict[Place, list[Any]] = {}

    def signature(self, kinds: frozenset[Any], without: Collection[Place]) -> tuple[Any, ...]:
        """Return what tells the values from others by their places, but for those at the places ``without``."""
        if kinds != self._kinds or any(difference(content, holder.read()) for holder, content in self._holders):
            self._walk(kinds)
        return tuple((place, *parts) for place, parts in self._parts.items() if place not in without)

    def changed(self) -> frozenset[Place]:
        """Return the places where values are others than when the signature was read."""
        return frozenset(h.place for h, content in self._holders if difference(content, h.read()))

    def _walk(self, kinds: frozenset[Any]) -> None:
        found = Holders((), sorted(kinds, key=lambda kind: kind.__qualname__)).found
        pairs = [(holder, holder.read()) for holder in found if not holder.of_hook]
        self._kinds = kinds
        self._holders = [(h, own) for h, own in pairs if isinstance(own, (dict, list)) and len(own) <= ENTRIES]
        self._parts = {}
        for holder, content in self._holders:
            self._parts.setdefault(holder.place, []).append(_frozen(content))


def _frozen(content: Mapping[Any, Any] | list[Any]) -> tuple[Any, ...]:
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
    return tuple((_known(key), _known(value)) for key, value in pairs if not str(key).startswith("__"))
