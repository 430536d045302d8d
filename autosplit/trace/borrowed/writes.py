"""What a run writes to a model's parameters, undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.recording.random_watch import named_arguments


@contextlib.contextmanager
def written_back(model: nn.Module) -> Iterator[None]:
    """Undo what is written to a model's parameters in here.

    Copies of all of them would not fit; buffers are small, see :func:`borrowed`.
    """
    writes = _Writes(model.parameters())
    try:
        with writes:
            yield
    finally:
        writes.give_back()


class _Writes(TorchDispatchMode):
    """Copies each parameter before the first operation that writes to it."""

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
        named = named_arguments(func, args, kwargs)
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in pytree.tree_leaves(named[argument.name]) if written else ():
                owner = self.storages.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
                if owner is not None and id(owner) not in self.saved:
                    self.saved[id(owner)] = owner, owner.detach().clone()

    def give_back(self) -> None:
        """Undo what was written."""
        with torch.no_grad():
            for owner, content in self.saved.values():
                owner.data.copy_(content)
