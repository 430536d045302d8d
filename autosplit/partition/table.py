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

_QUANTA = 2**40
"""Weights are whole numbers of about this many parts of the total: sums in float64 are exact, so order is safe."""


@dataclass(frozen=True)
class Pins:
    """For each tensor or storage (rows) and ideal (columns): is the producer inside, how many consumers and savers."""

    cost: Floats
    producer: NDArray[np.bool_]
    consumers: NDArray[np.int16]
    savers: NDArray[np.int16]
    consumer_count: NDArray[np.int16]
    pin_count: NDArray[np.int16]
    paid: NDArray[np.bool_]
    """Whether the whole ideal, as one stage, pays."""
    paid_cost: Floats
    """Sum of what the whole ideal pays, per ideal."""

    def straddling(self, ideal: int) -> Ints:
        """Return the rows with a pin inside the ideal and one outside."""
        inside = self.producer[:, ideal] + self.consumers[:, ideal] + self.savers[:, ideal]
        return np.flatnonzero((inside > 0) & (inside < self.pin_count))

    def closed_cost(self, ideal: int) -> float:
        """Return what every larger ideal pays for rows whose pins all lie inside this one."""
        inside = self.producer[:, ideal] + self.consumers[:, ideal] + self.savers[:, ideal]
        return float(self.cost @ (self.paid[:, ideal] & (inside == self.pin_count)))

    def stage_cost(self, ideal: int, larger: Ints) -> Floats:
        """Return what the stages ``larger`` minus ``ideal`` pay."""
        cost = self.paid_cost[larger] - self.closed_cost(ideal)
        rows = self.straddling(ideal)
        if len(rows):
            block = np.ix_(rows, larger)
            pays = _pays(
                producer=self.producer[block] & ~self.producer[rows, ideal][:, None],
                consumers=self.consumers[block] - self.consumers[rows, ideal][:, None],
                savers=self.savers[block] - self.savers[rows, ideal][:, None],
                consumer_count=self.consumer_count[rows][:, None],
            )
            cost += self.cost[rows] @ (pays.astype(np.float64) - self.paid[block])
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


def _pays(
    *,
    producer: NDArray[np.bool_],
    consumers: NDArray[np.int16],
    savers: NDArray[np.int16],
    consumer_count: NDArray[np.int16],
) -> NDArray[np.bool_]:
    cut = np.where(producer, consumers < consumer_count, consumers > 0)
    return cut | (savers > 0)


def _pins(columns: NDArray[np.bool_], rows: Sequence[tuple[float, int | None, frozenset[int], frozenset[int]]]) -> Pins:
    shape = (len(rows), columns.shape[1])
    producer = np.zeros(shape, dtype=np.bool_)
    consumers = np.zeros(shape, dtype=np.int16)
    savers = np.zeros(shape, dtype=np.int16)
    for row, (_, own, consumer_set, saver_set) in enumerate(rows):
        if own is not None:
            producer[row] = columns[own]
        for pins, into in ((consumer_set, consumers), (saver_set, savers)):
            for pin in pins:
                into[row] += columns[pin]
    consumer_count = np.array([len(consumer_set) for _, _, consumer_set, _ in rows], dtype=np.int16)
    sizes = [(own is not None) + len(consumer_set) + len(saver_set) for _, own, consumer_set, saver_set in rows]
    paid = _pays(producer=producer, consumers=consumers, savers=savers, consumer_count=consumer_count[:, None])
    paid_cost = np.zeros(shape[1])
    for row, (cost, _, _, _) in enumerate(rows):
        paid_cost += cost * paid[row]
    return Pins(
        cost=np.array([row[0] for row in rows], dtype=np.float64),
        producer=producer,
        consumers=consumers,
        savers=savers,
        consumer_count=consumer_count,
        pin_count=np.array(sizes, dtype=np.int16),
        paid=paid,
        paid_cost=paid_cost,
    )


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
