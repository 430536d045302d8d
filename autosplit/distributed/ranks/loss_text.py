"""What a loss is and holds, as text that is the same in every process: ranks compare it."""

from __future__ import annotations

import enum
import re
import types
import zlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.distributed.facts import checksum
from autosplit.trace.borrowed.contents import Holder
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.names import Assigned, changes_in
from autosplit.trace.borrowed.values import ATOMIC, ENTRIES, WRAPPERS, is_apart, parts_of, referent

_MODULES = 64
"""The largest number of modules in one with parameters that is walked through."""
_PLAIN = (*ATOMIC, enum.Enum, np.generic, range, slice)
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CHECKSUMS: Any = WeakIdKeyDictionary()
"""Version and checksum of the tensors that losses hold."""


class LossText:
    """What ranks say of a loss, except for what it changes itself: it runs on some of them only.

    Attributes:
        lines: names and texts of what is the same on all ranks.
        tensors: the texts of tensors, by their names; without those that may hold a value for each row.
        of_rows: the texts of the latter, the same on the ranks of a replica.
    """

    def __init__(self, loss_fn: Any, rows: int, model: nn.Module) -> None:
        """``model`` is the pipe's, whose state is not the loss's own; tensors of ``rows`` rows may be of the batch."""
        self.lines: list[tuple[str, str]] = []
        self.tensors: dict[str, str] = {}
        self.of_rows: list[str] = []
        self._rows, self._modules = rows, {id(module) for module in model.modules()}
        self._elsewhere = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._map = Holders((), (loss_fn,), self._modules)
        self._walked = {id(function) for function in self._map.functions}
        self._changes = _changes_of(self._map.functions)
        self.lines.append(("loss_fn", self._text("loss_fn", loss_fn)))
        for holder in self._map.found:
            content = holder.read()
            for key, value in self._entries(holder, content):
                name = holder.place_of(str(key) if isinstance(content, dict) else None)[1]
                name = name.replace("a function", "loss_fn")  # as the map calls an object that was given as one
                self.lines.append((name, self._text(name, value)))
        self.lines.sort(key=lambda line: line[0])

    def _entries(self, holder: Holder, content: Any) -> list[tuple[Any, Any]]:
        """Return what the loss reads of a content and does not change, by its code: all ranks find the same."""
        words = set(re.findall(r"\w+", holder.name.removeprefix(holder.place[1].removeprefix("class "))))
        is_container = not holder.attributes and not holder.cell
        changed = words & (self._changes.values | (self._changes.containers if is_container else set()))
        if (
            changed or isinstance(content, bytes) or len(content) > ENTRIES
        ):  # bytes are of arrays, told where they stand
            return []
        entries = self._map.entries(holder, content)
        if not holder.attributes:
            return entries
        is_called = any("__call__" in vars(base) for base in type(holder.owner).__mro__)
        entries = [(key, value) for key, value in entries if key not in self._changes.values]
        return [
            (k, v) for k, v in entries if is_called or self._map.may_name(k)
        ]  # a logger's are its own class's matter

    def _text(self, name: str, value: Any) -> str:
        """Return a value's text; those of tensors in it are added by their names."""
        value = referent(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value.copy())
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
            return "a tensor"
        if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
            return "a device"
        if isinstance(value, frozenset):
            return str(sorted(self._text(name, item) for item in value))
        if isinstance(value, _PLAIN):
            return _ADDRESS.sub("", repr(value))
        if isinstance(value, types.FunctionType):
            text = f"{value.__qualname__}, code {_digest(value.__code__)}"
            if id(value) in self._walked:
                return text
            self._walked.add(id(value))  # of a library, whose closure the map has not
            return self._with_parts(text, name, value)
        if isinstance(value, (tuple, *WRAPPERS)):
            return self._with_parts(f"{type(value).__name__}", name, value)
        if isinstance(value, nn.Module) and not self._map.has(value) and is_apart(value, self._modules):
            self._add_module(name, value)
        named = isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType))
        return str(value.__name__) if named else type(value).__qualname__

    def _with_parts(self, text: str, name: str, value: Any) -> str:
        parts = parts_of(value, ()) or ()
        return f"{text}({', '.join(self._text(f'{name}.{key}', item) for key, item in parts)})"

    def _add_tensor(self, name: str, value: torch.Tensor) -> None:
        if id(value) in self._elsewhere or value.is_meta:
            return
        if value.dim() and value.size(0) == self._rows:
            self.of_rows.append(f"{name}: {_text_of(value)}")
        else:
            self.tensors[name] = _text_of(value)

    def _add_module(self, name: str, value: nn.Module) -> None:
        """Add what a module with parameters is, which the map leaves to who trains them."""
        for path, module in islice(value.named_modules(prefix=name), _MODULES):
            forward: Any = type(module).forward
            changed = _changes_of([forward]).values
            self.lines.append((path, self._text(path, forward)))
            for key, attribute in vars(module).items():
                if isinstance(attribute, (*_PLAIN, tuple)) and key not in changed:
                    self.lines.append((f"{path}.{key}", self._text(f"{path}.{key}", attribute)))
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            if id(tensor) not in self._elsewhere and not tensor.is_meta:
                self.lines.append((f"{name}.{key}", _text_of(tensor)))


def _changes_of(functions: Iterable[Any]) -> Assigned:
    """Return what functions change when they are called; an object is made once, before."""
    called = (f for f in functions if isinstance(f, types.FunctionType) and f.__name__ != "__init__")
    every = [changes_in(function.__code__) for function in called]
    return Assigned(*(frozenset().union(*(getattr(changes, field) for changes in every)) for field in Assigned._fields))


def _digest(code: types.CodeType) -> int:
    constants = [_digest(value) if isinstance(value, types.CodeType) else value for value in code.co_consts]
    texts = [sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value) for value in constants]
    return zlib.crc32(repr((code.co_code, code.co_names, texts)).encode())


def _text_of(tensor: torch.Tensor) -> str:
    """Return dtype, shape and checksum of a tensor, whose values are read once as long as nobody changes them."""
    version = None if tensor.is_inference() else tensor._version
    before, number = _CHECKSUMS.get(tensor, (None, 0))
    if version is None or before != version:
        number = checksum([tensor], devices=True)
        _CHECKSUMS[tensor] = version, number
    return f"{tensor.dtype}{list(tensor.shape)} with checksum {number}"
