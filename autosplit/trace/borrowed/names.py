"""Which names a function's code uses: as globals, as attributes of Python modules, and as attributes of anything.

``co_names`` holds all of them together, so that an attribute ``self.step`` looked like a global ``step``; here the
instructions tell them apart.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import NamedTuple

_GLOBAL = frozenset(f"{verb}_{kind}" for verb in ("LOAD", "STORE", "DELETE") for kind in ("GLOBAL", "NAME"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_BY_TEXT = frozenset("getattr vars __dict__ __getattribute__ attrgetter methodcaller eval exec globals".split())
"""Names of what reaches attributes by text that the code need not contain."""


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


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names that a function's code uses."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
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
                found[name, tuple(attributes)] = None
            name, attributes = (step.argval if step.opname in _GLOBAL else ""), []
            if step.opname == "IMPORT_NAME":
                imported.append(step.argval)
    return Names(tuple(found), frozenset(mentioned), tuple(imported))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _texts(constant: object) -> list[str]:
    """Return the texts of a constant that may be names of attributes."""
    parts = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
    return [part for part in parts if isinstance(part, str) and part.isidentifier()]


@functools.lru_cache(maxsize=1024)
def names_in_methods(kind: type) -> Names:
    """Return the names that the functions of a class use, without those of its bases."""
    members = (getattr(member, "fget", getattr(member, "__func__", member)) for member in vars(kind).values())
    every = [names_in(member.__code__) for member in members if isinstance(member, types.FunctionType)]
    return Names((), frozenset().union(*(names.mentioned for names in every)), ())
