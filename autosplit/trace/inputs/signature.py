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
from autosplit.trace.borrowed.holders import HOOK_TABLES, Place
from autosplit.trace.borrowed.hooks import only_observes
from autosplit.trace.graph import Length, lengths_in
from autosplit.trace.inputs.lengths import Shapes, rows_of, varying, with_lengths, without_rows
from autosplit.trace.inputs.objects import layout_of, one_tensor
from autosplit.trace.inputs.python_state import Identity, OutsideValues, Walk, content, held

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
"""Tables of hooks that may change what a forward computes; those that only observe are told by their code."""
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
    """A call's signature: all but the shapes, and the shapes; beside it, what signatures leave out."""

    rest: Rest
    shapes: Shapes
    left_out: tuple[tuple[Place, Any], ...] = field(default=(), compare=False)
    outside: tuple[tuple[Place, Any], ...] = field(default=(), compare=False)


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
    inside: Collection[Place] = (),
    touched: frozenset[Place] | None = None,
) -> Key:
    """Return a call's signature from the flattened inputs and their structure.

    It covers grad mode and autocast; each module's type, mode, children, hooks and attributes; the parameters' and
    buffers' dtypes, shapes and ties; the values ``outside`` of the modules that functions and classes name; the inputs'
    structure, shapes, dtypes, devices, layouts and constants, and which of them are one tensor. Places ``without`` and
    those ``inside`` of opaque modules are left out, and so are attributes that are not among those ``touched``, where
    (path, "") is all of a module's and None all there are. What is inside is left out as it is and, among
    what is outside, with numbers and tensors that may be others.
    """
    entries: list[ModuleEntry] = []
    left_out: list[tuple[Place, Any]] = []
    loose: list[tuple[Place, Any]] = []
    changing: list[Any] = []
    marked: list[tuple[str, str, nn.Parameter]] = []
    paths = list(model.named_modules())
    walk = Walk.of(module for _, module in paths)
    ties = walk.ties
    names = None if touched is None else _by_path(touched)
    for path, module in paths:
        own = module.__dict__
        hooks: list[Any] = []
        for table in HOOK_TABLES:
            if registered := own.get(table):
                hooks += [getattr(hook, "__code__", type(hook)) for hook in registered.values()]
                if path and table in _FORWARD:  # the model's own run behind the program, in every call
                    changing += [hook for hook in registered.values() if not only_observes(hook)]
        children = [(name, None if m is None else ties[id(m)]) for name, m in module._modules.items()]
        parameters: list[Any] = []
        for name, parameter in module._parameters.items():
            tie = None if parameter is None else ties.setdefault(id(parameter), len(ties))
            parameters.append((name, tie if parameter is None else (*held(parameter), tie)))
            if parameter is not None and parameter.__dict__:
                marked.append((path, name, parameter))
        buffers = [(name, buffer if buffer is None else held(buffer)) for name, buffer in module._buffers.items()]
        known = None if names is None else names.get(path, ())
        if known is None or "" in known:
            known = [key for key in own if key not in _OWN]
        attributes: list[Any] = []
        for key in (key for key in known if key in own):
            if (path, key) in inside:  # what else holds it counts there
                left_out.append(((path, key), content(own[key], Walk(walk.modules, {}))))
                loose.append(((path, key), content(own[key], Walk(walk.modules, {}, loose=True))))
            elif (path, key) in without:
                left_out.append(((path, key), content(own[key], replace(walk, ties={}))))  # nor its ties elsewhere
            else:
                attributes.append((key, content(own[key], walk)))
        tables = map(tuple, (hooks, children, parameters, buffers, attributes))
        entries.append(ModuleEntry(path, module.training, type(module), *tables))
    values = outside.signature(walk.named(), tuple(changing), without=without, skipped=walk.modules)
    for path, name, parameter in marked:
        values += outside.attributes(path, name, parameter, walk)
    shapes = tuple(_shape(v) if isinstance(v, torch.Tensor) else None for v in leaves)
    kinds = tuple(_tensor_kind(v) if isinstance(v, torch.Tensor) else (type(v), _constant(v)) for v in leaves)
    rest = Rest(GradAutocastState.current(), tuple(entries), values, spec, kinds, one_tensor(leaves))
    return Key(rest, shapes, tuple(left_out), (*outside.left_out(without), *loose))


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
