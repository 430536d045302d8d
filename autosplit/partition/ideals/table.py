"""Arrays over a pool of ideals from which the costs of many candidate stages are read at once.

A stage is the difference of two ideals ``I < J``. Everything additive is a difference of two numbers. A tensor is cut
by the stage according to how many of its pins lie in ``J`` and not in ``I``; only tensors with pins on both sides of
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

_SAVER = 2**15
_PRODUCER = 2**30
_QUANTA = 2**40
"""Weights are whole numbers of about this many parts of the total: sums in float64 are exact, so order is safe."""


@dataclass(frozen=True)
class Pins:
    """Which pins of each row lie in each ideal (columns), as one number per pair.

        bit 30: the producer | bits 15-29: number of savers | bits 0-14: of consumers

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

    @classmethod
    def of(cls, columns: NDArray[np.bool_], rows: Sequence[Net]) -> Pins:
        """Return the pins of nets; ``columns[group]`` tells for each ideal whether it contains the group."""
        inside = np.zeros((len(rows), columns.shape[1]), dtype=np.int32)
        paid = np.zeros(columns.shape[1])
        whole = np.array([_PRODUCER + len(row.consumers) for row in rows], dtype=np.int32)
        every = np.zeros(len(rows), dtype=np.int32)
        for index, row in enumerate(rows):
            producer = frozenset() if row.producer is None else frozenset((row.producer,))
            for groups, unit in ((producer, _PRODUCER), (row.consumers, 1), (row.savers, _SAVER)):
                every[index] += len(groups) * unit
                for group in groups:
                    inside[index] += columns[group] * np.int32(unit)
            paid += row.cost * _pays(inside[index], whole[index])
        costs: Floats = np.array([row.cost for row in rows], dtype=np.float64)
        closed_cost: Floats = np.where(_pays(every, whole), costs, 0.0)
        return cls(cost=costs, inside=inside, whole=whole, every=every, closed_cost=closed_cost, paid=paid)

    def stage_cost(self, ideal: int, larger: Ints) -> Floats:
        """Return what the stages ``larger`` minus ``ideal`` pay."""
        inside = self.inside[:, ideal]
        cost = self.paid[larger] - self.closed_cost @ (inside == self.every)
        rows = np.flatnonzero((inside != 0) & (inside != self.every))
        if len(rows):
            block = self.inside[np.ix_(rows, larger)]
            whole = self.whole[rows][:, None]
            pays = _pays(block - inside[rows][:, None], whole).astype(np.int8)
            cost += self.cost[rows] @ (pays - _pays(block, whole))
        return cost


@dataclass(frozen=True)
class Worst:
    """The largest of a number over the groups of a stage, read from bits in descending order of it."""

    values: Floats
    bits: Bits

    @classmethod
    def among(cls, values: Sequence[float], columns: NDArray[np.bool_]) -> Worst:
        """Return it for these values, one per group."""
        numbers = np.array(values, dtype=np.float64)
        rank = np.argsort(-numbers, kind="stable")
        return cls(numbers[rank], _pack(columns[rank].T))

    def of(self, ideal: int, larger: Ints) -> Floats:
        """Return the largest in each of the stages ``larger`` minus ``ideal``."""
        if not self.values[0]:
            return np.zeros(len(larger))
        # The lowest bit of the difference is the worst group.
        added = self.bits[larger] & ~self.bits[ideal]
        word = np.argmax(added != 0, axis=1)
        value = added[np.arange(len(larger)), word]
        lowest = np.log2((value & (~value + np.uint64(1))).astype(np.float64)).astype(np.int64)
        return self.values[word * 64 + lowest]


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
        self.resident: Floats = member @ np.array(graph.resident_bytes, dtype=np.float64)
        self.columns = np.ascontiguousarray(member.T).astype(np.bool_)
        self.worst = Worst.among(graph.transient_bytes, self.columns)
        self.words = np.ascontiguousarray(self.worst.bits.T)
        self.full: Ints = np.argmax(self.worst.bits != ~np.uint64(0), axis=1)

    @cached_property
    def tensors(self) -> Pins:
        """What crosses cuts in time."""
        return Pins.of(self.columns, self.graph.tensors)

    @cached_property
    def storages(self) -> Pins:
        """What stages keep in bytes."""
        return Pins.of(self.columns, self.graph.storages)

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

    def works_s(self, ideal: int, larger: Ints) -> Floats:
        """Return the seconds of the works in the stages ``larger`` minus ``ideal``."""
        return self.time_s[larger] - self.time_s[ideal]

    def nets_s(self, ideal: int, larger: Ints) -> Floats:
        """Return the seconds of the tensors that the stages cut."""
        return self.tensors.stage_cost(ideal, larger)

    def static_and_transient(self, ideal: int, larger: Ints) -> Floats:
        """Return the bytes of the stages that do not depend on the microbatches in flight."""
        return self.static[larger] - self.static[ideal] + self.worst.of(ideal, larger)

    def residents(self, ideal: int, larger: Ints) -> Floats:
        """Return the bytes that the stages keep per microbatch in flight."""
        return self.resident[larger] - self.resident[ideal] + self.storages.stage_cost(ideal, larger)


def _pays(inside: NDArray[np.int32], whole: NDArray[np.int32]) -> NDArray[np.bool_]:
    return (inside != 0) & (inside != whole)


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
