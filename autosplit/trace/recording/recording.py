"""What a recorder writes down: calls, and the values that they take and give."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import map_aggregate

from autosplit.errors import OWN, TraceError, is_internal
from autosplit.trace.inputs.objects import Layout, Structure, layout_of
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.trace.recording.random_watch import Draw

VALUE_READS = frozenset(
    "__bool__ item tolist __int__ __float__ __index__ __complex__ numpy __array__ is_nonzero equal allclose "
    "__contains__".split()
)
GRADIENT_CALLS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad backward grad".split())
OBSERVES = "it observes gradients"
"""Why a module sees the whole batch that hangs something on the graph of autograd: it wants a whole gradient, once."""
NESTED = "makes a nested tensor, which has no shape; pad and mask instead"
"""Why a model is not recorded, not even around a module: a stage that runs again in its backward compares shapes."""
_TORCH = str(Path(torch.__file__).parent)
_DECORATORS = str(contextlib.__file__)


class Refusal(TraceError):
    """Something in the own Python of one module cannot be recorded; ``module`` is its qualified name, "" the root's.

    ``whole`` says why that Python must see the whole batch at once, or is "".
    """

    def __init__(self, message: str, module: str, *, whole: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.whole = whole


class FirstCall(TraceError):
    """The model makes its own parameters, buffers or modules when it is called; ``names`` are those that it made."""

    def __init__(self, names: Sequence[str]) -> None:
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        super().__init__(
            f"the model's parameters, buffers or modules are made or taken away by its forward ({listed}), so it "
            "cannot be planned before that: call the model once on a batch first"
        )


class Unexpected(Exception):
    """The model raised ``error`` while it was recorded, out of ``module``."""

    def __init__(self, error: Exception, module: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.module = module


@dataclasses.dataclass(frozen=True)
class Ref:
    """The result of the recorded call with this index."""

    index: int


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A parameter, buffer, module or constant by its name."""

    name: str


@dataclasses.dataclass
class Call:
    """One recorded call; ``kind`` is input, module, function, project or read."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    name: str
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    dtypes: list[torch.dtype] = dataclasses.field(default_factory=list)
    layouts: list[Layout] = dataclasses.field(default_factory=list)
    reads: list[str] = dataclasses.field(default_factory=list)
    writes: list[str] = dataclasses.field(default_factory=list)
    views: list[str] = dataclasses.field(default_factory=list)
    """Parameters and buffers that the call takes a view of, or writes to through a view."""
    leaf: str | None = None
    """The leaf module that the call runs, also when it is wrapped in an ambient state."""
    random: bool = False
    draws: tuple[Draw, ...] | None = ()
    """What it draws, in order; None where that cannot be told beforehand."""
    mutates: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the storages that this call changes in place."""
    storages: list[int] = dataclasses.field(default_factory=list)
    reads_storages: list[int] = dataclasses.field(default_factory=list)
    source: str = ""
    """Where the model's code made the call: ``file:line``."""
    whole: str = ""
    """Why the call must see the whole batch at once, or "": it reads single values, counts its calls, ..."""

    def note(self, tensor: torch.Tensor, storage: int) -> None:
        """Add a tensor that the call gives, and the number of its storage."""
        self.shapes.append(tuple(tensor.shape))
        self.dtypes.append(tensor.dtype)
        self.layouts.append(layout_of(tensor))
        self.storages.append(storage)


@dataclasses.dataclass
class Recording:
    """All calls of one run, the constants that they use and the model's output."""

    calls: list[Call]
    constants: dict[str, Any]
    output: list[Any]
    unflatten: Structure
    changed: frozenset[tuple[str, str]] = frozenset()
    """Where the run changed Python state; see :mod:`autosplit.trace.borrowed.side_effects`."""
    inside: Mapping[str, frozenset[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    """Where opaque modules that see the whole batch changed Python state themselves, by their paths."""
    kept: int = 0
    """How many of the last outputs are tensors that the run left there."""
    logged: int = 0
    """How many of those, the last ones, stand for numbers in logs."""
    asks_grad_mode: str = ""
    """Where the forward asked whether gradients are on: ``file:line``; "" where it did not."""
    checkpoints: bool = False
    """Whether the forward ran anything under `torch.utils.checkpoint`."""


class Differs(Exception):
    """Two nested values do not have the same structure, or leaves that do not go together."""


def mapped_together(function: Callable[..., Any], *values: Any) -> Any:
    """Return nested arguments with ``function`` of the leaves at each place; raises Differs where structures differ."""
    if len({repr(map_aggregate(value, lambda _: None)) for value in values}) > 1:
        raise Differs("lists or dicts of other entries")
    leaves = zip(*map(leaves_in, values), strict=True)
    return map_aggregate(values[0], lambda _: function(*next(leaves)))


def leaves_in(value: Any) -> list[Any]:
    """Return the leaves of nested arguments."""
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


def refs_in(value: Any) -> list[Ref]:
    """Return the references inside nested arguments."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Ref)]


@functools.cache
def is_foreign(file: str) -> bool:
    """Tell whether code is torch's, the recorder's or made at run time: neither the model's nor that of its package."""
    return file.startswith((OWN, _TORCH, _DECORATORS, "<"))


def is_fault(error: Exception) -> bool:
    """Tell whether an exception out of a run of the model is a fault of the recorder's own.

    Operations of the model run in frames of the recorder; what torch's C++ raises there is an error of other kinds.
    """
    return isinstance(error, (AssertionError, AttributeError, KeyError, NameError)) and is_internal(error)


def source_line() -> str:
    """Return ``file:line`` of the innermost caller that is neither torch's code nor the recorder's; "" when none is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_foreign(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def raised_line(error: BaseException) -> str:
    """Return ``file:line`` of the innermost code that an error came through, as `source_line` does for callers."""
    lines = (
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not is_foreign(frame.f_code.co_filename)
    )
    return next(reversed([*lines]), "")


def where(path: str) -> str:
    """Return a module's path in words."""
    return f"module {path!r}" if path else "the model's own forward"


def under(ambient: GradAutocastState, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in the grad mode and autocast state in which it was recorded."""
    with torch.set_grad_enabled(ambient.grad):
        if not ambient.autocast:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for state in ambient.autocast:
                stack.enter_context(torch.autocast(state.device_type, dtype=state.dtype, enabled=state.enabled))
            return function(*args, **kwargs)


def by_name(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of a Python function, defaults included, in its order."""
    defaults = _defaults(function)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


@functools.cache
def _defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def invoke(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that has no importable name of its own."""
    return function(*args, **kwargs)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call a custom ``torch.autograd.Function`` as one operation, with its own backward."""
    return function.apply(*args)


def run_checkpointed(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Call what a reentrant checkpoint calls, given as to `torch.utils.checkpoint.CheckpointFunction`.

    There are no gradients behind it unless a tensor that it is given requires one.
    """
    wanted = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
        return function(*args)


def assign_buffer(buffers: dict[str, torch.Tensor | None], name: str, value: torch.Tensor) -> None:
    """Put a new tensor in a buffer's place, as the model did (``self.ema = ...``), in its module's table."""
    buffers[name] = value
