"""A token of a walk through a model: it tells whether another walk would come to the same.

    key_of ─► does the token hold? ─ yes ─► the Key of the last call of this kind, the same object
                                   └─ no ──► a walk through the model ─► its entries in a Key, and the next token

A token asks whether anything was set in the dicts that the walk read, which have versions. A dict of another version,
and what has no version, is read again and compared by identity. A token may be stricter than the walk, never less.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import dict_version

from autosplit.trace.borrowed.contents import Holder
from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.borrowed.hooks import code_of
from autosplit.trace.borrowed.values import is_same_content
from autosplit.trace.inputs.python_state import OutsideValues, held
from autosplit.trace.inputs.signature import ModelWalk, SignatureScope

_TABLES = ("_modules", "_parameters", "_buffers", *HOOK_TABLES)
_PLAIN: dict[str, type] = {"training": object, **dict.fromkeys(_TABLES, dict)}
"""What a plain module has in its ``__dict__``."""
_SPACE, _CODE, _FORM = attrgetter("__dict__"), attrgetter("__code__"), attrgetter("dtype", "shape", "requires_grad")


class _Tensor(weakref.ref[torch.Tensor]):
    """Holds a tensor as it was, weakly."""


class _Dicts:
    """Dicts as they were: their keys, and the values of some; tensors among these are held by weak references."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._contents: list[tuple[tuple[Any, ...], list[Any], list[Any]]] = []
        self.tensors: list[_Tensor] = []

    def watch(self, content: dict[Any, Any], names: Iterable[Any]) -> None:
        """Note what a dict has under some names."""
        self._dicts.append(content)
        self._versions.append(dict_version(content))
        self._contents.append((tuple(content), names := [*names], self.kept(content[name] for name in names)))

    def kept(self, values: Iterable[Any]) -> list[Any]:
        """Return values as `_are` takes them."""
        kept = [_Tensor(value) if isinstance(value, torch.Tensor) else value for value in values]
        self.tensors += [value for value in kept if type(value) is _Tensor]
        return kept

    def are_same(self) -> bool:
        """Tell whether all dicts have the same keys and values."""
        versions = [*map(dict_version, self._dicts)]
        if versions != self._versions:
            moved = map(operator.ne, versions, self._versions)
            for content, (keys, names, kept) in compress(zip(self._dicts, self._contents, strict=True), moved):
                if tuple(content) != keys or not _are(kept, [content[name] for name in names]):
                    return False
            self._versions = versions
        return True


def _are(kept: Sequence[Any], values: Sequence[Any]) -> bool:
    """Tell whether values are the same objects as those that were kept."""
    return len(kept) == len(values) and all(map(_is, kept, values))


def _is(kept: Any, value: Any) -> bool:
    return kept is value or (type(kept) is _Tensor and value is not None and kept() is value)


def _told_and_kept(content: Any) -> tuple[Any, Sequence[Any]]:
    """Return what of a content is told by equality, and the parts that are told by identity."""
    if isinstance(content, dict):
        return tuple(content), [*content.values()]
    return (content, ()) if content is None or isinstance(content, bytes) else (None, [*content])


class Token(ModelWalk):
    """A walk through a model; :meth:`holds` tells whether another one would come to the same."""

    def __init__(self, model: nn.Module, outside: OutsideValues, scope: SignatureScope) -> None:
        self._dicts = _Dicts()
        self._looks: list[tuple[Holder, type, Any, list[Any]]] = []
        self._functions: list[types.FunctionType] = []
        modules = [(path, m, scope.names(path, vars(m))) for path, m in model.named_modules()]
        self._objects: list[Any] = [module for _, module, _ in modules]
        plain = all(isinstance(vars(m).get(name), kind) for m in self._objects for name, kind in _PLAIN.items())
        tables = [(name, vars(m)[name]) for m in self._objects for name in _TABLES if plain]
        self._empty = [table for _, table in tables if not table]
        self._buffers, self._hooks_of = (
            [table for name, table in tables if table and name in names] for names in (("_buffers",), HOOK_TABLES)
        )
        for path, module, names in modules if plain else ():
            self._dicts.watch(vars(module), (*_PLAIN, *(name for name in names if (path, name) not in scope.inside)))
        for name, table in tables:
            if table:
                self._dicts.watch(table, () if name == "_buffers" else table)
        super().__init__(modules, outside, scope)
        self._can_hold = plain and self._note()
        self.contents.clear()  # a token that cannot hold keeps no value alive
        self._told, self._values = self._read(held)
        self._can_hold &= not any(form and form[1] is None for form in self._told[0])

    def _note(self) -> bool:
        """Note what the walk came to in attributes, and in those of parameters; tell whether all of it stays."""
        if any(each.may_be_gone for each in self.contents):
            return False
        self._empty += [space for tensor in self._dicts.tensors if not (space := vars(tensor()))]
        for space, names in self.marks:
            self._dicts.watch(space, names)
        for each in self.contents:
            self._functions += [value for value in each.map.named() if isinstance(value, types.FunctionType)]
            for holder, content in each.read:
                if holder.space is None or content is None:
                    told, parts = _told_and_kept(content)
                    self._looks.append((holder, type(holder.owner), told, self._dicts.kept(parts)))
                else:
                    self._dicts.watch(holder.space, holder.space)
                    self._objects += [] if holder.space is holder.owner else [holder.owner]
        return True

    def _read(self, form: Callable[[torch.Tensor], Any]) -> tuple[list[Any], list[Any]]:
        """Return what has no version: some of it is told by equality, the other by identity."""
        tensors: list[Any] = [*map(operator.call, self._dicts.tensors)]
        buffers, hooks = (chain.from_iterable(map(dict.values, tables)) for tables in (self._buffers, self._hooks_of))
        forms = [*map(form, tensors), *(None if buffer is None else form(buffer) for buffer in buffers)]
        values = [*map(type, self._objects), *map(_SPACE, self._objects), *map(_SPACE, tensors)]
        values += map(_CODE, self._functions)
        return [forms, [*map(tuple, self._hooks_of)], [*map(code_of, hooks)]], values

    def holds(self) -> bool:
        """Tell whether a walk would come to the same, but for what is left out.

        That is not told of modules that are no plain ones, tensors without a shape, and values that may be gone.
        """
        if not self._can_hold or any(self._empty) or not self._dicts.are_same():
            return False
        for holder, kind, told, kept in self._looks:
            told_now, parts = _told_and_kept(holder.look())
            if type(holder.owner) is not kind or told != told_now or not _are(kept, parts):
                return False
        try:
            told, values = self._read(_FORM)
        except RuntimeError:  # a buffer has no shape now
            return False
        return told == self._told and is_same_content(values, self._values) and self.same_outside()
