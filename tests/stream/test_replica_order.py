"""Replicas that are processes: each has its own weights, makes all updates, and waits where it takes what it needs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice

import pytest

from autosplit.schedule.stream import StreamAction, ahead, replica_actions, weight_version
from tests.stream.test_stream_order import LAYOUTS

Ready = Callable[[], bool]


class Ranks:
    """Simulates processes of which each runs one replica, and a loop that meets all others after each loss."""

    def __init__(self, replicas: Sequence[int], staleness: str, sizes: Sequence[int]) -> None:
        self.replicas, self.staleness, self.sizes = replicas, staleness, sizes
        self.ends = [0, *accumulate(sizes)]
        self.done: set[tuple[int, int, str, int]] = set()
        """By stage and replica, the actions that were done."""
        self.met: dict[tuple[int, int], int] = {}
        self.most = 0

    def whole(self, stage: int, kind: str, number: int) -> bool:
        return (stage, number % self.replicas[stage], kind, number) in self.done

    def needs(self, stage: int, replica: int, cell: StreamAction) -> Ready:
        """Return what tells whether an action can be done; checks that the weights that a forward uses were made."""
        number, count = cell.microbatch, self.replicas[stage]
        if cell.kind == "U":
            begin = cell.update * (1 if self.staleness == "2bw" else count)
            round_of = range(self.ends[begin], self.ends[cell.minibatch + 1])
            return lambda: all(self.whole(stage, "B", one) for one in round_of)
        if cell.kind == "F":
            used = weight_version(self.staleness, self.replicas, stage, cell.minibatch)
            assert all((stage, replica, "U", update) in self.done for update in range(used))
            return lambda: not stage or self.whole(stage - 1, "F", number)
        return lambda: stage + 1 == len(self.replicas) or self.whole(stage + 1, "B", number)

    def rank(self, stage: int, replica: int) -> Iterator[Ready]:
        """Yield what a process waits for."""
        taken, flying, ended = 0, deque[int](), False
        first, behind = ahead(self.staleness, self.replicas)

        def microbatches(minibatch: int) -> int | None:
            return self.sizes[minibatch] if minibatch < taken else None if ended else 0

        actions = replica_actions(stage, replica, self.replicas, self.staleness, microbatches)
        losses = returned = 0
        while returned < len(self.sizes):
            while not ended and sum(islice(flying, first, None)) < behind:
                if taken == len(self.sizes):
                    yield self.meets(stage, replica)
                    ended = True
                else:
                    flying.append(self.sizes[taken])
                    taken += 1
            self.most = max(self.most, len(flying))
            while (cell := next(actions, None)) is not None:
                yield self.needs(stage, replica, cell)
                number = cell.update if cell.kind == "U" else cell.microbatch
                self.done.add((stage, replica, cell.kind, number))
                losses = cell.minibatch + 1 if cell.kind == "U" else losses
            assert losses > returned, "a loss is due, and the stage has not stepped by it"
            returned += 1
            flying.popleft()
            yield self.meets(stage, replica)

    def meets(self, stage: int, replica: int) -> Ready:
        """Return what tells whether all processes have come to where they meet as often."""
        time = self.met[stage, replica] = self.met[stage, replica] + 1
        return lambda: min(self.met.values()) >= time

    def run(self) -> None:
        ranks = {
            (stage, own): self.rank(stage, own) for stage, count in enumerate(self.replicas) for own in range(count)
        }
        self.met = dict.fromkeys(ranks, 0)
        waits: dict[tuple[int, int], Ready] = dict.fromkeys(ranks, lambda: True)
        while waits:
            ready = [key for key, wait in waits.items() if wait()]
            assert ready, "processes wait for each other"
            for key in ready:
                if (wait := next(ranks[key], None)) is None:
                    del waits[key]
                else:
                    waits[key] = wait


@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
def test_processes_never_wait_for_each_other_and_every_loss_is_made_when_it_is_due(replicas: tuple[int, ...]) -> None:
    rng = random.Random(0)
    for minibatches in (1, 2, 7, 24):
        ragged = [rng.randint(1, 5) for _ in range(minibatches)]
        for staleness, sizes in (("stash", [1] * minibatches), ("2bw", ragged), ("2bw", [4] * minibatches)):
            ranks = Ranks(replicas, staleness, sizes)
            ranks.run()
            size = {stage: 1 if staleness == "2bw" else count for stage, count in enumerate(replicas)}
            for stage, count in enumerate(replicas):
                updates = {(stage, own, "U", u) for own in range(count) for u in range(-(-minibatches // size[stage]))}
                assert updates <= ranks.done
