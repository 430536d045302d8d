"""Which version of its weights each stage uses for each minibatch: PipeDream's figure, runs of it, and of processes."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.orders import held_per_replica
from autosplit.schedule.stream import (
    STALENESS,
    StreamAction,
    ahead,
    replica_actions,
    stream_actions,
    updates_behind,
    weight_version,
)
from tests.stream import reference
from tests.stream.streams import CPU

FIGURE = """
worker 1 | F1.1 F2.1 F3.1 F4.1 .    .    .    B1.1 F5.2 B2.1 F6.3 B3.1 F7.4 B4.1 F8.5 B5.2 .    B6.3 .    B7.4 .    B8.5
worker 2 | .    F1.1 F2.1 F3.1 .    .    B1.1 F4.2 B2.1 F5.3 B3.1 F6.4 B4.2 F7.5 B5.3 F8.6 B6.4 .    B7.5 .    B8.6
worker 3 | .    .    F1.1 F2.1 .    B1.1 F3.2 B2.1 F4.3 B3.2 F5.4 B4.3 F6.5 B5.4 F7.6 B6.5 F8.7 B7.6 .    B8.7
worker 4 | .    .    .    F1.1 B1.1 F2.2 B2.2 F3.3 B3.3 F4.4 B4.4 F5.5 B5.5 F6.6 B6.6 F7.7 B7.7 F8.8 B8.8
"""
"""1F1B without a flush on four workers, a column per tick, counted from 1: F5.2 is the forward of minibatch 5 with the
version that the first update has made."""


def lanes(replicas: Sequence[int], staleness: str, sizes: Sequence[int]) -> dict[tuple[int, int], list[StreamAction]]:
    """Return what every lane does, by stage and replica; ``sizes`` are the microbatches of each minibatch."""

    def microbatches(minibatch: int) -> int | None:
        return sizes[minibatch] if minibatch < len(sizes) else None

    keys = [(stage, own) for stage, count in enumerate(replicas) for own in range(count)]
    found = {key: list(stream_actions(*key, replicas, staleness, microbatches)) for key in keys}
    return {key: [action for action in own if action is not None] for key, own in found.items()}


def test_pipedreams_figure_cell_by_cell() -> None:
    stages = 4
    cells = [[cell for cell in own if cell.kind != "U"] for own in lanes([1] * stages, "stash", [1] * 8).values()]
    schedule = Schedule(
        "stream", tuple(tuple(Action(s, c.kind, c.minibatch) for c in own) for s, own in enumerate(cells))
    )
    rows: list[list[str]] = [[] for _ in range(stages)]
    for (lane, position), tick in schedule.clocks.items():
        stage, kind, minibatch = schedule.lanes[lane][position]
        rows[lane] += ["."] * (tick - len(rows[lane]))
        rows[lane].append(f"{kind}{minibatch + 1}.{weight_version('stash', [1] * stages, stage, minibatch) + 1}")
    found = [f"worker {lane + 1} | " + " ".join(f"{cell:<4}" for cell in row).rstrip() for lane, row in enumerate(rows)]
    assert found == FIGURE.strip().splitlines()


def clock(replicas: Sequence[int], staleness: str, sizes: Sequence[int], cell_s: Sequence[tuple[float, float]]) -> Any:
    """Return when each action ends where lanes wait for nothing else: by stage, kind and number.

    ``cell_s`` is how long each stage's forwards and backwards take. Checks that no lane waits for ever, that what a
    forward uses was made, that an update comes behind its round and the update before it, and that lanes wait once.
    """
    own = lanes(replicas, staleness, sizes)
    ends: dict[tuple[int, str, int], float] = {}
    taken: set[Any] = set()
    places, times = dict.fromkeys(own, 0), dict.fromkeys(own, 0.0)
    firsts = [0, *accumulate(sizes)]
    running = list(own)
    while running:
        stage, replica = key = running.pop()
        for cell in own[key][places[key] :]:
            kind, number = cell.kind, cell.update if cell.kind == "U" else cell.microbatch
            needs = [(stage, *need) for need in cell.needs]
            waits = [((*key, need)) for need in needs]
            beside = stage - 1 if kind == "F" else stage + 1
            if kind != "U" and 0 <= beside < len(replicas):
                needs.append((beside, kind, number))
            if any(need not in ends for need in needs):
                break
            assert taken.isdisjoint(waits)
            taken.update(waits)
            start = max([times[key], *(ends[need] for need in needs)])
            before: list[tuple[int, str, int]] = []
            if kind == "F":
                assert cell.microbatch == firsts[cell.minibatch] + cell.offset
                assert cell.microbatch % replicas[stage] == replica
                used = weight_version(staleness, replicas, stage, cell.minibatch)
                before = [(stage, "U", update) for update in range(used)]
            elif kind == "U":
                size = 1 if staleness == "2bw" else replicas[stage]
                round_of = range(firsts[cell.update * size], firsts[cell.minibatch + 1])
                before = [(stage, "B", one) for one in round_of] + [(stage, "U", update) for update in range(number)]
            assert all(ends[one] <= start for one in before)
            ends[stage, kind, number] = times[key] = start + (0.0 if kind == "U" else cell_s[stage][kind == "B"])
            places[key] += 1
            running = list(own)
    assert all(places[key] == len(own[key]) for key in own), "lanes wait for ever"
    return ends


LAYOUTS = [layout for stages in (1, 2, 3) for layout in product((1, 2, 3), repeat=stages)]
LAYOUTS += [(1, 1, 1, 1), (15, 1), (2, 1, 2, 1), (1, 2, 1, 2), (4, 2, 1), (1, 2, 3, 1), (1, 4, 1), (1, 1, 2, 1)]


@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
def test_lanes_never_wait_for_ever_and_find_their_versions(replicas: tuple[int, ...]) -> None:
    rng = random.Random(0)
    for minibatches in (0, 1, 2, 7, 24):
        ragged = [rng.randint(1, 5) for _ in range(minibatches)]
        for staleness, sizes in (("stash", [1] * minibatches), ("2bw", ragged), ("2bw", [4] * minibatches)):
            ends = clock(replicas, staleness, sizes, [(1.0, 2.0)] * len(replicas))
            for stage, count in enumerate(replicas):
                rounds = -(-minibatches // (1 if staleness == "2bw" else count))
                kinds = Counter(kind for own, kind, _ in ends if own == stage)
                assert kinds == {k: n for k, n in (("F", sum(sizes)), ("B", sum(sizes)), ("U", rounds)) if n}


@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
def test_a_stage_of_as_many_replicas_as_it_is_slow_does_not_wait(replicas: tuple[int, ...]) -> None:
    together, ahead = math.lcm(*replicas), held_per_replica(replicas)[0] * replicas[0]
    for share in (0.2, 1 / 3, 0.6):
        cell_s = [(share * count, (1 - share) * count) for count in replicas]
        for staleness, size in (("stash", 1), ("2bw", together * -(-ahead // together))):
            period = max(size, together)
            ends = clock(replicas, staleness, [size] * (45 * period // size), cell_s)
            first, second = (max(ends[0, "B", one] for one in range(until * period + 1)) for until in (15, 30))
            assert second - first == pytest.approx(15 * period)


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_more_versions_are_held_without_replicas_than_in_the_paper(staleness: str, stages: int) -> None:
    for stage, behind in enumerate(updates_behind(staleness, [1] * stages)):
        assert behind + 1 == {"stash": stages - stage, "vertical": stages, "2bw": 2}[staleness]
        for minibatch in range(12):
            version = weight_version(staleness, [1] * stages, stage, minibatch)
            assert version == reference.version(staleness, [1] * stages, stage, minibatch)


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, note: Any) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.note = note
        note("F", weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        ctx.note("B", weight)
        return gradient * weight, (gradient * value).sum().reshape(1), None


class Noting(nn.Module):
    """Scales by a weight, and notes which value of it a forward and a backward use."""

    def __init__(self, seen: list[tuple[str, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.seen = [seen]

    def note(self, kind: str, weight: Tensor) -> None:
        if weight.device.type == "cpu" and type(weight).__name__ != "FakeTensor":
            self.seen[0].append((kind, weight.item()))

    def forward(self, value: Tensor) -> Tensor:
        return _Noting.apply(value, self.weight, self.note)


@pytest.mark.parametrize("staleness", STALENESS)
def test_forward_and_backward_of_a_run_use_the_version_of_the_figure(staleness: str) -> None:
    stages = 4
    seen: list[list[tuple[str, float]]] = [[] for _ in range(stages)]
    model = nn.Sequential(*(Noting(own) for own in seen))
    pipe = autosplit(model, devices=[CPU] * stages, chunks=4, cut="operations", sample=torch.ones(4, 1).double())
    assert [len(stage.nodes) for stage in pipe.plan.stages] == [1] * stages
    versions: dict[int, list[float]] = defaultdict(list)

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        stage = len(versions)
        versions[stage] = [parameters[0].item()]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: versions[stage].append(parameters[0].item()))
        return optimizer

    items = [(torch.full((4, 1), 1.0 + m / 10).double(), torch.zeros(4, 1).double()) for m in range(8)]
    list(pipe.train_stream(items, loss_fn=nn.MSELoss(), optimizer=made, staleness="vertical"))  # what is recorded
    for own in seen:
        own.clear()
    versions.clear()
    list(pipe.train_stream(items, loss_fn=nn.MSELoss(), optimizer=made, staleness=staleness))
    for stage, own in enumerate(seen):
        used = [(kind, versions[stage].index(value)) for kind, value in own]
        each = 4 if staleness == "2bw" else 1
        expected = [weight_version(staleness, [1] * stages, stage, m) for m in range(8) for _ in range(each)]
        assert [version for kind, version in used if kind == "F"] == expected
        assert [version for kind, version in used if kind == "B"] == expected
        cells = lanes([1] * stages, staleness, [each] * 8)[stage, 0]
        assert [kind for kind, _ in used] == [cell.kind for cell in cells if cell.kind != "U"]


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
