"""Which names a function's code uses: as globals, as attributes of Python modules, and as attributes of anything.

``co_names`` holds all of them together, so that an attribute ``self.step`` looked like a global ``step``; here the
instructions tell them apart.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_GLOBAL = frozenset(f"{verb}_{kind}" for verb in ("LOAD", "STORE", "DELETE") for kind in ("GLOBAL", "NAME"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_BY_TEXT = frozenset("getattr vars __dict__ __getattribute__ attrgetter methodcaller eval exec globals".split())
"""Names of what reaches attributes by text that the code need not contain."""
_STORES = frozenset(f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in ("GLOBAL", "NAME", "ATTR"))
_LOADS = frozenset(f"LOAD_{kind}" for kind in ("GLOBAL", "NAME", "DEREF", "ATTR", "METHOD"))
_METHODS = frozenset("append appendleft extend update add insert pop popleft remove setdefault clear".split())
"""Methods that change the entries of a container."""
_KNOWN, _INSTALLED = ("torch", "autosplit", "cost_models"), ("site-packages", "dist-packages")


class Names(NamedTuple):
    """The names in a function's code, and in functions that it defines.

    Attributes:
        globals: those that it loads, stores or deletes as globals, each with the attributes that it takes of it in a
            row: ``settings.model.depth`` is ("settings", ("model", "depth")).
        mentioned: all names and all texts that may be names.
        imported: the modules that it imports.
    """

    globals: tuple[tuple[str, tuple[str, ...]], ...]
    mentioned: frozenset[str]
    imported: tuple[str, ...]

    @property
    def by_text(self) -> bool:
        """Whether the code may reach attributes whose names it does not contain."""
        return not self.mentioned.isdisjoint(_BY_TEXT)


class Assigned(NamedTuple):
    """What a function's code may change of the values that it reaches.

    Attributes:
        values: names of what it assigns or deletes, or changes by a method.
        containers: names of containers whose entries it may change.
    """

    values: frozenset[str]
    containers: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names that a function's code uses."""
    names: dict[tuple[str, tuple[str, ...]], None] = {}
    mentioned: set[str] = set()
    imported: list[str] = []
    for inner in _codes(code):
        mentioned.update(inner.co_names, *map(_texts, inner.co_consts))
        name, attributes = "", list[str]()
        for step in dis.get_instructions(inner):
            if name and step.opname in _ATTRIBUTE:
                attributes.append(step.argval)
                continue
            if name:
                names[name, tuple(attributes)] = None
            name, attributes = (step.argval if step.opname in _GLOBAL else ""), []
            if step.opname == "IMPORT_NAME":
                imported.append(step.argval)
    return Names(tuple(names), frozenset(mentioned), tuple(imported))


@functools.lru_cache(maxsize=1024)
def changes_in(code: types.CodeType) -> Assigned:
    """Return what a function's code may change; its own variables do not count."""
    values, containers = set[str](), set[str]()
    for inner in _codes(code):
        names = {*inner.co_names, *inner.co_freevars, *inner.co_varnames}
        for before, step in itertools.pairwise(dis.get_instructions(inner)):
            name = str(step.argval)
            if step.opname in _STORES or (step.opname == "STORE_DEREF" and name in inner.co_freevars):
                values.add(name)
            elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
                containers |= names
            elif step.opname in _ATTRIBUTE and (name in _METHODS or (name[-1:] == "_" != name[-2:-1])):
                if before.opname in _LOADS:
                    values.add(before.argval)
                elif name in _METHODS and before.opname.startswith(("LOAD_FAST", "BINARY_SUBSCR")):
                    containers |= names
    return Assigned(frozenset(values), frozenset(containers))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _texts(constant: object) -> list[str]:
    """Return the texts of a constant that may be names of attributes."""
    parts = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
    return [text for text in parts if isinstance(text, str) and text.isidentifier()]


@functools.lru_cache(maxsize=1024)
def names_of_installed(kind: type) -> Names:
    """Return the names that the functions of an object's classes use, of those that are of installed packages."""
    kinds = [base for base in kind.__mro__[:-1] if is_installed(base.__module__)]
    return Names((), frozenset().union(*map(_mentioned_in_methods, kinds)), ())


@functools.lru_cache(maxsize=1024)
def _mentioned_in_methods(kind: type) -> frozenset[str]:
    members = (getattr(member, "fget", getattr(member, "__func__", member)) for member in vars(kind).values())
    every = [names_in(member.__code__) for member in members if isinstance(member, types.FunctionType)]
    return frozenset().union(*(names.mentioned for names in every))


def is_installed(name: Any) -> bool:
    """Tell whether a Python module is of Python, torch, this project or an installed package."""
    return _is_installed_package(str(name).partition(".")[0])


@functools.lru_cache(maxsize=1024)
def _is_installed_package(name: str) -> bool:
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    library = name in sys.stdlib_module_names and name != "__main__"
    return library or name in _KNOWN or any(folder in file for folder in _INSTALLED)
