"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from autosplit.tensor import collectives

RANKS = 2
T = TypeVar("T")


class Threads:
    """What :mod:`torch.distributed` does among them."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._given: list[Any] = [None] * RANKS
        self._own = threading.local()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return what a function gives on each rank."""

        def one(rank: int) -> T:
            self._own.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(RANKS) as pool:
            return [*pool.map(one, range(RANKS))]

    def _exchanged(self, value: Any) -> list[Any]:
        self._given[self._own.rank] = value
        self._barrier.wait()
        values = [*self._given]
        self._barrier.wait()
        return values

    def send(self, _: Any, kind: str, value: Tensor, how: Any, *__: Any) -> Tensor:
        """Run a collective on values that are stacked."""
        every = torch.stack(self._exchanged(value))
        if kind == "all_reduce":
            return every.amax(0) if how == "max" else every.sum(0)
        if kind == "all_gather_into_tensor":
            return every.flatten(0, 1)
        own = every[:, self._own.rank]
        return own.sum(0, keepdim=True) if kind == "reduce_scatter_tensor" else own


@contextmanager
def threads() -> Iterator[Threads]:
    """Let rank graphs run on threads."""
    group, real = Threads(), collectives.send
    collectives.send = group.send  # type: ignore[assignment]
    try:
        yield group
    finally:
        collectives.send = real
