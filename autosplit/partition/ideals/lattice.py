"""All ideals of a graph that is long and narrow, with what is needed to cost the stages between them.

Ideals are sorted by time. Neighbours differ little, so they are kept in blocks, each with the few groups that some of
its ideals hold and others do not:

    block 7:   groups 0..214 in all of its ideals | 215..260 in some: one bit per ideal | the rest in none

and for each tensor that lies across some of them how many of its pins each ideal holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.clock import FOREVER, Clock
from autosplit.partition.graph import Graph
from autosplit.partition.ideals.enumerate import IdealList, list_ideals
from autosplit.partition.ideals.table import Floats, Ints

Flags = NDArray[np.bool_]

_BLOCK = 2048
_QUANTA = 2**52
"""Times are whole numbers of about this many parts of the total: sums are exact, so subsets come first."""
_NONE, _ALL = -1, -2
"""Where a block has no row for a group: none of its ideals holds it, or all do."""


@dataclass(frozen=True)
class _Block:
    """Neighbouring ideals: ``row[group]`` is its row in ``member``, ``_NONE`` or ``_ALL``.

    ``tensors`` are those across at least one of the ideals, ``inside`` the number of pins that each ideal holds.
    """

    start: int
    stop: int
    row: NDArray[np.int32]
    groups: Ints
    member: Flags
    tensors: Ints
    inside: NDArray[np.int32]


class Lattice:
    """The ideals by position, in an order in which subsets come first."""

    def __init__(self, graph: Graph, ideals: IdealList) -> None:
        order = np.argsort(np.array(ideals.quanta, dtype=np.int64), kind="stable")
        self.graph = graph
        self.time_s: Floats = np.array(ideals.quanta, dtype=np.float64)[order] * _quantum(graph)
        self._lows = [ideals.lows[index] for index in order]
        self._bits = [ideals.bits[index] for index in order]
        self._cost: Floats = np.array([tensor.cost_s for tensor in graph.tensors], dtype=np.float64)
        self._pins = [np.array(sorted({item.producer, *item.consumers}), dtype=np.int64) for item in graph.tensors]
        self._pin_counts = np.array([len(pins) for pins in self._pins], dtype=np.int32)
        self._first = np.array([pins[0] for pins in self._pins], dtype=np.int64)
        self._last = np.array([pins[-1] for pins in self._pins], dtype=np.int64)
        self.cut_s: Floats = np.zeros(len(order))
        self._blocks = [self._block(start) for start in range(0, len(order), _BLOCK)]

    def __len__(self) -> int:
        return len(self.time_s)

    def ideal(self, position: int) -> int:
        """Return the ideal as one number, a bit per group."""
        low = self._lows[position]
        return self._bits[position] << low | (1 << low) - 1

    def holds(self, position: int) -> Flags:
        """Return for each group whether the ideal holds it."""
        block = self._blocks[position // _BLOCK]
        held: Flags = block.row == _ALL
        held[block.groups] = block.member[:, position - block.start]
        return held

    def supersets(self, position: int, *, start: int, stop: int) -> Flags:
        """Return which of the positions ``start..stop-1`` hold all of the ideal."""
        held = self.holds(position)
        return np.concatenate(
            [
                np.full(span.stop - span.start, not np.any(held & (block.row == _NONE)))
                & block.member[held[block.groups], span].all(axis=0)
                for block, span in self._spans(start, stop)
            ]
        )

    def subsets(self, position: int, *, start: int, stop: int) -> Flags:
        """Return which of the positions ``start..stop-1`` hold nothing but what the ideal holds."""
        free = ~self.holds(position)
        return np.concatenate(
            [
                np.full(span.stop - span.start, not np.any(free & (block.row == _ALL)))
                & ~block.member[free[block.groups], span].any(axis=0)
                for block, span in self._spans(start, stop)
            ]
        )

    def loads(self, position: int, *, start: int, stop: int) -> Floats:
        """Return the loads of the stages from the ideal to its supersets among ``start..stop-1``, else infinity.

        A tensor across both ends is counted twice by these: once too often, and twice where the stage has no pin of it.
        """
        own = self._blocks[position // _BLOCK]
        column = own.inside[:, position - own.start]
        across = (column > 0) & (column < self._pin_counts[own.tensors])
        tensors, pins = own.tensors[across], column[across]
        loads = self.time_s[start:stop] + self.cut_s[start:stop] + (self.cut_s[position] - self.time_s[position])
        for block, span in self._spans(start, stop):
            _, mine, theirs = np.intersect1d(tensors, block.tensors, assume_unique=True, return_indices=True)
            inside = block.inside[theirs, span]
            still = inside < self._pin_counts[block.tensors[theirs], None]
            twice = still.astype(np.int8) + (still & (inside == pins[mine, None]))
            place = slice(block.start + span.start - start, block.start + span.stop - start)
            loads[place] -= self._cost[block.tensors[theirs]] @ twice
        return np.where(self.supersets(position, start=start, stop=stop), loads, np.inf)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[_Block, slice]]:
        for block in self._blocks[start // _BLOCK : (stop - 1) // _BLOCK + 1]:
            yield block, slice(max(start, block.start) - block.start, min(stop, block.stop) - block.start)

    def _block(self, start: int) -> _Block:
        stop = min(start + _BLOCK, len(self))
        lows, bits = self._lows[start:stop], self._bits[start:stop]
        base = min(lows)
        width = max(low + own.bit_length() for low, own in zip(lows, bits, strict=True)) - base
        size = width // 8 + 1
        packed = b"".join(
            (own << low - base | (1 << low - base) - 1).to_bytes(size, "little")
            for low, own in zip(lows, bits, strict=True)
        )
        table = np.frombuffer(packed, dtype=np.uint8).reshape(stop - start, size)
        member = np.unpackbits(table, axis=1, count=width, bitorder="little").T.astype(np.bool_)
        full, some = member.all(axis=1), member.any(axis=1)
        groups = np.flatnonzero(some & ~full)
        row = np.full(self.graph.size, _NONE, dtype=np.int32)
        row[:base] = _ALL
        row[base + np.flatnonzero(full)] = _ALL
        row[base + groups] = np.arange(len(groups))
        member = np.ascontiguousarray(member[groups])
        tensors, inside = self._inside(row, member, base=base, end=base + width)
        self.cut_s[start:stop] = self._cost[tensors] @ ((inside > 0) & (inside < self._pin_counts[tensors, None]))
        return _Block(start, stop, row, base + groups, member, tensors, inside)

    def _inside(self, row: NDArray[np.int32], member: Flags, *, base: int, end: int) -> tuple[Ints, NDArray[np.int32]]:
        """Return the tensors that are across some ideal of a block, and the pins that each ideal holds."""
        near = np.flatnonzero((self._first < end) & (self._last >= base))
        inside = np.zeros((len(near), member.shape[1]), dtype=np.int32)
        for index, tensor in enumerate(near):
            rows = row[self._pins[tensor]]
            inside[index] = np.count_nonzero(rows == _ALL) + member[rows[rows >= 0]].sum(axis=0, dtype=np.int32)
        kept = ((inside > 0) & (inside < self._pin_counts[near, None])).any(axis=1)
        return near[kept], inside[kept]


def lattice(graph: Graph, *, limit: int, clock: Clock = FOREVER) -> Lattice | None:
    """Return the lattice of all ideals of the graph, or None when there are more than ``limit``.

    Raises OutOfTime when the ``clock`` is over.
    """
    ideals = list_ideals(graph, limit=limit, quantum=_quantum(graph), clock=clock)
    return None if ideals is None else Lattice(graph, ideals)


def _quantum(graph: Graph) -> float:
    return sum(graph.times_s) / _QUANTA or 1.0
