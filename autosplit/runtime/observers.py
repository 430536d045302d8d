"""Forward hooks in a region that runs twice: a hook that only observes sees the first run alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from autosplit.trace.structure import tensors_in

_TABLES = ("_forward_hooks", "_forward_pre_hooks")
Hook = Callable[..., Any]


class Observers:
    """Tells which hooks of some modules return None and write to no tensor that they are given."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = [module.__dict__[name] for module in modules for name in _TABLES]
        self._tables: list[dict[int, Hook]] = [table for table in tables if table]
        self._called: set[int] = set()
        self._changing: set[int] = set()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the first run, in which hooks are watched."""
        return self._replaced(lambda number, hook: partial(self._watch, number, hook))

    def silenced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the second run, in which hooks are not called that only observed the first one."""
        observers = self._called - self._changing
        return self._replaced(lambda number, hook: _nothing if number in observers else hook)

    def _watch(self, number: int, hook: Hook, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in tensors_in((args[1:], kwargs)) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = hook(*args, **kwargs)
        self._called.add(number)
        if result is not None or versions != [tensor._version for tensor in tensors]:
            self._changing.add(number)
        return result

    @contextlib.contextmanager
    def _replaced(self, other: Callable[[int, Hook], Hook]) -> Iterator[None]:
        """Put other hooks in the places of those that are there; what is registered or removed inside stays so."""
        found = [(table, dict(table)) for table in self._tables]
        for table, hooks in found:
            table.update({number: other(number, hook) for number, hook in hooks.items()})
        try:
            yield
        finally:
            for table, hooks in found:
                table.update({number: hook for number, hook in hooks.items() if number in table})


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a hook that only observes."""
