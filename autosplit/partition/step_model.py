"""What a step takes when a graph is cut: stage times and transfers of many cuts at once, then the fast simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.fast_simulate import FastSimulator, Floats, Ints, Path, StepTimes
from autosplit.partition.graph import Graph
from autosplit.partition.problem import Device, Problem

_ENTRIES = 2**22
"""Pins of nets that are looked at together, times cuts."""


@dataclass(frozen=True)
class Crossings:
    """The nets between groups, one row per consumer; ``ordered`` ones travel ahead, with a gradient that comes back."""

    net: Ints
    producer: Ints
    consumer: Ints
    forward_s: Floats
    backward_s: Floats

    @classmethod
    def of(cls, problem: Problem, graph: Graph) -> Crossings:
        """Return the problem's nets between the graph's groups; nets with equal ends are one."""
        seconds: dict[tuple[int, frozenset[int]], list[float]] = {}
        for net in problem.nets:
            producer = graph.group_of[net.producer]
            consumers = frozenset(graph.group_of[consumer] for consumer in net.consumers) - {producer}
            pair = seconds.setdefault((producer, consumers), [0.0, 0.0])
            pair[0] += net.forward_s if net.ordered else 0.0
            pair[1] += net.backward_s if net.ordered else net.forward_s + net.backward_s
        rows = [
            (index, producer, consumer, *pair)
            for index, ((producer, consumers), pair) in enumerate(seconds.items())
            if any(pair)
            for consumer in sorted(consumers)
        ]
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        net, tail, head = table[:, :3].astype(np.int64).T
        return cls(net, tail, head, table[:, 3].copy(), table[:, 4].copy())


class StepModel:
    """A problem's graph on its devices in their own order: ``steps`` tells what cuts of it take."""

    def __init__(self, problem: Problem, graph: Graph, *, stages: int) -> None:
        self.problem, self.graph, self.stages = problem, graph, stages
        schedule = problem.schedule_of(stages)
        self.schedule = schedule
        self.simulator = FastSimulator(schedule)
        self.lane = problem.lanes(stages)
        devices = problem.devices
        self.devices = [Device() if devices is None else devices[place] for place in self.lane]
        self.scale: Floats = np.array([device.slowdown / device.replicas for device in self.devices])
        self.link, self.near_link = _links(problem, self.lane)
        self.forward_s, self.backward_s, self.weight_s, self.sync_s = (
            _by_group(graph, [getattr(work, name) for work in problem.works])
            for name in ("forward_s", "backward_s", "weight_s", "sync_s")
        )
        self.crossings = Crossings.of(problem, graph)
        self.ties = [(tie.transfer_s, sorted({graph.group_of[user] for user in tie.users})) for tie in problem.ties]

    def steps(self, stage_of: NDArray[np.int64], again: Floats) -> Floats:
        """Return what a step takes with ``stage_of[cut, group]`` and ``again[cut, stage]`` of the forwards redone."""
        width = max(1, _ENTRIES // max(len(self.crossings.net) + self.stages**2, 1))
        parts = []
        for low in range(0, len(stage_of), width):
            own = stage_of[low : low + width]
            parts.append(self.simulator.steps(self._times_of(own, again[low : low + width])) + self.once_s(own))
        return np.concatenate(parts) if parts else np.zeros(0)

    def steps_and_paths(self, stage_of: NDArray[np.int64], again: Floats) -> tuple[Floats, list[Path]]:
        """Return the like for a few cuts, and longest paths of the one that is shortest but for what is done once."""
        steps, paths = self.simulator.steps_and_paths(self._times_of(stage_of, again))
        return steps + self.once_s(stage_of), paths

    def _times_of(self, stage_of: NDArray[np.int64], again: Floats) -> StepTimes:
        forward_s, backward_s, weight_s = (
            self._summed(stage_of, each) for each in (self.forward_s, self.backward_s, self.weight_s)
        )
        ahead_s, back_s = self._travels(stage_of)
        return StepTimes(
            forward_s=self.scale * forward_s,
            backward_s=self.scale * (backward_s + again * forward_s),
            weight_s=self.scale * weight_s,
            ahead_s=ahead_s,
            back_s=back_s,
        )

    def _summed(self, stage_of: NDArray[np.int64], each: Floats) -> Floats:
        cuts, stages = len(stage_of), self.stages
        key = stage_of + np.arange(cuts)[:, None] * stages
        summed: Floats = np.bincount(key.ravel(), np.tile(each, cuts), minlength=cuts * stages).astype(np.float64)
        return summed.reshape(cuts, stages)

    def _travels(self, stage_of: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return how long values and gradients travel between each pair of stages: a net once per consumer stage."""
        own, stages, cuts = self.crossings, self.stages, len(stage_of)
        tail, head = stage_of[:, own.producer], stage_of[:, own.consumer]
        cut, row = np.nonzero(tail != head)
        tail, head = tail[cut, row], head[cut, row]
        nets = int(own.net.max(initial=0)) + 1
        _, first = np.unique((cut * nets + own.net[row]) * stages + head, return_index=True)
        cut, row, tail, head = cut[first], row[first], tail[first], head[first]
        key = (cut * stages + np.minimum(tail, head)) * stages + np.maximum(tail, head)
        size, shape = cuts * stages * stages, (cuts, stages, stages)
        ahead, back = (
            np.bincount(key, seconds[row], minlength=size).reshape(shape) for seconds in (own.forward_s, own.backward_s)
        )
        return ahead * self.link, back * self.link

    def once_s(self, stage_of: NDArray[np.int64]) -> Floats:
        """Return what stages do once per step, the longest of each cut."""
        once = np.zeros((len(stage_of), self.stages))
        if self.sync_s.any():
            replicas = np.array([device.replicas for device in self.devices])
            once += self._summed(stage_of, self.sync_s) * (replicas - 1) / replicas
        for transfer_s, users in self.ties:
            inside = (stage_of[:, users, None] == np.arange(self.stages)).any(axis=1)
            once += (inside & (inside.sum(axis=1) > 1)[:, None]) * (transfer_s * self.near_link)
        longest: Floats = once.max(axis=1)
        return longest


def _by_group(graph: Graph, each: Sequence[float]) -> Floats:
    summed: Floats = np.zeros(graph.size)
    np.add.at(summed, np.array(graph.group_of), np.array(each, dtype=np.float64))
    return summed


def _links(problem: Problem, lane: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the slowest link between each pair of stages, and the slower of those next to each stage."""
    links = problem.links or ()
    places = max(lane) + 1
    # The slowest of a row of links, from each place on.
    slowest = np.ones((places, places))
    for low in range(places - 1 if links else 0):
        slowest[low, low + 1 :] = np.maximum.accumulate(links[low : places - 1])
        slowest[low + 1 :, low] = slowest[low, low + 1 :]
    between = slowest[np.ix_(lane, lane)]
    near = np.array([max(links[max(place - 1, 0) : place + 1], default=1.0) for place in lane])
    return between, near
