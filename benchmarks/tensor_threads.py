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

    def all_reduce(self, value: Tensor, group: Any = None) -> None:
        """Sum in place."""
        value.copy_(torch.stack(self._exchanged(value.clone())).sum(0))

    def all_gather(self, parts: list[Tensor], value: Tensor, group: Any = None) -> None:
        """Copy every rank's value."""
        for part, one in zip(parts, self._exchanged(value.clone()), strict=True):
            part.copy_(one)

    def reduce_scatter(self, result: Tensor, parts: list[Tensor], group: Any = None) -> None:
        """Sum the own part."""
        given = self._exchanged([part.clone() for part in parts])
        result.copy_(torch.stack([parts[self._own.rank] for parts in given]).sum(0))


@contextmanager
def threads() -> Iterator[Threads]:
    """Let rank graphs run on threads."""
    group, real = Threads(), collectives.dist
    collectives.dist = group  # type: ignore[assignment]
    try:
        yield group
    finally:
        collectives.dist = real
