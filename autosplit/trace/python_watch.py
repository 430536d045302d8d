"""Watch the Python state that a model's forward may keep from call to call, outside of tensors.

what modules hold       lists, dicts, sets, arrays and objects, some levels deep; the modules' classes
what functions name     global variables and those of functions around them, for every function that runs
torch                   its global switches
"""

from __future__ import annotations

import contextlib
import dis
import gc
import logging
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 3
_PLACES = 4000
_SMALL = 128
"""Containers of up to this many entries are looked at after every operation."""
_ARRAY_BYTES = 1 << 20
_OWN = frozenset(nn.Module().__dict__)
_LIBRARIES = frozenset(("torch", "numpy", "autosplit", "cost_models")) | sys.stdlib_module_names
_OPAQUE = (
    *(nn.Module, torch.Tensor, torch.Generator, logging.Logger),
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)


class PythonWatch:
    """Remembers Python state and notes when it is another one."""

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        self.note = note
        self.places: list[tuple[Any, list[Any]]] = []
        self.small: list[tuple[Any, list[Any]]] = []
        self.arrays: list[tuple[Any, bytes]] = []
        self.seen: set[int] = set()
        self.codes: dict[int, types.CodeType] = {}
        self.switches = _switches()
        for module in model.modules():
            for name, value in module.__dict__.items():
                if name not in _OWN:
                    self._collect(value, _DEPTH)
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            if not _is_library(kind.__module__):
                self.places.append((vars(kind), _content(vars(kind))))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Look at every function that this thread calls in here, before it runs."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self.codes:
            return
        self.codes[id(code)] = code
        collects = any(getattr(callback, "__code__", None) is code for callback in gc.callbacks)
        if collects or _is_library(frame.f_globals.get("__name__")) or _is_import(frame):
            return
        if _stores_outside(code):
            self.note(f"{code.co_qualname} writes to variables outside of the model")
        for name in code.co_names:
            self._collect(frame.f_globals.get(name), 1)
        if code.co_freevars:
            around = frame.f_locals
            for name in code.co_freevars:
                self._collect(around.get(name), 1)

    def _collect(self, value: Any, depth: int) -> None:
        if id(value) in self.seen or isinstance(value, _OPAQUE) or depth < 0:
            return
        self.seen.add(id(value))
        if isinstance(value, np.ndarray):
            if value.nbytes > _ARRAY_BYTES:
                self.note("it holds a numpy array that is too large to watch")
            else:
                self.arrays.append((value, value.tobytes()))
            return
        parts: Iterable[Any] = ()
        if isinstance(value, (list, dict, set, deque)):
            self._watch(value)
            parts = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            parts = value
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._watch(own)
            parts = [*parts, *own.values()]
        for part in list(parts):
            self._collect(part, depth - 1)

    def _watch(self, place: Any) -> None:
        content = _content(place)
        if len(self.places) == _PLACES:
            self.note("it holds too many Python containers to watch")
            return
        self.places.append((place, content))
        if len(content) <= _SMALL:
            self.small.append((place, content))

    def look(self, *, closely: bool = False) -> None:
        """Note what has changed; only a close look takes in what is large, and classes."""
        for place, before in self.places if closely else self.small:
            now = _content(place)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                self.note("it changes Python state that it keeps between calls")
                self.places, self.small = [], []
                break
        if any(array.tobytes() != content for array, content in self.arrays):
            self.note("it changes a numpy array that it keeps between calls")
            self.arrays = []
        if self.switches != _switches():
            self.note("it changes torch's global settings")


def _content(place: Any) -> list[Any]:
    return [*place.keys(), *place.values()] if hasattr(place, "keys") else list(place)


def _switches() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), kernels


def _is_library(name: Any) -> bool:
    """Tell whether a module's name is torch's, numpy's, Python's or ours: what they keep is their own matter."""
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _is_import(frame: types.FrameType | None) -> bool:
    """Tell whether a function runs because a module is imported inside the forward, which happens once."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("autosplit."):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


def _stores_outside(code: types.CodeType) -> bool:
    """Tell whether code stores to a global variable, or to one of a function around it."""
    return any(
        step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )
