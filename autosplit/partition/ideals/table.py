"""Arrays over a pool of ideals from which the costs of many candidate stages are read at once.

A stage is the difference of two ideals ``I < J``. Everything additive is a difference of two numbers. A tensor is cut
by the stage according to how many of its ends lie in ``J`` and not in ``I``; only tensors with ends on both sides of
``I`` ("straddling") need to be looked at again, for all others the stage ``J`` without ``I`` cut off tells the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Graph, Net

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

_QUANTA = 2**40
"""Weights are whole numbers of about this many parts of the total: sums in float64 are exact, so order is safe."""


@dataclass(frozen=True)
class Pins:
    """How many ends of each tensor lie in each ideal (columns).

    No number shrinks from an ideal to a larger one, so that of a stage is a difference. The stage pays unless it is 0
    or ``whole``, all ends.
    """

    cost_s: Floats
    inside: NDArray[np.int32]
    whole: NDArray[np.int32]
    paid_s: Floats
    """What the whole ideal, as one stage, pays, per ideal."""

    @classmethod
    def of(cls, columns: NDArray[np.bool_], tensors: Sequence[Net]) -> Pins:
        """Return the pins of tensors; ``columns[group]`` tells for each ideal whether it contains the group."""
        inside = np.zeros((len(tensors), columns.shape[1]), dtype=np.int32)
        paid_s = np.zeros(columns.shape[1])
        for row, tensor in zip(inside, tensors, strict=True):
            for end in tensor.ends:
                row += columns[end]
            paid_s += tensor.cost_s * ((row != 0) & (row != len(tensor.ends)))
        whole = np.array([len(tensor.ends) for tensor in tensors], dtype=np.int32)
        return cls(np.array([tensor.cost_s for tensor in tensors], dtype=np.float64), inside, whole, paid_s)

    def stage_cost(self, ideal: int, larger: Ints) -> Floats:
        """Return the seconds that the stages ``larger`` minus ``ideal`` pay."""
        inside = self.inside[:, ideal]
        cost = self.paid_s[larger]
        rows = np.flatnonzero((inside != 0) & (inside != self.whole))
        if len(rows):  # across the ideal's end: all other tensors cost the stage what they cost the larger ideal
            block = self.inside[np.ix_(rows, larger)]
            pays = (block != inside[rows][:, None]).astype(np.int8)
            cost = cost + self.cost_s[rows] @ (pays - (block != self.whole[rows][:, None]))
        return cost


class IdealTable:
    """The ideals of a pool, sorted so that subsets come first, with what each costs."""

    def __init__(self, graph: Graph, pool: Sequence[int], *, by_bytes: bool = False) -> None:
        weights = np.array(graph.static_bytes if by_bytes else graph.times_s, dtype=np.float64)
        total = float(weights.sum())
        self.by_bytes = by_bytes
        self.quantum = total / _QUANTA if total else 1.0
        quanta = np.rint(weights / self.quantum)
        member = _membership(pool, graph.size)
        order = np.lexsort((np.arange(len(pool)), member.sum(axis=1), member @ quanta))
        member = member[order]
        self.graph = graph
        self.ideals = [pool[index] for index in order]
        self.weight: Ints = (member @ quanta).astype(np.int64)
        self.time_s: Floats = member @ np.array(graph.times_s)
        self.static: Floats = member @ np.array(graph.static_bytes, dtype=np.float64)
        self.columns = np.ascontiguousarray(member.T).astype(np.bool_)
        bits = _pack(member)
        self.words = np.ascontiguousarray(bits.T)
        self.full: Ints = np.argmax(bits != ~np.uint64(0), axis=1)

    @cached_property
    def tensors(self) -> Pins:
        """What crosses cuts in time."""
        return Pins.of(self.columns, self.graph.tensors)

    def __len__(self) -> int:
        return len(self.ideals)

    def supersets(self, ideal: int, *, start: int, stop: int) -> Ints:
        """Return the positions in ``start..stop-1`` whose ideal contains the one at ``ideal``."""
        keep = np.ones(stop - start, dtype=np.bool_)
        for word in range(int(self.full[start:stop].min()), self.words.shape[0]):
            bits = self.words[word, ideal]
            if bits:
                keep &= (self.words[word, start:stop] & bits) == bits
        return start + np.flatnonzero(keep)


def _membership(pool: Sequence[int], size: int) -> Floats:
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in pool), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(pool), width), axis=1, count=size, bitorder="little")
    return bits.astype(np.float64)


def _pack(member: NDArray[Any]) -> Bits:
    ideals, size = member.shape
    padded = np.zeros((ideals, (size + 63) // 64 * 64), dtype=np.uint8)
    padded[:, :size] = member
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64)
