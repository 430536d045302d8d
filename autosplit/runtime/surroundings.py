"""What a region of the model reads besides its inputs, kept for its second run.

    first run     modules' attributes, parameters and buffers are noted; buffers that the forward writes are copied
    second run    what was put in their places since is taken away for as long as it runs

A model may be called with other attributes between a forward and its backward (``eval()``, ``dropout.p``), and the same
forward may write a buffer behind the region that reads it. A tensor that was changed in place cannot be had back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed.values import GONE, difference, is_same_content, put

_TABLES = ("_parameters", "_buffers")
_SWAPPING = threading.RLock()
"""Held while modules have attributes of an earlier forward: second runs that need that take turns."""
Table = dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """The state that one region used in its first run, to restore it for the second.

    Attributes:
        tables: dictionaries of the modules that it calls, and copies of their entries.
        places: other values that it reads: a dictionary, a name, and the value.
        rewritten: buffers that the forward writes: likewise, with a copy, and whether the region itself writes them.
        steady: parameters, buffers and inputs that must not change: a description, the tensor, its version, and whether
            it requires a gradient.
    """

    tables: tuple[tuple[Table, Table], ...]
    places: tuple[tuple[Table, str, Any], ...]
    rewritten: tuple[tuple[Table, str, torch.Tensor, bool], ...]
    steady: tuple[tuple[str, torch.Tensor, int, bool], ...]

    @classmethod
    def of(
        cls,
        region: Any,
        root: nn.Module,
        inputs: Sequence[Any],
        *,
        rewritten: Mapping[str, bool],
        written: Collection[str],
    ) -> Surroundings:
        """Note what a region finds.

        ``inputs`` are the values that it is given. ``rewritten`` are the names of buffers to copy, and whether the
        region itself writes them; ``written`` the names of all that the forward changes: other tensors must not change.
        """
        used = region.used().items()
        modules = [(path, module) for path, module in used if isinstance(module, nn.Module)]
        places = {path: tensor for path, tensor in used if isinstance(tensor, torch.Tensor)}
        named = [
            (f"{path}.{key}", t)
            for path, m in modules
            for table in _TABLES
            for key, t in m.__dict__[table].items()
            if getattr(m, "max_norm", None) is None  # rows that a table has scaled stay as they are
        ]
        named += places.items()
        held = [
            ("a parameter" if isinstance(t, nn.Parameter) else "a buffer", t)
            for name, t in named
            if name not in written and isinstance(t, torch.Tensor)
        ]
        held += [("an input", value) for value in inputs if isinstance(value, torch.Tensor)]
        copies: dict[int, torch.Tensor] = {}
        copied = []
        for full, cloned in rewritten.items():
            table, name = _place(root, full)
            buffer = table[name]
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            copied.append((table, name, copies[id(buffer)], cloned))
        tables = [table for _, m in modules for table in (m.__dict__, *(m.__dict__[name] for name in _TABLES))]
        return cls(
            tuple((table, table.copy()) for table in tables),
            tuple((*_place(root, full), value) for full, value in places.items()),
            tuple(copied),
            tuple((what, t, t._version, t.requires_grad) for what, t in held if not t.is_inference()),
        )

    def check(self, label: str) -> None:
        """Raise RuntimeError where a tensor is not what it was in the first run of ``label``."""
        for what, tensor, version, requires_grad in self.steady:
            if tensor._version != version:
                change = "was changed in place"
            elif tensor.requires_grad != requires_grad:
                change = f"got requires_grad={tensor.requires_grad}"
            else:
                continue
            raise RuntimeError(
                f"{what} of {label} {change} between the forward and the backward, which runs the forward again: "
                "call backward before the optimizer's step and other changes, or split with recompute='never'"
            )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what was found, and at the end what is there now."""
        with contextlib.ExitStack() as stack:
            with _SWAPPING:
                others = list(self._others())
                if others:
                    stack.enter_context(_SWAPPING)
            copies = ((t, name, copy.clone() if cloned else copy) for t, name, copy, cloned in self.rewritten)
            for table, name, value in (*others, *copies):
                stack.callback(put, table, name, table.get(name, GONE))
                put(table, name, value)
            yield

    def _others(self) -> Iterator[tuple[Table, str, Any]]:
        """Yield the entries that have changed since: the dictionary, the name, and the value of the first run."""
        for table, before in self.tables:
            if not is_same_content(before, table):
                yield from ((table, name, value) for name, value in difference(table, before).items())
        for table, name, value in self.places:
            if table.get(name) is not value:
                yield table, name, value


def _place(root: nn.Module, full: str) -> tuple[Table, str]:
    """Return the dictionary that holds a tensor of the model, and its name there."""
    path, _, name = full.rpartition(".")
    holder = root.get_submodule(path).__dict__
    return next((holder[table] for table in _TABLES if name in holder[table]), holder), name
