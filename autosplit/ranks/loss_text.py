"""What a loss is and holds, as text that is the same in every process: ranks compare it."""

from __future__ import annotations

import dis
import enum
import inspect
import re
import types
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.distributed.facts import checksum

_DEPTH, _ENTRIES = 6, 64
"""How deep a loss is looked into, and how many entries of a container or modules of a module are."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, enum.Enum)
_CHANGES = frozenset("append appendleft extend update add insert pop popleft remove setdefault clear".split())
_CHECKSUMS: Any = WeakIdKeyDictionary()
"""Version and checksum of the tensors that losses hold."""
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?")


class _Names(NamedTuple):
    """What code reads and stores by name."""

    globals: frozenset[str]
    attributes: frozenset[str]
    stored: frozenset[str]
    changes: bool
    """Whether it may change the containers that it reads."""
    digest: int


_NONE = _Names(frozenset(), frozenset(), frozenset(), False, 0)


@lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> _Names:
    """Return the names in code, and in the functions that are defined in it."""
    steps = list(dis.get_instructions(code))
    inner = [_names_of(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    plain = [const for const in code.co_consts if isinstance(const, (*_PLAIN, tuple))]

    def named(field: str, *operations: str) -> frozenset[str]:
        own = frozenset(str(step.argval) for step in steps if step.opname in operations)
        return own.union(*(getattr(each, field) for each in inner))

    attributes = named("attributes", "LOAD_ATTR", "LOAD_METHOD")
    changes = not _CHANGES.isdisjoint(attributes) or any(step.opname == "STORE_SUBSCR" for step in steps)
    return _Names(
        named("globals", "LOAD_GLOBAL", "LOAD_NAME"),
        attributes,
        named("stored", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"),
        changes or any(each.changes for each in inner),
        zlib.crc32(repr((code.co_code, code.co_names, plain, [each.digest for each in inner])).encode()),
    )


@dataclass
class LossText:
    """What ranks say of a loss; those of a replica have ``rows`` rows, and ``elsewhere`` are the pipe's own tensors.

    Attributes:
        rows: the rows that a replica has in one microbatch; -1 where it has several, which no loss holds in one tensor.
        elsewhere: the parameters and buffers of the pipe, by identity.
        lines: what is the same on all ranks.
        tensors: the lines of tensors, by their names; without those that may hold a value for each row.
        of_rows: the lines of the latter, the same on the ranks of a replica.
    """

    rows: int
    elsewhere: Collection[int]
    lines: list[str] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    of_rows: list[str] = field(default_factory=list)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def add(self, name: str, value: Any, names: _Names = _NONE, depth: int = _DEPTH) -> None:
        """Add what a value is, of which code with ``names`` reads attributes."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, _PLAIN):
            if not (isinstance(value, str) and _DEVICE.fullmatch(value)):
                self.lines.append(f"{name} = {value!r}")
        elif type(value).__module__ == "numpy":
            self._add_tensor(name, torch.as_tensor(value))
        elif depth and (id(value), names.digest) not in self._seen:
            self._seen.add((id(value), names.digest))
            if isinstance(value, partial):
                held = {"func": value.func, "args": value.args, "keywords": value.keywords}
                self._add_all(name + ".{}", held, names, depth)
            elif isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
                self._add_function(name, value.__func__, depth, value.__self__)
            elif isinstance(value, types.FunctionType):
                self._add_function(name, value, depth)
            elif isinstance(value, list | dict | set | tuple | frozenset):
                self._add_entries(name, value, names, depth)
            elif isinstance(value, nn.Module):
                self._add_module(name, value, depth)
            elif not getattr(value, "__name__", "").startswith("torch"):
                self._add_object(name, value, names, depth)

    def _add_all(self, form: str, held: Mapping[Any, Any], names: _Names, depth: int) -> None:
        for key, own in islice(held.items(), _ENTRIES):
            self.add(form.format(key), own, names, depth - 1)

    def _add_tensor(self, name: str, value: torch.Tensor) -> None:
        if id(value) in self.elsewhere or value.is_meta:
            return
        if value.dim() and value.size(0) == self.rows:
            self.of_rows.append(f"{name}: {value.dtype}{list(value.shape)}, checksum {checksum([value])}")
        else:
            self.tensors[name] = _text_of(value)

    def _add_entries(self, name: str, value: Any, names: _Names, depth: int) -> None:
        if names.changes and isinstance(value, list | dict | set):
            return
        if isinstance(value, set | frozenset):
            value = sorted(repr(own) for own in value if isinstance(own, _PLAIN))
        self.lines.append(f"{name}: {len(value)} entries")
        self._add_all(name + "[{!r}]", value if isinstance(value, dict) else dict(enumerate(value)), names, depth)

    def _add_function(self, name: str, value: types.FunctionType, depth: int, owner: Any = None) -> None:
        self.lines.append(f"{name}: {value.__qualname__}")
        if "site-packages" in value.__code__.co_filename and value.__closure__ is None:
            return
        names = _names_of(value.__code__)
        self.lines[-1] += f" at line {value.__code__.co_firstlineno}, code {names.digest}"
        held = {key: value.__globals__[key] for key in sorted(names.globals) if key in value.__globals__}
        closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held |= {key: _content(cell) for key, cell in closed}
        held |= {"its defaults": value.__defaults__ or (), "its keywords": value.__kwdefaults__ or {}}
        self._add_all("{}", {key: held[key] for key in held if key not in names.stored}, names, depth)
        if owner is not None:
            self.add(name, owner, names, depth - 1)

    def _add_module(self, name: str, value: nn.Module, depth: int) -> None:
        self.lines.append(f"{name}: {type(value).__qualname__}")
        tensors = dict(value.named_parameters()) | dict(value.named_buffers())
        if any(id(tensor) in self.elsewhere for tensor in tensors.values()):
            return
        self.lines += [f"{name}.{key}: {_text_of(tensor)}" for key, tensor in tensors.items() if not tensor.is_meta]
        for path, module in islice(value.named_modules(prefix=name), _ENTRIES):
            forward = type(module).forward
            names = _names_of(forward.__code__)
            held = {key: own for key, own in vars(module).items() if isinstance(own, (*_PLAIN, list, tuple))}
            kept = {key: own for key, own in held.items() if key not in (*names.stored, "training")}
            self._add_all(path + ".{}", kept, names, depth)
            self._add_function(f"{path}.forward", forward, depth - 1)

    def _add_object(self, name: str, value: Any, names: _Names, depth: int) -> None:
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType) and names.digest != _names_of(call.__code__).digest:
            self._add_function(name, call, depth, value)
        for key in sorted(names.attributes - names.stored):
            own = inspect.getattr_static(value, key, None)
            own = own.fget if isinstance(own, property) else own
            if isinstance(own, types.MemberDescriptorType):
                own = getattr(value, key, None)
            if isinstance(own, types.FunctionType) and not isinstance(value, types.ModuleType):
                self._add_function(f"{name}.{key}", own, depth - 1, value)
            elif own is not None:
                self.add(f"{name}.{key}", own, names, depth - 1)


def _text_of(tensor: torch.Tensor) -> str:
    """Return dtype, shape and checksum of a tensor, whose values are read once as long as nobody changes them."""
    version = None if tensor.is_inference() else tensor._version
    before, number = _CHECKSUMS.get(tensor, (None, 0))
    if version is None or before != version:
        number = checksum([tensor], devices=True)
        _CHECKSUMS[tensor] = version, number
    return f"{tensor.dtype}{list(tensor.shape)} with checksum {number}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
