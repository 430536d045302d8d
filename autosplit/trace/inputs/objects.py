"""Nested values and plain Python objects, taken apart into flat leaves and put together again.

A cache, a result class of the user's own: an object whose state is its attributes (and its items, where its class is
derived from list, tuple or dict) is a container like any other. It is taken apart along that state, so that tensors and
numbers in it are leaves, and every call builds a new one without calling its class's ``__init__``. Nothing is
registered with torch's pytree, whose own containers are taken apart as it says.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx.node import map_aggregate

from autosplit.options import Sample

_HEAP_TYPE = 1 << 9
"""The flag of a class that a ``class`` statement made."""
_WHOLE = (
    torch.Tensor,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    nn.Module,
    type,
    enum.Enum,
    BaseException,
    np.ndarray,
    np.generic,
)
_OF_THE_LIBRARY = (types.SimpleNamespace, UserDict, UserList, torch.Size)
_BUILT_ON = (object, list, tuple, dict, OrderedDict, types.SimpleNamespace)


def is_object(value: Any) -> bool:
    """Tell whether a value is taken apart along its attributes: an object of a class that is not Python's own.

    Tensors, modules, classes, enumerations and exceptions stay whole, as do the containers that torch's pytree knows.
    """
    kind = type(value)
    if kind in _OF_THE_LIBRARY:
        return True
    if not kind.__flags__ & _HEAP_TYPE or isinstance(value, _WHOLE) or not pytree.tree_is_leaf(value):
        return False
    if _built_on(kind) not in _BUILT_ON:
        return False
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, those in slots too."""
    state = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def items_of(value: Any) -> Any:
    """Return the items of an object whose class is derived from list, tuple or dict, as one of these; else None."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    base = next((base for base in (list, tuple) if isinstance(value, base)), None)
    return None if base is None else base(base.__iter__(value))


def _built_on(kind: type) -> type:
    """Return the innermost class of C that a class is derived from: the one whose ``__new__`` makes its objects."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


@dataclass(frozen=True)
class Leaf:
    """One flat leaf."""


@dataclass(frozen=True)
class Again:
    """The object, or the shared list or dict, that was met as this one before."""

    number: int


@dataclass(frozen=True)
class Tree:
    """A container that torch's pytree knows, and what its leaves are made of."""

    spec: Any
    parts: tuple[Any, ...]
    shared: bool = False
    """Whether it is a list or dict that is met again."""


@dataclass(frozen=True)
class Object:
    """An object of this class: the names of its attributes, and what they and its items are made of."""

    kind: type
    names: tuple[str, ...]
    state: tuple[Any, ...]
    items: Any = None


@dataclass(frozen=True)
class Structure:
    """How flat leaves make a nested value; two are equal when they make the same of equal leaves."""

    form: Leaf | Again | Tree | Object

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.form)

    def __reduce__(self) -> Any:
        return Structure, (self.form,)  # in another process the hash is another

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Put a value together; its objects are new ones."""
        return _build(self.form, iter(leaves), [])


class _Shared:
    """Finds lists and dicts of a nested value that are met again; ``known`` are the ids of such ones."""

    def __init__(self, known: Collection[int]) -> None:
        self.known = known
        self.met: dict[int, Any] = {}
        self.again: set[int] = set()

    def holds(self, value: Any) -> bool:
        """Note a list or dict; tell whether it is a known one."""
        if type(value) not in (list, dict):
            return False
        if id(value) in self.met:
            self.again.add(id(value))
        self.met[id(value)] = value
        return id(value) in self.known

    def is_node(self, root: int, value: Any) -> bool:
        """Tell whether pytree, which began at a ``root``, leaves a value to `_Apart.form`."""
        return id(value) != root and (self.holds(value) or is_object(value))


class _Apart:
    """A nested value, taken apart: its flat leaves, the steps to each if wanted, and its objects, each once."""

    def __init__(self, value: Any, *, steps: bool = False, shared: Collection[int] = ()) -> None:
        self.steps, self.shared = steps, _Shared(shared)
        self.leaves: list[Any] = []
        self.paths: list[tuple[Any, ...]] = []
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.structure = Structure(self.form(value))
        self.shared.met.clear()  # pytree's functions, which hold the rest of it, stay until garbage is collected

    def form(self, value: Any, path: tuple[Any, ...] = ()) -> Leaf | Again | Tree | Object:
        if id(value) in self.numbers:
            return Again(self.numbers[id(value)])
        if is_object(value):
            self.numbers[id(value)] = len(self.numbers)
            self.objects.append(value)
            items, attributes = items_of(value), attributes_of(value)
            elements = None if items is None else self.form(items, path)
            state = tuple(self.form(item, (*path, pytree.GetAttrKey(name))) for name, item in attributes.items())
            return Object(type(value), tuple(attributes), state, elements)
        if isinstance(value, torch.Tensor):
            return self._leaf(value, path)
        if is_shared := self.shared.holds(value):
            self.numbers[id(value)] = len(self.numbers)
        parts: Sequence[tuple[Any, Any]]
        is_leaf = functools.partial(self.shared.is_node, id(value))
        if self.steps:
            parts, spec = pytree.tree_flatten_with_path(value, is_leaf=is_leaf)
        else:
            leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
            parts = [((), leaf) for leaf in leaves]
        if len(parts) == 1 and parts[0][1] is value:
            return self._leaf(value, path)
        return Tree(spec, tuple(self.form(item, (*path, *below)) for below, item in parts), is_shared)

    def _leaf(self, value: Any, path: tuple[Any, ...]) -> Leaf:
        self.leaves.append(value)
        self.paths.append(path)
        return Leaf()


def _apart(value: Any, *, steps: bool = False) -> _Apart:
    """Take a nested value apart, with lists and dicts at several places in it as one."""
    apart = _Apart(value)
    again = apart.shared.again
    return _Apart(value, steps=steps, shared=again) if steps or again else apart


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """Return the flat leaves of a nested value, tensors and others, and how they are put together."""
    apart = _apart(value)
    return apart.leaves, apart.structure


def call_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """Take the inputs of a call apart: the structure of plain tensors and constants is the same object each time."""
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, torch.Tensor) or type(leaf) in _PLAIN for leaf in leaves):
        return leaves, _of_leaves(len(args), tuple(kwargs))
    return take_apart((args, kwargs))


COUNT = "num_items_in_batch"
"""What transformers' losses divide by: all that counts in the microbatches of an accumulation."""


def with_counts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword inputs with that count as a tensor, as Trainer gives it: its value belongs to no recording."""
    if isinstance(count := kwargs.get(COUNT), (int, float)):
        return kwargs | {COUNT: torch.tensor(count, dtype=torch.int64 if isinstance(count, int) else torch.float64)}
    return kwargs


@functools.lru_cache(maxsize=64)
def _of_leaves(count: int, names: tuple[str, ...]) -> Structure:
    return take_apart(((None,) * count, dict.fromkeys(names)))[1]


def leaves_of(value: Any) -> list[Any]:
    """Return the flat leaves of a nested value."""
    return _apart(value).leaves


def with_paths(value: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Structure]:
    """Return the flat leaves with the steps that lead to them, as torch's pytree has them, and how they are built."""
    apart = _apart(value, steps=True)
    return list(zip(apart.paths, apart.leaves, strict=True)), apart.structure


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with ``function`` of each leaf in its place; its objects are new ones."""
    if isinstance(value, torch.Tensor):
        return function(value)
    leaves, structure = take_apart(value)
    return structure([function(leaf) for leaf in leaves])


def objects_in(value: Any) -> list[Any]:
    """Return the objects inside a nested value, each once."""
    return _apart(value).objects


def _build(form: Any, leaves: Iterator[Any], built: list[Any]) -> Any:
    if isinstance(form, Leaf):
        return next(leaves)
    if isinstance(form, Again):
        return built[form.number]
    position = len(built)
    if isinstance(form, Tree):
        if form.shared:
            built.append(None)
        tree = pytree.tree_unflatten([_build(child, leaves, built) for child in form.parts], form.spec)
        if form.shared:
            built[position] = tree
        return tree
    base: Any = _built_on(form.kind)
    instance: Any = None if issubclass(base, tuple) else base.__new__(form.kind)
    built.append(instance)
    items = None if form.items is None else _build(form.items, leaves, built)
    if issubclass(base, tuple):
        instance = built[position] = base.__new__(form.kind, items or ())
    elif base is list:
        list.extend(instance, items or ())
    elif items is not None:
        for key, item in items.items():
            base.__setitem__(instance, key, item)
    for name, child in zip(form.names, form.state, strict=True):
        object.__setattr__(instance, name, _build(child, leaves, built))
    return instance


_PLAIN = frozenset((int, float, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside nested arguments, slices included."""
    tensors: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif type(leaf) not in _PLAIN:
            tensors.extend(item for item in leaves_of(leaf) if isinstance(item, torch.Tensor))
        return leaf  # containers are made again of what they hold: a PackedSequence takes nothing else

    map_aggregate(value, collect)
    return tensors


def fresh(leaf: Any) -> Any:
    """Return a tensor's copy without a graph, any other value itself."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors with one storage share; a sparse or nested tensor is its own storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def projections(value: Any) -> Iterator[tuple[torch.Tensor, list[tuple[Callable[..., Any], Any]]]]:
    """Yield every tensor inside a nested value with the steps to it: ``getattr`` or ``getitem``, and a key."""
    for path, leaf in with_paths(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf, [(getattr, k.name) if isinstance(k, pytree.GetAttrKey) else (getitem, _key(k)) for k in path]


def _key(step: Any) -> Any:
    return step.idx if isinstance(step, pytree.SequenceKey) else step.key


def is_computed(module: nn.Module, name: str, value: Any) -> bool:
    """Tell whether a hook computes a tensor from parameters at every call, as torch's old weight norms do: ``weight``.

    Their parameters are called ``weight_g`` and ``weight_v``, or ``weight_orig``.
    """
    hooked = isinstance(value, torch.Tensor) and module._forward_pre_hooks
    return bool(hooked) and any(key.startswith(f"{name}_") for key in module._parameters)


# -- layouts -----------------------------------------------------------------------------------------------------------
Layout = tuple[int, ...] | str | None
GAPS = "gaps"


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the order of a tensor's dimensions in memory; None: it is contiguous, `GAPS`: it is not dense."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else GAPS


def empty_in_layout(layout: Layout, shape: Sequence[Any], **options: Any) -> torch.Tensor:
    """Return an empty tensor whose memory has a layout of `layout_of`."""
    if layout is None:
        return torch.empty(shape, **options)
    if isinstance(layout, str):
        return torch.empty([*shape, 2], **options)[..., 0]
    permuted = torch.empty([shape[dim] for dim in layout], **options)
    return permuted.permute([layout.index(dim) for dim in range(len(layout))])


def one_tensor(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each leaf the position of the first leaf that is the same tensor; its own for other values."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), position) if isinstance(leaf, torch.Tensor) else position
        for position, leaf in enumerate(leaves)
    )


def as_called(sample: Sample) -> Sample:
    """Return a sample as a recording, which has gradients on, takes it: without them leaves may be changed in place."""
    if torch.is_grad_enabled():
        return sample

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not (leaf.requires_grad and leaf.is_leaf) or leaf.is_inference():
            return leaf
        return leaf.view_as(leaf)

    with torch.enable_grad(), torch.inference_mode(False):
        args, kwargs = mapped(taken, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)
