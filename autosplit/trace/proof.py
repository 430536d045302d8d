"""What was proved of a recording, to be carried by a plan: proved once, it is not proved again.

The value probe and the check against the model run on real values and cost several forwards and backwards. Both are
about a recording and the Python that it was made of. Where a later recording is the same, call by call, made by the
same files in the same modes, what they found holds for it too. Where anything is another, or cannot be told, all is
proved anew. Of a library its version counts, of any other module its file and the files of what it imports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autosplit.trace.calls import GradAutocastState
from autosplit.trace.formula import Formula
from autosplit.trace.gather import Gathered
from autosplit.trace.recording import Call
from autosplit.trace.run import FlatInputs
from autosplit.trace.scope import has_hooks, has_module_hooks

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, torch.dtype, torch.device)
_PLAIN += (torch.Size, torch.layout, torch.memory_format, np.generic)  # type: ignore[assignment]
_TABLES = frozenset("_parameters _buffers _modules".split())
_LARGE = 1 << 24
"""Bytes of a constant above which it is not looked at."""
_DEPTH = 6
_PROBE = 3
"""What the value probe asks; proofs of another one do not count."""
_INSTALLED = ("site-packages", "dist-packages")


class _Plain:
    """An object that holds nothing but its attributes."""


class _Unknown(Exception):
    """A value of which nothing can be told that holds in another process."""


def identity(model: nn.Module, flat: FlatInputs, gathered: Gathered) -> str | None:
    """Return a hash of a recording and of all that its proof was about; None where that cannot be told.

    That is so for models with hooks, with modules that stay whole or with value reads, on the meta device or on several
    devices, and for arguments or attributes of kinds that have no text of their own.
    """
    scope, tensors = gathered.scope, [*model.parameters(), *model.buffers()]
    if scope.opaque or scope.answers or has_module_hooks():
        return None
    if any(has_hooks(module) for module in model.modules()) or any(tensor.is_meta for tensor in tensors):
        return None
    if len({tensor.device for tensor in tensors}) > 1:
        return None
    files, digest = _Files(), hashlib.sha256()
    try:
        for part in (*_parts(model, flat, gathered, files), *files.texts()):
            digest.update(f"{part}\n".encode())
    except Exception:  # _Unknown, or whatever an object of the model's own does when it is looked at
        return None
    return digest.hexdigest()[:32]


def _parts(model: nn.Module, flat: FlatInputs, gathered: Gathered, files: _Files) -> Iterator[str]:
    texts, merged, scope = _Texts(files), gathered.recording, gathered.scope
    state = GradAutocastState.current(), torch.get_default_dtype()
    yield f"torch {torch.__version__} {state} {gathered.min_rows} {_PROBE}"
    yield f"{flat.batch_dims} {flat.names} {flat.spec} {sorted(scope.entered)}"
    for leaf in flat.leaves:
        wanted = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        yield f"{wanted} {leaf.dtype} {leaf.device}" if isinstance(leaf, torch.Tensor) else texts.of(leaf)
    ties: dict[int, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        files.add(type(module))
        yield f"{path} {type(module).__qualname__}"
        for key, value in vars(module).items():
            if key in _TABLES:
                kinds = [(n, t if t is None else _kind(t, ties)) for n, t in value.items()] if key[1] != "m" else []
                yield f"{key} {kinds}"
            elif not key.startswith("_") or value:
                yield f"{key} {texts.of(value)}"
    for entry in merged.calls:
        yield f"{texts.of(entry.args)} {texts.of(entry.kwargs)} {entry.tensors} {texts.call(entry.call)}"
    yield f"{texts.of(merged.output)} {merged.lengths}"
    for name, value in merged.recording.constants.items():
        yield f"{name} {texts.of(value)}"


def _kind(tensor: torch.Tensor, ties: dict[int, int]) -> tuple[Any, ...]:
    """Return what a recording sees of a parameter or buffer."""
    tie = ties.setdefault(id(tensor), len(ties))
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tie


class _Texts:
    """Values as text without addresses; functions and classes add their files."""

    def __init__(self, files: _Files) -> None:
        self.files = files

    def call(self, call: Call) -> str:
        """Return a recorded call without its place in the source."""
        told = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
        return self.of({name: value for name, value in told.items() if name not in ("args", "kwargs", "source")})

    def of(self, value: Any, depth: int = _DEPTH) -> str:
        """Return a value as text; raises _Unknown for what has none."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if depth == 0:
            raise _Unknown
        if isinstance(value, slice):
            return f"slice{self.of((value.start, value.stop, value.step), depth - 1)}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}[{', '.join(self.of(item, depth - 1) for item in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__}{sorted(self.of(item, depth - 1) for item in value)}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.of(k, depth - 1)}: {self.of(v, depth - 1)}' for k, v in value.items())}}}"
        if isinstance(value, torch.Tensor):
            return self._contents(value)
        if isinstance(value, Formula):
            return f"{getattr(value.function, '__name__', '')}{self.of(value.operands, depth - 1)}"
        if callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__name__"):
            self.files.add(value)
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        return self._fields(value, depth)

    def _fields(self, value: Any, depth: int) -> str:
        plain = hasattr(value, "__dict__") and type(value).__basicsize__ == _Plain.__basicsize__
        if isinstance(value, nn.Module) or not plain:
            raise _Unknown  # what it holds outside of its attributes cannot be seen
        self.files.add(type(value))
        return f"{type(value).__qualname__}{self.of(vars(value), depth - 1)}"

    def _contents(self, tensor: torch.Tensor) -> str:
        size_bytes = tensor.numel() * tensor.element_size()
        if tensor.is_meta or tensor.layout is not torch.strided or size_bytes > _LARGE:
            raise _Unknown
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{_kind(tensor, {})} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"


class _Files:
    """The files of classes and functions, of what they import, and the versions of libraries."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a class or a function; raises _Unknown for one that is made anew in each call of another one."""
        if "<" in getattr(value, "__qualname__", ""):
            raise _Unknown
        self.modules.add(str(getattr(value, "__module__", None) or "builtins"))

    def texts(self) -> Iterator[str]:
        """Yield versions and the contents of files, in the order of the modules' names."""
        found: dict[str, str] = {}
        todo = list(self.modules)
        while todo:
            name = todo.pop()
            if name in found:
                continue
            version = _version(name)
            found[name] = version or hashlib.sha256(Path(str(sys.modules[name].__file__)).read_bytes()).hexdigest()
            if version is None:
                own = vars(sys.modules[name])
                parts = [value for key, value in own.items() if key.isidentifier() and not key.startswith("__")]
                homes = {p.__name__ if isinstance(p, types.ModuleType) else getattr(p, "__module__", "") for p in parts}
                todo += [home for home in homes if isinstance(home, str) and home in sys.modules]
        yield from (f"{name} {text}" for name, text in sorted(found.items()))


def _version(module: str) -> str | None:
    """Return the version of the library that a module belongs to; None where it is somebody's own code."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None if top == "__main__" else platform.python_version()
    if top == __name__.partition(".")[0]:
        return str(_PROBE)
    package = sys.modules.get(top)
    installed = any(part in (getattr(package, "__file__", None) or "") for part in _INSTALLED)
    return str(getattr(package, "__version__", "installed")) if installed else None
