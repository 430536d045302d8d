"""A problem in fewer pieces: runs of its works in the model's order, cut where little crosses.

A search over many configurations looks at the coarse problem, whose cuts are prefixes of one order: what such a cut
costs is what the same cut of the whole problem costs, and only cuts between the runs are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Graph
from autosplit.partition.problem import Hold, Problem, TensorEdge, Tie, Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Coarse:
    """Units in their only order, and the unit of each work of the whole problem."""

    problem: Problem
    unit_of: tuple[int, ...]

    def assignment(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return the stage of each work where stage ``k`` has the units from ``bounds[k]`` to ``bounds[k + 1]``."""
        stage = np.searchsorted(np.array(bounds[1:-1]), np.array(self.unit_of), side="right")
        return tuple(stage.tolist())


def runs(problem: Problem, graph: Graph, *, most: int, places: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the unit of each work: about ``most`` runs of the graph's groups, each from one of ``places`` on.

    Every run takes about its share of the seconds, the static bytes and what is kept; each ends where least crosses,
    and at the end of its block where the blocks are not too many.
    """
    group_of = np.array(graph.group_of, dtype=np.int64)
    ends = np.arange(1, graph.size) if places is None else np.array(places, dtype=np.int64)
    if len(ends) >= most:
        share = _weights(problem, group_of, graph.size).cumsum()[ends - 1]
        crossing = _crossing(problem, group_of, graph.size)[ends - 1]
        changes = np.intersect1d(_block_ends(problem, group_of, graph.size), ends)
        changes = changes if len(changes) <= most // 2 else changes[:0]
        bucket = np.floor(share * (most - len(changes)) * (1 - 1e-12)).astype(np.int64)
        order = np.lexsort((ends, crossing, bucket))
        first = order[np.diff(bucket[order], prepend=-1) > 0]
        ends = np.union1d(ends[first], changes)
    unit_of_group = np.searchsorted(ends, np.arange(graph.size), side="right")
    return tuple(unit_of_group[group_of].tolist())


def taken_apart(group_of: Sequence[int], coarse: Coarse, bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the unit of each work where the units next to each boundary are taken apart into groups."""
    near = {unit for bound in bounds[1:-1] for unit in (bound - 1, bound)}
    pieces = [(unit, group if unit in near else -1) for unit, group in zip(coarse.unit_of, group_of, strict=True)]
    index_of = {piece: index for index, piece in enumerate(sorted(set(pieces)))}
    return tuple(index_of[piece] for piece in pieces)


def coarsened(problem: Problem, unit_of: Sequence[int]) -> Coarse:
    """Return the problem in units, which may be cut in their order only."""
    count = max(unit_of) + 1
    holds: Counter[tuple[int | None, tuple[int, ...], tuple[int, ...]]] = Counter()
    for hold in problem.holds:
        producer = None if hold.producer is None else unit_of[hold.producer]
        consumers = tuple(sorted({unit_of[consumer] for consumer in hold.consumers}))
        savers = tuple(sorted({unit_of[saver] for saver in hold.savers}))
        if savers or producer is None or consumers not in ((), (producer,)):
            holds[producer, consumers, savers] += hold.bytes
    nets: dict[tuple[int, tuple[int, ...], bool], list[float]] = {}
    for net in problem.nets:
        producer = unit_of[net.producer]
        others = tuple(sorted({unit_of[consumer] for consumer in net.consumers} - {producer}))
        if others:
            seconds = nets.setdefault((producer, others, net.ordered), [0.0, 0.0])
            seconds[0] += net.forward_s
            seconds[1] += net.backward_s
    small = replace(
        problem,
        works=_units(problem, unit_of, count),
        nets=tuple(
            TensorEdge(producer, others, seconds[0], seconds[1], ordered)
            for (producer, others, ordered), seconds in nets.items()
        ),
        holds=tuple(Hold(size, *pins) for pins, size in holds.items()),
        order=tuple((unit, unit + 1) for unit in range(count - 1)),
        ties=tuple(
            Tie(tuple(sorted({unit_of[user] for user in tie.users})), tie.home_bytes, tie.copy_bytes, tie.transfer_s)
            for tie in problem.ties
        ),
    )
    return Coarse(small, tuple(unit_of))


def _units(problem: Problem, unit_of: Sequence[int], count: int) -> tuple[Work, ...]:
    members: list[list[Work]] = [[] for _ in range(count)]
    for work, unit in zip(problem.works, unit_of, strict=True):
        members[unit].append(work)
    units = []
    for works in members:
        backward_s = sum(work.backward_s for work in works)
        blocks = {work.block for work in works}
        units.append(
            Work(
                works[0].name,
                sum(work.forward_s for work in works),
                backward_s,
                sum(work.static_bytes for work in works),
                max(work.transient_bytes for work in works),
                weight_s=min(sum(work.weight_s for work in works), backward_s),
                split_s=sum(work.split_s for work in works),
                block=next(iter(blocks)) if len(blocks) == 1 else None,
                step_bytes=sum(work.step_bytes for work in works),
            )
        )
    return tuple(units)


def _weights(problem: Problem, group_of: Ints, size: int) -> Floats:
    """Return each group's share of the whole: of the seconds, the static bytes and the bytes that it keeps."""
    kept = np.zeros(len(group_of))
    for hold in problem.holds:
        for saver in hold.savers[:1]:
            kept[saver] += hold.bytes
    seconds = np.array([work.forward_s + work.backward_s for work in problem.works])
    static = np.array([work.static_bytes for work in problem.works], dtype=np.float64)
    parts = [each / each.sum() for each in (seconds, static, kept) if each.sum() > 0]
    whole = sum(parts, np.full(len(group_of), 1e-3 / len(group_of)))
    weights: Floats = np.bincount(group_of, whole / whole.sum(), minlength=size).astype(np.float64)
    return weights


def _crossing(problem: Problem, group_of: Ints, size: int) -> Floats:
    """Return what crosses a cut behind each group but the last: seconds, and where these are equal bytes."""
    seconds, held = np.zeros(size + 1), np.zeros(size + 1)
    for net in problem.nets:
        last = max((int(group_of[consumer]) for consumer in net.consumers), default=0)
        first = int(group_of[net.producer])
        if last > first:
            seconds[first] += net.forward_s + net.backward_s
            seconds[last] -= net.forward_s + net.backward_s
    for hold in problem.holds:
        pins = [int(group_of[pin]) for pin in (*hold.consumers, *(() if hold.producer is None else (hold.producer,)))]
        if pins:
            held[min(pins)] += hold.bytes
            held[max(pins)] -= hold.bytes
    seconds, held = seconds.cumsum()[: size - 1], held.cumsum()[: size - 1]
    longest = float(seconds.max(initial=0.0))
    rounded = np.round(seconds / longest, 9) if longest else seconds
    return rounded + 1e-10 * held / (float(held.max(initial=0.0)) or 1.0)


def _block_ends(problem: Problem, group_of: Ints, size: int) -> Ints:
    """Return the groups that begin in another block than the group before them ends in."""
    block: list[object] = [None] * size
    for work, group in zip(problem.works, group_of.tolist(), strict=True):
        block[group] = work.block
    return np.array([group for group in range(1, size) if block[group] != block[group - 1]], dtype=np.int64)
