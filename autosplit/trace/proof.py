"""What was proved of a recording, to be carried by a plan: proved once, it is not proved again.

The value probe and the check against the model run on real values and cost several forwards and backwards. Both are
about a recording and the Python that it was made of. Where a later recording is the same graph, made by the same files
in the same modes, what they found holds for it too. Where anything is another, or cannot be told, all is proved anew.
Of a library its version counts, of any other module its file and the files of what it imports.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from autosplit.trace.borrowed.names import is_installed
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.trace.recording.build import RawGraph
from autosplit.trace.recording.gather import Gathered
from autosplit.trace.recording.run import FlatInputs
from autosplit.trace.scope import has_hooks, has_module_hooks

_LARGE = 1 << 24
"""Bytes of a constant above which it is not looked at."""
_PROBE = 5
"""What the value probe asks; proofs of another one do not count."""
_ADDRESS = " at 0x"


class _Unknown(Exception):
    """Raised for a value that cannot be identified in another process."""


def identity(model: nn.Module, flat: FlatInputs, gathered: Gathered, raw: RawGraph) -> str | None:
    """Return a hash of a recording and of all that its proof was about; None where that cannot be told.

    That is so for models with hooks, with modules that stay whole, with functions of the user's that are one operation
    or with value reads, on the meta device or on several devices, and for values that have no text of their own.
    ``raw`` is the graph that the value probe runs.
    """
    scope, modules = gathered.scope, list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    if scope.opaque or scope.blocks or scope.answers or has_module_hooks():
        return None
    if any(has_hooks(module) or "forward" in vars(module) for module in modules):
        return None
    if any(tensor.is_meta for tensor in tensors) or len({tensor.device for tensor in tensors}) > 1:
        return None
    try:
        text = "\n".join(_parts(model, flat, gathered, raw))
    except Exception:  # _Unknown, or whatever an object of the model's own does when it is looked at
        return None
    return None if _ADDRESS in text else hashlib.sha256(text.encode()).hexdigest()[:32]


def _parts(model: nn.Module, flat: FlatInputs, gathered: Gathered, raw: RawGraph) -> Iterator[str]:
    files = _Files()
    state = GradAutocastState.current(), torch.get_default_dtype()
    yield f"torch {torch.__version__} {state} {gathered.min_rows} {_PROBE}"
    yield f"{flat.batch_dims} {flat.names} {flat.spec} {sorted(gathered.scope.entered)} {model}"
    for leaf in flat.leaves:
        tensor = isinstance(leaf, torch.Tensor)
        yield f"{leaf.requires_grad} {leaf.dtype} {leaf.device}" if tensor else repr(leaf)
    ties: dict[int, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        files.add(type(module))
        held = {**module._parameters, **module._buffers}
        kinds = {name: tensor if tensor is None else _kind(tensor, ties) for name, tensor in held.items()}
        yield f"{path} {type(module).__qualname__} {module.training} {kinds}"
    for node in raw.graph.nodes:
        info = node.meta.get(INFO)
        map_aggregate((node.args, node.kwargs), _known)
        yield f"{node.format_node()} {info and replace(info, source='')}"
        target: Any = raw.root.__dict__.get(str(node.target)) if node.op == "get_attr" else node.target
        if isinstance(target, torch.Tensor):
            yield _contents(target)
        elif callable(target):
            _known(target)
            files.add(target)
            yield f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
        else:
            yield repr(target)
    yield from files.texts()


def _known(value: Any) -> Any:
    """Raise _Unknown for a class or function of the user's that a node calls: it may read any global of theirs."""
    is_code = callable(value) and not isinstance(value, fx.Node)
    if is_code and _version(str(getattr(value, "__module__", None) or "builtins")) is None:
        raise _Unknown
    return value


def _kind(tensor: torch.Tensor, ties: dict[int, int]) -> tuple[Any, ...]:
    """Return what a recording sees of a parameter or buffer."""
    tie = ties.setdefault(id(tensor), len(ties))
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tie


def _contents(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() * tensor.element_size() > _LARGE:
        raise _Unknown
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{_kind(tensor, {})} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"


class _Files:
    """The files of classes and functions, of what they import, and the versions of libraries."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a class or a function; raises _Unknown for one of the user's that is made anew in each call."""
        home = str(getattr(value, "__module__", None) or "builtins")
        if "<" in getattr(value, "__qualname__", "") and _version(home) is None:
            raise _Unknown
        self.modules.add(home)

    def texts(self) -> Iterator[str]:
        """Yield versions and the contents of files, in the order of the modules' names."""
        texts: dict[str, str] = {}
        todo = list(self.modules)
        while todo:
            name = todo.pop()
            if name in texts:
                continue
            version = _version(name)
            texts[name] = version or hashlib.sha256(Path(str(sys.modules[name].__file__)).read_bytes()).hexdigest()
            if version is None:
                namespace = vars(sys.modules[name])
                parts = [value for key, value in namespace.items() if key.isidentifier() and not key.startswith("__")]
                homes = {p.__name__ if isinstance(p, types.ModuleType) else getattr(p, "__module__", "") for p in parts}
                todo += [home for home in homes if isinstance(home, str) and home in sys.modules]
        yield from (f"{name} {text}" for name, text in sorted(texts.items()))


def _version(module: str) -> str | None:
    """Return the version of the library that a module belongs to; None where it is somebody's own code."""
    top = module.partition(".")[0]
    if not is_installed(top):
        return None
    if top in sys.stdlib_module_names:
        return platform.python_version()
    return str(
        _PROBE if top == __name__.partition(".")[0] else getattr(sys.modules.get(top), "__version__", "installed")
    )
