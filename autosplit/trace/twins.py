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
        self._kinds = {id(tensor): _kind(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
        return all(self._equal(a, b) for (_, a), (_, b) in pairs)

    def _equal(self, a: nn.Module, b: nn.Module) -> bool:
        """Tell whether two modules of one class are equal in what was read of the first one."""
        mine, other = vars(a), vars(b)
        if mine.keys() != other.keys():
            return False
        read = (self._read[id(a)] & mine.keys()) - _TABLES
        return all(_equal(mine[key], other[key], _DEPTH) for key in read) and all(
            mine[table].keys() == other[table].keys()
            and all(map(self._similar, mine[table].values(), other[table].values()))
            for table in ("_parameters", "_buffers")
        )

    def _similar(self, a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        kind = self._kinds.get(id(a))
        return a is b or (kind is not None and kind == self._kinds.get(id(b)))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


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
