"""Signatures of calls: a walk through the model, and a token of what it came to.

    key_of ─► does a token hold? ─ yes ─► the Key of the last call of this kind, the same object
                                 └─ no ──► a walk through the model ─► its entries in a Key, and the next token

A token asks what the walk read whether anything was set in it: dicts have versions. What has none is read again, and so
is a dict whose version is another one, and compared by identity. It may be stricter than the walk, never less strict.

Private torch API, by which its own guards tell that a dict is as it was: ``torch._C._dynamo.guards.dict_version``;
tried on torch 2.13.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import dict_version

from autosplit.trace.borrowed.holders import HOOK_TABLES, Place
from autosplit.trace.borrowed.hooks import code_of
from autosplit.trace.borrowed.values import is_same_content, space_of
from autosplit.trace.inputs.python_state import Look, OutsideValues, Walk, content, held, look
from autosplit.trace.inputs.signature import Call, Key, ModelWalk, Rest, Scope

_KEPT = 32
"""How many signatures are remembered."""
_TOKENS = 4
"""How many tokens: for a model in training and in eval mode, say."""
_SPACE, _FORM = attrgetter("__dict__"), attrgetter("dtype", "shape", "requires_grad")
_TABLES = ("_modules", "_parameters", "_buffers", *HOOK_TABLES)
_PLAIN = {"training": object, **dict.fromkeys(_TABLES, dict)}
"""What a plain module has in its ``__dict__``."""


class Signatures:
    """Gives calls of a model their signatures; calls that are alike get the same object."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.outside = model, OutsideValues()
        self._tokens: list[Token] = []
        self._kept: Callable[[Key], Key] = functools.lru_cache(_KEPT)(_itself)

    def key_of(self, leaves: Sequence[Any], spec: Any, scope: Scope) -> Key:
        """Return a call's signature from the flattened inputs and their structure.

        It covers grad mode and autocast; each module's type, mode, children, hooks and attributes; the parameters' and
        buffers' dtypes, shapes and ties; the values outside of the modules that functions and classes name; the inputs'
        structure, shapes, dtypes, devices, layouts and constants, and which of them are one tensor.
        """
        token = next((token for token in self._tokens if token.scope is scope and token.holds()), None)
        token = token or Token(self.model, self.outside, scope)
        if token.can_hold and self._tokens[:1] != [token]:
            self._tokens = [token, *(other for other in self._tokens if other is not token)][:_TOKENS]
        return token.key(Call.of(leaves, spec), self._kept)


def _itself(key: Key) -> Key:
    return key


class _Dicts:
    """Dicts as they were: their keys, and the values of some; tensors among these are held by weak references."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._contents: list[tuple[Sequence[Any], Sequence[Any], list[Any]]] = []
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def watch(self, content: dict[Any, Any], names: Iterable[Any]) -> None:
        """Note what a dict has under some names."""
        self._dicts.append(content)
        self._versions.append(dict_version(content))
        self._contents.append((tuple(content), names := [*names], self.kept(content[name] for name in names)))

    def kept(self, values: Iterable[Any]) -> list[Any]:
        """Return values as `_are` takes them."""
        kept = [weakref.ref(value) if isinstance(value, torch.Tensor) else value for value in values]
        self.tensors += [one for one in kept if type(one) is weakref.ref]
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
    return kept is value or (type(kept) is weakref.ref and value is not None and kept() is value)


class Token:
    """A walk through a model; :meth:`holds` tells whether another one would come to the same.

    Attributes:
        can_hold: whether that can be told: modules are plain ones, no tensor is without a shape, nothing may be gone.
    """

    def __init__(self, model: nn.Module, outside: OutsideValues, scope: Scope) -> None:
        self.scope, self._outside = scope, outside
        self._keys: dict[Call, Key] = {}
        self._last: tuple[Call | None, Key | None] = (None, None)
        self._inside: list[tuple[Place, dict[str, Any]]] = []
        self._looks: list[tuple[Any, Look, list[Any]]] = []
        self._dicts = _Dicts()
        paths = [(path, module, self._names(path, vars(module))) for path, module in model.named_modules()]
        self._objects: list[Any] = [module for _, module, _ in paths]
        plain = all(isinstance(vars(m).get(name), kind) for m in self._objects for name, kind in _PLAIN.items())
        tables = [(name, vars(module)[name]) for module in self._objects for name in _TABLES if plain]
        self._empty = [table for _, table in tables if not table]
        self._buffers, self._hooks = (
            [table for name, table in tables if table and name in names] for names in (("_buffers",), HOOK_TABLES)
        )
        for _, module, names in paths if plain else ():
            self._dicts.watch(vars(module), (*_PLAIN, *names))
        for name, table in tables:
            if table:
                self._dicts.watch(table, () if name == "_buffers" else table)
        self._walk = ModelWalk(paths, outside, scope)
        looked = [*self._walk.looked.values()]
        self._note(filter(None, looked))
        self._walk.looked.clear()
        self._told, self._values = self._read(held)
        self.can_hold = (
            plain and None not in looked and all(form is None or form[1] is not None for form in self._told[0])
        )

    def _names(self, path: str, space: dict[str, Any]) -> list[str]:
        """Return the attributes of a module that are looked at; note those that opaque modules change."""
        names = self.scope.names(path, space)
        self._inside += [((path, name), space) for name in names if (path, name) in self.scope.inside]
        return [name for name in names if (path, name) not in self.scope.inside]

    def _note(self, looked: Iterable[tuple[Any, Look]]) -> None:
        """Note what the walk came to in attributes, and in those of parameters."""
        self._empty += [space for tensor in self._dicts.tensors if not (space := vars(tensor()))]
        for space, names in self._walk.marks:
            self._dicts.watch(space, names)
        for value, known in looked:
            content = space_of(value)
            if content is not None and is_same_content(known.parts, [*content.values()]):
                self._dicts.watch(content, content)
                self._objects += [] if content is value else [value]
            else:
                self._looks.append((value, known._replace(parts=()), self._dicts.kept(known.parts)))

    def _read(self, form: Callable[[torch.Tensor], Any]) -> tuple[list[Any], list[Any]]:
        """Return what has no version: some of it is told by equality, the other by identity."""
        tensors = [*map(operator.call, self._dicts.tensors)]
        buffers, hooks = (chain.from_iterable(map(dict.values, tables)) for tables in (self._buffers, self._hooks))
        forms = [*map(form, tensors), *(None if buffer is None else form(buffer) for buffer in buffers)]
        values = [*map(type, self._objects), *map(_SPACE, self._objects), *map(_SPACE, tensors)]
        return [forms, [*map(tuple, self._hooks)], [*map(code_of, hooks)]], values

    def holds(self) -> bool:
        """Tell whether a walk would come to the same, but for what is left out."""
        if any(self._empty) or not self._dicts.are_same():
            return False
        for value, known, kept in self._looks:
            now = look(value, self._walk.modules)
            if known != now._replace(parts=()) or not _are(kept, now.parts):
                return False
        try:
            told, values = self._read(_FORM)
        except RuntimeError:  # a buffer has no shape now
            return False
        return told == self._told and is_same_content(values, self._values) and self._walk.same_outside()

    def key(self, call: Call, kept: Callable[[Key], Key]) -> Key:
        """Return the signature of a call; ``kept`` gives an equal one where there is one."""
        left, loose = ([self._content(*one, loose=loose) for one in self._inside] for loose in (False, True))
        left_out, outside = (*self._walk.left_out, *left), (*self._outside.left_out(self.scope.without), *loose)
        key = self._last[1] if self._last[0] == call else self._keys.get(call)
        if key is None:
            rest = Rest(call.modes, self._walk.entries, self._walk.values, call.structure, call.kinds, call.same)
            key = kept(Key(rest, call.shapes, left_out, outside))
            if len(self._keys) >= _KEPT:
                self._keys.clear()
        if (key.left_out, key.outside) != (left_out, outside):
            key = replace(key, left_out=left_out, outside=outside)
        if key is not self._last[1]:
            self._keys[call] = key
        self._last = call, key
        return key

    def _content(self, place: Place, space: dict[str, Any], *, loose: bool) -> tuple[Place, Any]:
        """Return what is left out of an attribute that opaque modules change; what else holds it counts there."""
        return place, content(space[place[1]], Walk(self._walk.modules, {}, loose=loose))
