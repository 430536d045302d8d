"""Tensors of caches that lie on other ranks: shapes without values, and what is done with them, for their owners.

cache.keys.index_select(0, rows)   the rank that runs ``generate`` notes the operation and knows the result's shape
                                   ─► the owner's turn: it performs the operation on the values
del cache                          ─► the owner's turn: it lets go of the values
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree

from autosplit.distributed.messages import flattened
from autosplit.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """Stands for a tensor: ``owner`` has it by a key, or ``data`` are its bytes.

    ``host``: it lies on the CPU wherever the ranks' devices are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    key: Hashable = None
    data: bytes | None = None
    host: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, owner: int, key: Hashable = None, *, most: float = inf) -> Leaf:
        """Return what stands for a tensor, with its bytes where it has at most so many elements."""
        small = tensor.numel() <= most
        data = flattened(tensor.detach().contiguous()).cpu().numpy().tobytes() if small else None
        return cls(tuple(tensor.shape), tensor.dtype, owner, key, data, tensor.device.type == "cpu")

    def tensor(self, device: torch.device, data: Any = None) -> torch.Tensor:
        """Return the tensor of its bytes, or other ones, on a device unless it lay on the CPU."""
        data = bytearray(self.data or b"") if data is None else data
        tensor = torch.frombuffer(data, dtype=self.dtype) if len(data) else torch.empty(0, dtype=self.dtype)
        return tensor.view(self.shape).to("cpu" if self.host else device)

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return zeros, which take no memory on the CPU."""
        return replace(self, host=False).tensor(device, np.zeros(prod(self.shape) * self.dtype.itemsize, np.uint8))


class Noted(NamedTuple):
    """An operation on remote tensors of one owner: its name, what it takes, and the keys of its results."""

    owner: int
    name: tuple[str, str, str]
    args: Any
    kwargs: Any
    results: tuple[Hashable, ...]

    def perform(self, kept: dict[Hashable, torch.Tensor], device: torch.device) -> None:
        """Perform it on the values that this rank keeps."""

        def there(leaf: Any) -> Any:
            if isinstance(leaf, Leaf):
                return kept[leaf.key] if leaf.data is None else leaf.tensor(device)
            return device if isinstance(leaf, torch.device) else leaf

        space, name, overload = self.name
        function = getattr(getattr(getattr(torch.ops, space), name), overload)
        args, kwargs = pytree.tree_map(there, (self.args, self.kwargs))
        results = [leaf for leaf in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        kept.update(zip(self.results, results, strict=False))


class Notes:
    """What is to be told to the owners of remote tensors; any thread may note."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._noted: list[Noted] = []
        self._dropped: list[Hashable] = []
        self._numbers = itertools.count()

    def take(self) -> tuple[list[Noted], list[Hashable]]:
        """Return the operations since the last call, and the keys of tensors that nobody has any more."""
        with self._lock:
            count = len(self._dropped)  # before the operations: these may be on tensors that are dropped meanwhile
            noted, self._noted = self._noted, []
            dropped, self._dropped[:count] = self._dropped[:count], []
            return noted, dropped

    def watch(self, tensor: torch.Tensor, key: Hashable) -> None:
        """Have the owner let go of a key when nobody has a tensor any more."""
        weakref.finalize(tensor, self._dropped.append, key).atexit = False

    def note(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Note an operation, and return what stands for its results."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RemoteTensor)]
        owner = tensors[0].leaf.owner
        try:
            changed = function._schema.is_mutable
            if any(tensor.leaf.owner != owner for tensor in tensors) or (changed and args[0] is not tensors[0]):
                raise ValueError("it goes from rank to rank")
            metas, meta_kwargs = pytree.tree_map(_on_meta, (args, kwargs))
            if torch.Tag.nondeterministic_seeded in function.tags:
                raise ValueError("it draws random numbers")
            with torch.no_grad():
                results = function(*metas, **meta_kwargs)
        except Exception as error:
            raise InputError(
                f"{function} reads values of a cache's tensor that rank {owner} has; they stay there: leave this to "
                f"the model ({error})"
            ) from error
        keys: list[Hashable] = []

        def remote(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            keys.append(("result", next(self._numbers)))
            return RemoteTensor(Leaf(tuple(leaf.shape), leaf.dtype, owner, keys[-1]), self)

        outcome = tensors[0] if changed else pytree.tree_map(remote, results)
        name = (function.namespace, function._opname, function._overloadname)
        with self._lock:
            told_args, told_kwargs = pytree.tree_map(_portable, (args, dict(kwargs)))
            self._noted.append(Noted(owner, name, told_args, told_kwargs, tuple(keys)))
        return outcome


class RemoteTensor(torch.Tensor):
    """A tensor of a cache that lies on another rank, by what stands for it there."""

    leaf: Leaf
    notes: Notes

    @staticmethod
    def __new__(cls: Any, leaf: Leaf, notes: Notes) -> Any:  # noqa: D102
        tensor = torch.Tensor._make_wrapper_subclass(cls, leaf.shape, dtype=leaf.dtype, device=notes.device)
        tensor.leaf, tensor.notes = leaf, notes
        notes.watch(tensor, leaf.key)
        return tensor

    def __init__(self, *_: Any) -> None:
        """Its making has set all."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Note an operation."""
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return first.notes.note(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteTensor({list(self.shape)}, {self.dtype}, on rank {self.leaf.owner})"

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(f"the values of a cache's tensor stay on rank {self.leaf.owner}; it cannot be saved here")


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _portable(leaf: Any) -> Any:
    if isinstance(leaf, RemoteTensor):
        return leaf.leaf
    return Leaf.of(leaf, -1) if isinstance(leaf, torch.Tensor) else leaf
