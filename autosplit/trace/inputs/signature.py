"""What a recording depends on: two calls of equal signature run the same program."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.trace.borrowed.contents import Place
from autosplit.trace.borrowed.holders import HOOK_TABLES, Holders
from autosplit.trace.borrowed.hooks import only_observes
from autosplit.trace.graph import Length, lengths_in
from autosplit.trace.inputs.lengths import Shapes, rows_of, varying, with_lengths, without_rows
from autosplit.trace.inputs.objects import layout_of, one_tensor
from autosplit.trace.inputs.python_state import Contents, Identity, OutsideValues, held

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
"""Tables of hooks that may change what a forward computes; those that only observe are told by their code."""
_OWN = frozenset(nn.Module().__dict__)
_KEPT = 32
"""How many signatures are kept for a model that is as it was."""


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


@dataclass(frozen=True)
class Rest:
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

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.modes, self.modules, self.outside, self.structure, self.kinds, self.same))


@dataclass(frozen=True)
class Key:
    """A call's signature: all but the shapes, and the shapes; beside it, what signatures leave out."""

    rest: Rest
    shapes: Shapes
    left_out: tuple[tuple[Place, Any], ...] = field(default=(), compare=False)
    outside: tuple[tuple[Place, Any], ...] = field(default=(), compare=False)

    @property
    def call(self) -> CallSignature:
        """What of it describes the call, not the model."""
        rest = self.rest
        return CallSignature(rest.modes, rest.structure, rest.kinds, rest.same, self.shapes)


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
        recorded, called = _tensors(self.shapes), _tensors(without_rows(key.shapes, self.batch_dims))
        if [len(shape) for shape in recorded] != [len(shape) for shape in called]:
            return None
        sizes = lengths_in(self.lengths, called)
        return sizes if with_lengths(recorded, self.lengths, sizes) == called else None

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
        states = [AutocastState(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _device_kinds()]
        return cls(torch.is_grad_enabled(), tuple(states))

    def differing(self, root: GradAutocastState) -> GradAutocastState:
        """Keep only the autocast states that are not the root's; the grad mode stays."""
        return GradAutocastState(self.grad, tuple(s for s in self.autocast if s not in root.autocast))


def any_autocast() -> bool:
    """Tell whether autocast is on in this thread, for any kind of device."""
    return any(state.enabled for state in GradAutocastState.current().autocast)


@functools.cache
def _device_kinds() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class CallSignature(NamedTuple):
    """The part of a signature that describes the call, not the model."""

    modes: GradAutocastState
    structure: Any
    kinds: tuple[tuple[Any, Any], ...]
    same: Any
    shapes: Shapes

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: Any) -> CallSignature:
        """Return that of the call that is being made, of its flattened inputs and their structure."""
        kinds = tuple(_tensor_kind(v) if isinstance(v, torch.Tensor) else (type(v), _constant(v)) for v in leaves)
        shapes = tuple(_shape(v) if isinstance(v, torch.Tensor) else None for v in leaves)
        return cls(GradAutocastState.current(), structure, kinds, one_tensor(leaves), shapes)


class SignatureScope(NamedTuple):
    """The attributes that signatures contain.

    Attributes:
        touched: those that recordings have read or set; (path, "") means all of a module, None all of all modules.
        inside: those that opaque modules change themselves: they are left out, and of what lies outside of modules
            numbers and tensors are.
        without: those that change from call to call: they are left out.
    """

    touched: frozenset[Place] | None = None
    inside: frozenset[Place] = frozenset()
    without: frozenset[Place] = frozenset()

    def names(self, path: str, space: Collection[str]) -> list[str]:
        """Return the attributes of a module that are looked at, of all that are in its ``space``."""
        known = None if self.touched is None else _by_path(self.touched).get(path, ())
        if known is None or "" in known:
            return [name for name in space if name not in _OWN]
        return [name for name in known if name in space]


@functools.lru_cache(maxsize=16)
def _by_path(places: frozenset[Place]) -> Mapping[str, Collection[str]]:
    """Return the attributes among places by the path of their module, without those that every module has."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for path, name in sorted(places):
        if name not in _OWN:
            by_path[path].append(name)
    return dict(by_path)


class ModelWalk:
    """A walk through a model, for what signatures have of it.

    Attributes:
        entries: of each module, its type, mode, children, hooks, state and attributes.
        values: what is outside of the modules that functions and classes name, and attributes of parameters.
        modules: the modules, by id.
        marks: of each parameter that has attributes, its ``__dict__`` and the names that walked code mentions.
        contents: what tells attributes, of modules and of parameters, from others.
        keys: the signatures of calls for which the model is as it was.
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module, Sequence[str]]], outside: OutsideValues, scope: SignatureScope
    ) -> None:
        """``modules`` have their paths, and the names of the attributes that are looked at."""
        self.scope, self._outside = scope, outside
        self.keys: dict[CallSignature, Key] = {}
        self._rests: dict[tuple[Any, ...], Rest] = {}
        self._hooks: list[Any] = []
        self._marked: list[tuple[str, str, dict[str, Any]]] = []
        self.modules = {id(module): module for _, module, _ in modules}
        values = [((path, name), vars(module)) for path, module, names in modules for name in names]
        self._inside = [each for each in values if each[0] in scope.inside]
        self._skipped = scope.inside | scope.without
        told = self._contents([(at, space[at[1]]) for at, space in values if at not in self._skipped])
        self.entries = tuple(self._entry(told, *module) for module in modules)
        left = [(at, space[at[1]]) for at, space in values if at in scope.without - scope.inside]
        self.contents = [told, *(self._contents([each], {}) for each in left)]  # what else holds it counts there
        self._left = [(at, each.of(value)) for (at, value), each in zip(left, self.contents[1:], strict=True)]
        named = (root for each in self.contents for root in each.map.named())
        self._roots = tuple(dict.fromkeys((*map(type, self.modules.values()), *named)))
        self._named = self._read_outside()
        self.marks = [(space, [*filter(outside.may_name, space)]) for *_, space in self._marked]
        named_marks = zip(self._marked, self.marks, strict=True)
        marks = [((p, f"{name}.{key}"), space[key]) for (p, name, space), (_, keys) in named_marks for key in keys]
        self.contents.append(of_marks := self._contents(marks, told.ties))
        self.values = (*self._named, *((at, of_marks.of(value)) for at, value in marks))

    def _contents(
        self, values: Sequence[tuple[Place, Any]], ties: dict[int, int] | None = None, *, loose: bool = False
    ) -> Contents:
        if ties is None:  # a list may hold parameters too, which a recording has by their names
            tables = (table for module in self.modules.values() for table in (module._parameters, module._buffers))
            tensors = (id(tensor) for table in tables for tensor in table.values() if tensor is not None)
            ties = {key: number for number, key in enumerate(dict.fromkeys((*self.modules, *tensors)))}
        return Contents(Holders(skipped=self.modules, values=values), ties, nested=True, loose=loose)

    def key(self, call: CallSignature) -> Key:
        """Return the signature of a call, with what is left out as it is now."""
        inside = [(at, space[at[1]]) for at, space in self._inside]
        left, loose = (
            [(each[0], self._contents([each], {}, loose=loose).of(each[1])) for each in inside]
            for loose in (False, True)
        )  # what else holds it counts there
        left_out, outside = (*self._left, *left), (*self._outside.left_out(self.scope.without), *loose)
        key = self.keys.get(call)
        if key is None:
            key = Key(self._rest(call), call.shapes, left_out, outside)
            if len(self.keys) >= _KEPT:
                self.keys.clear()
        elif (key.left_out, key.outside) != (left_out, outside):
            key = replace(key, left_out=left_out, outside=outside)
        self.keys[call] = key
        return key

    def _rest(self, call: CallSignature) -> Rest:
        """Return a call's signature but for the shapes: the same object for all lengths, whose hash is known."""
        alike = call[:-1]
        if (rest := self._rests.get(alike)) is None:
            self._rests.clear() if len(self._rests) >= _KEPT else None
            rest = Rest(call.modes, self.entries, self.values, call.structure, call.kinds, call.same)
            self._rests[alike] = rest
        return rest

    def same_outside(self) -> bool:
        """Tell whether functions and classes name the same values as then."""
        if same := (now := self._read_outside()) == self._named:
            self._named = now  # the same objects are compared at once
        return same

    def _read_outside(self) -> tuple[Any, ...]:
        return self._outside.signature(self._roots, self._hooks, without=self.scope.without, skipped=self.modules)

    def _entry(self, told: Contents, path: str, module: nn.Module, names: Sequence[str]) -> ModuleEntry:
        fields, ties = module.__dict__, told.ties
        hooks: list[Any] = []
        for table in HOOK_TABLES:
            if registered := fields.get(table):
                hooks += [getattr(hook, "__code__", type(hook)) for hook in registered.values()]
                if path and table in _FORWARD:  # the model's own run behind the program, in every call
                    self._hooks += [hook for hook in registered.values() if not only_observes(hook)]
        children = [(name, None if m is None else ties[id(m)]) for name, m in module._modules.items()]
        parameters: list[Any] = []
        for name, parameter in module._parameters.items():
            parameters.append((name, None if parameter is None else (*held(parameter), ties[id(parameter)])))
            if parameter is not None and parameter.__dict__ and (path, name) not in self._skipped:
                self._marked.append((path, name, parameter.__dict__))
        buffers = [(name, buffer if buffer is None else held(buffer)) for name, buffer in module._buffers.items()]
        attributes = [(name, told.of(fields[name])) for name in names if (path, name) not in self._skipped]
        tables = map(tuple, (hooks, children, parameters, buffers, attributes))
        return ModuleEntry(path, module.training, type(module), *tables)


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
    is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)
    return tensor.dtype, (tensor.device, tensor.requires_grad, layout_of(tensor), is_parameter)


def _constant(value: Any) -> Any:
    """Return what tells one input that is no tensor from another."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return Identity(value) if isinstance(value, type) else repr(value)


def _tensors(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if shape is not None]
