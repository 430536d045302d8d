"""Parameters as they were before a trial run that writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.structure import storage_key


@contextlib.contextmanager
def written_back(model: nn.Module) -> Iterator[Collection[Any]]:
    """Undo what is written to a model's parameters in here; yield what was, as it grows.

    Nobody could hold copies of all of them; buffers are small, see :func:`autosplit.trace.state.buffer_contents`.
    """
    writes = _Writes(model.parameters())
    try:
        with writes:
            yield writes.saved
    finally:
        writes.give_back()


class _Writes(TorchDispatchMode):
    """Copies each parameter before the first operation that writes to it.

    ``TorchDispatchMode`` lives in a private module; there is no public name for it (tried on torch 2.11 to 2.15).
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, torch.Tensor] = {}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter in parameters:
            self.storages.setdefault(storage_key(parameter), parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
        return func(*args, **kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                owner = self.storages.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
                if owner is not None and id(owner) not in self.saved:
                    self.saved[id(owner)] = owner, owner.detach().clone()

    def give_back(self) -> None:
        """Undo what was written."""
        with torch.no_grad():
            for owner, content in self.saved.values():
                owner.data.copy_(content)
