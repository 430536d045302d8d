"""The Python that a model is made of, as a hash that is equal in two processes where the code is equal.

    class of a module ─► its methods ─► the functions, classes and values that they name ─► what those name ─► ...
    a library ─► its name and version

What stands in a package with a version, torch among them, counts by that version; everything else by its code.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, torch.dtype, torch.device)
_DEPTH = 4


class OwnCode:
    """Collects code; :meth:`text` is the hash of all that was added and of all that it leads to."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._seen: dict[int, Any] = {}

    def text(self) -> str:
        """Return the hash."""
        return self._digest.hexdigest()

    def add(self, value: Any, depth: int = _DEPTH) -> None:
        """Add a class, a function, or a value that a function names."""
        if isinstance(value, _PLAIN):
            self._note(repr(value))
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self._container(value, depth)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            self._object(value, depth)

    def _note(self, text: str) -> None:
        self._digest.update(text.encode())
        self._digest.update(b"\n")

    def _container(self, value: Any, depth: int) -> None:
        self._note(f"{type(value).__name__} of {len(value)}")
        if depth:
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            ordered = sorted(parts, key=repr) if isinstance(value, (set, frozenset)) else parts
            for part in ordered:
                self.add(part, depth - 1)

    def _object(self, value: Any, depth: int) -> None:
        if isinstance(value, types.ModuleType):
            return  # what a function takes of it is added with the function
        kind = value if isinstance(value, type) else getattr(value, "__objclass__", None) or type(value)
        home = str(getattr(value, "__module__", None) or getattr(kind, "__module__", None) or "builtins")
        name = f"{home}.{getattr(value, '__qualname__', kind.__qualname__)}"
        version = _version(home)
        if version is not None:
            self._note(f"{name} {version}")
        elif isinstance(value, types.FunctionType):
            self._function(name, value)
        elif isinstance(value, type):
            self._class(name, value)
        elif isinstance(value, torch.Tensor):
            self._note(f"{value.dtype}{list(value.shape)}")
        else:
            self._note(name)
            self.add(getattr(value, "__func__", None), depth)
            self.add(getattr(value, "fget", None), depth)
            self.add(type(value))

    def _class(self, name: str, value: type) -> None:
        self._note(name)
        for base in value.__mro__[1:]:
            self.add(base)
        for key, member in vars(value).items():
            if not key.startswith("__") or callable(member):
                self._note(key)
                self.add(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)

    def _function(self, name: str, value: types.FunctionType) -> None:
        self._note(name)
        self.add(value.__defaults__)
        self.add(value.__kwdefaults__)
        for cell in value.__closure__ or ():
            self.add(cell.cell_contents if _is_filled(cell) else None)
        for code in _codes(value.__code__):
            self._note(f"{code.co_names} {code.co_varnames}")
            self._digest.update(code.co_code)
            for constant in code.co_consts:
                if not isinstance(constant, types.CodeType):
                    self.add(constant)
            for found in _named(code, value.__globals__):
                self.add(found)


def _named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield what a piece of code names: globals, and what it may take of a module of the model's own."""
    for name in code.co_names:
        if name in names:
            found = names[name]
            yield found
            if isinstance(found, types.ModuleType) and _version(found.__name__) is None:
                yield from (vars(found)[part] for part in code.co_names if part in vars(found))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def _version(module: str) -> str | None:
    """Return the version of the library that a module belongs to; None where it is somebody's own code."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None if top == "__main__" else platform.python_version()
    package = sys.modules.get(top)
    version = getattr(package, "__version__", None)
    installed = any(part in (getattr(package, "__file__", None) or "") for part in _INSTALLED)
    return str(version) if version is not None and installed else None
