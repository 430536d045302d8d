"""Arrays over a pool of ideals from which the costs of many candidate stages are read at once.

A stage is the difference of two ideals ``I < J``. Everything additive is a difference of two numbers. A tensor is cut
by the stage according to how many of its pins lie in ``J`` and not in ``I``; only tensors with pins on both sides of
``I`` ("straddling") need to be looked at again, for all others the stage ``J`` without ``I`` cut off tells the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Graph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

_SAVER = 2**15
_PRODUCER = 2**30
_QUANTA = 2**40
"""Weights are whole numbers of about this many parts of the total: sums in float64 are exact, so order is safe."""


@dataclass(frozen=True)
class Pins:
    """Which pins of each tensor or storage (rows) lie in each ideal (columns), as one number per pair.

        bit 30: the producer | bits 15-29: number of savers | bits 0-14: number of consumers

    No field shrinks from an ideal to a larger one, so the number of a stage is a difference. The stage pays unless that
    is 0 (no pin inside) or ``whole`` (producer and all consumers inside, no saver).
    """

    cost: Floats
    inside: NDArray[np.int32]
    whole: NDArray[np.int32]
    every: NDArray[np.int32]
    """The number when all pins are inside."""
    closed_cost: Floats
    """What an ideal pays for a row even when all its pins are inside."""
    paid: Floats
    """Sum of what the whole ideal, as one stage, pays, per ideal."""

    def stage_cost(self, ideal: int, larger: Ints) -> Floats:
        """Return what the stages ``larger`` minus ``ideal`` pay."""
        own = self.inside[:, ideal]
        cost = self.paid[larger] - self.closed_cost @ (own == self.every)
        rows = np.flatnonzero((own != 0) & (own != self.every))
        if len(rows):
            block = self.inside[np.ix_(rows, larger)]
            whole = self.whole[rows][:, None]
            pays = _pays(block - own[rows][:, None], whole).astype(np.int8) - _pays(block, whole)
            cost += self.cost[rows] @ pays
        return cost


class Table:
    """The ideals of a pool, sorted so that subsets come first, with what each costs."""

    def __init__(self, graph: Graph, pool: Sequence[int], *, by_bytes: bool = False) -> None:
        weights = np.array(graph.static_bytes if by_bytes else graph.times_s, dtype=np.float64)
        rank = np.argsort(-np.array(graph.transient_bytes), kind="stable")
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
        self.resident: Floats = member @ np.array(graph.resident_bytes, dtype=np.float64)
        self.transients: Floats = np.array(graph.transient_bytes, dtype=np.float64)[rank]
        self.bits = _pack(member[:, rank])
        self.columns = np.ascontiguousarray(member.T).astype(np.bool_)

    @cached_property
    def tensors(self) -> Pins:
        """What crosses cuts in time."""
        tensors = self.graph.tensors
        return _pins(self.columns, [(item.cost_s, item.producer, item.consumers, frozenset()) for item in tensors])

    @cached_property
    def storages(self) -> Pins:
        """What stages keep in bytes."""
        storages = self.graph.storages
        rows = [(float(item.bytes), item.producer, item.consumers, item.savers) for item in storages]
        return _pins(self.columns, rows)

    def __len__(self) -> int:
        return len(self.ideals)

    def supersets(self, ideal: int, *, start: int, stop: int) -> Ints:
        """Return the positions in ``start..stop-1`` whose ideal contains the one at ``ideal``."""
        keep = np.ones(stop - start, dtype=np.bool_)
        for word, own in enumerate(self.bits[ideal]):
            if own:
                keep &= (self.bits[start:stop, word] & own) == own
        return start + np.flatnonzero(keep)

    def loads(self, ideal: int, larger: Ints) -> Floats:
        """Return the loads of the stages ``larger`` minus ``ideal``, in seconds."""
        return self.time_s[larger] - self.time_s[ideal] + self.tensors.stage_cost(ideal, larger)

    def static_and_transient(self, ideal: int, larger: Ints) -> Floats:
        """Return the bytes of the stages that do not depend on the microbatches in flight."""
        bytes_ = self.static[larger] - self.static[ideal]
        if not self.transients[0]:
            return bytes_
        # Bits are in descending order of transient bytes: the lowest bit of the difference is the worst node.
        added = self.bits[larger] & ~self.bits[ideal]
        word = np.argmax(added != 0, axis=1)
        value = added[np.arange(len(larger)), word]
        lowest = np.log2((value & (~value + np.uint64(1))).astype(np.float64)).astype(np.int64)
        return bytes_ + self.transients[word * 64 + lowest]

    def residents(self, ideal: int, larger: Ints) -> Floats:
        """Return the bytes that the stages keep per microbatch in flight."""
        return self.resident[larger] - self.resident[ideal] + self.storages.stage_cost(ideal, larger)


def _pays(inside: NDArray[np.int32], whole: NDArray[np.int32]) -> NDArray[np.bool_]:
    return (inside != 0) & (inside != whole)


def _pins(columns: NDArray[np.bool_], rows: Sequence[tuple[float, int | None, frozenset[int], frozenset[int]]]) -> Pins:
    inside = np.zeros((len(rows), columns.shape[1]), dtype=np.int32)
    paid = np.zeros(columns.shape[1])
    whole = np.array([_PRODUCER + len(consumers) for _, _, consumers, _ in rows], dtype=np.int32)
    for row, (each, producer, consumers, savers) in enumerate(rows):
        for consumer in consumers:
            inside[row] += columns[consumer]
        for saver in savers:
            inside[row] += columns[saver] * np.int32(_SAVER)
        if producer is not None:
            inside[row] += columns[producer] * np.int32(_PRODUCER)
        paid += each * _pays(inside[row], whole[row])
    cost: Floats = np.array([row[0] for row in rows], dtype=np.float64)
    every = np.array(
        [(own is not None) * _PRODUCER + len(savers) * _SAVER + len(consumers) for _, own, consumers, savers in rows],
        dtype=np.int32,
    )
    closed_cost: Floats = np.where(_pays(every, whole), cost, 0.0)
    return Pins(cost=cost, inside=inside, whole=whole, every=every, closed_cost=closed_cost, paid=paid)


def _membership(pool: Sequence[int], size: int) -> Floats:
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in pool), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(pool), width), axis=1, count=size, bitorder="little")
    return bits.astype(np.float64)


def _pack(member: Floats) -> Bits:
    ideals, size = member.shape
    padded = np.zeros((ideals, (size + 63) // 64 * 64), dtype=np.uint8)
    padded[:, :size] = member
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64)
