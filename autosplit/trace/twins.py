"""Blocks that cannot do other things than their equal at one more size, told from the attributes that its Python reads.

A model on the meta device is planned on paper: at the caller's size the first of some equal blocks runs there, with all
that is read of its modules written down. A block whose modules have the same attributes, or differ in what was not read
(the number of a layer), runs the same code on the same values; any other runs for itself.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
_DEPTH = 3


class Twins:
    """The attributes that are read of a model's modules while :meth:`watch` is active."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._read: dict[int, set[str]] = defaultdict(set)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Write down which attributes are read inside."""
        read, plain = self._read, nn.Module.__getattribute__

        def look(module: nn.Module, name: str) -> Any:
            read[id(module)].add(name)
            return plain(module, name)

        with patch.object(nn.Module, "__getattribute__", look, create=True):
            yield

    def same(self, like: str, path: str) -> bool:
        """Tell whether a module's Python cannot tell it from its equal, which ran: called on the same, it does that."""
        pairs = list(zip(self._modules[like].named_modules(), self._modules[path].named_modules(), strict=False))
        if any(name != other or type(a) is not type(b) for (name, a), (other, b) in pairs):
            return False
        if len(pairs) != sum(1 for _ in self._modules[path].modules()):
            return False
        return all(not (_differing(a, b) & (self._read[id(a)] | _TABLES)) for (_, a), (_, b) in pairs)


def _differing(a: nn.Module, b: nn.Module) -> set[str]:
    """Return the attributes in which two modules of one class differ."""
    mine, other = vars(a), vars(b)
    if mine.keys() != other.keys():
        return set(_TABLES)
    found = {key for key in mine.keys() - _TABLES if not _equal(mine[key], other[key], _DEPTH)}
    for table in ("_parameters", "_buffers"):
        pairs = zip(mine[table].values(), other[table].values(), strict=False)
        if mine[table].keys() != other[table].keys() or not all(_similar(a, b) for a, b in pairs):
            found.add(table)
    return found


def _similar(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    kinds = [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (a, b)]
    return kinds[0] == kinds[1]


def _equal(a: Any, b: Any, depth: int) -> bool:
    """Tell whether two attributes are one object, or equal numbers, text, or containers of such."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key], depth - 1) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    return isinstance(a, (set, frozenset)) and not a and not b
