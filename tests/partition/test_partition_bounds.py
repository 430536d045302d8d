import random
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from autosplit.partition.bounds import elimination as bounds
from autosplit.partition.bounds.elimination import bound, ideal, profile
from autosplit.partition.bounds.labelling import PRICES, SHARES, labelling, skips
from autosplit.partition.goal import Clock, OutOfTime
from autosplit.partition.graph import Graph, Tensor


@dataclass(frozen=True)
class Stages:
    """The times and costs of all ideals and of all stages between them, by the definition."""

    graph: Graph

    def ideals(self) -> list[int]:
        legal = ((mask, all(mask >> tail & 1 or not mask >> head & 1 for tail, head in self.graph.edges))
                 for mask in range(1 << self.graph.size))  # fmt: skip
        return [mask for mask, fits in legal if fits]

    def time(self, mask: int) -> float:
        return sum(time_s for group, time_s in enumerate(self.graph.times_s) if mask >> group & 1)

    def crossing(self, mask: int) -> float:
        inside = ([mask >> pin & 1 for pin in (each.producer, *each.consumers)] for each in self.graph.tensors)
        return sum(each.cost_s for each, pins in zip(self.graph.tensors, inside, strict=True) if len(set(pins)) > 1)

    def load(self, mask: int) -> float:
        return self.time(mask) + self.crossing(mask)

    def least_load(self, stages: int) -> float:
        ideals = sorted(self.ideals(), key=int.bit_count)
        best = {0: 0.0}
        for _ in range(stages):
            best = {
                larger: min(max(value, self.load(larger & ~smaller)) for smaller, value in best.items()
                            if not smaller & ~larger)
                for larger in ideals
            }  # fmt: skip
        return best[ideals[-1]]


def long_graph(seed: int, *, groups: int) -> Graph:
    """Chains and branches with tensors that skip far ahead, gradients, and tensors that nothing orders."""
    chance = random.Random(seed)
    reach = chance.choice((1, 2, 3, groups))
    edges = {
        (tail, head)
        for head in range(groups)
        for tail in range(max(0, head - reach), head)
        if chance.random() < chance.choice((0.3, 0.9))
    }
    tensors = [Tensor(chance.choice((0.5, 1.0, 3.0)) * chance.random(), *turn(pair, chance)) for pair in sorted(edges)]
    for _ in range(chance.randrange(4)):
        pins = chance.sample(range(groups), min(groups, chance.choice((2, 3, 4))))
        ordered = chance.random() < 0.5
        pins = sorted(pins) if ordered else pins
        tensors.append(Tensor(2 * chance.random(), pins[0], frozenset(pins[1:])))
        edges |= {(pins[0], pin) for pin in pins[1:]} if ordered else set()
    times_s = tuple(chance.choice((0.0, chance.random(), 3 * chance.random())) for _ in range(groups))
    nothing = (0,) * groups
    own = tuple(range(groups))
    return Graph(times_s, nothing, nothing, nothing, frozenset(edges), tuple(tensors), (), own)


def turn(pair: tuple[int, int], chance: random.Random) -> tuple[int, frozenset[int]]:
    tail, head = pair if chance.random() < 0.6 else pair[::-1]
    return tail, frozenset((head,))


@pytest.mark.parametrize("seed", range(70))
def test_no_cut_is_better_than_the_bound(seed: int) -> None:
    graph = long_graph(seed, groups=2 + seed % 6)
    stages = 2 + seed % 4
    least = Stages(graph).least_load(stages)
    for slack in (1.0, 1.3):
        found = bound(graph, stages=stages, upper_s=slack * least)
        assert found is not None
        assert found.lower_s <= least * (1 + 1e-12)
        assert found.lower_s >= sum(graph.times_s) / stages * (1 - 1e-9)
        assert len(found.ideals) == stages + 1
        assert found.ideals[0] == 0
        assert all(not small & ~large for small, large in zip(found.ideals, found.ideals[1:], strict=False))
        assert set(found.ideals) <= set(Stages(graph).ideals())


@pytest.mark.parametrize("seed", [*range(20), 79])
def test_no_cut_is_better_than_the_bound_where_tensors_skip_stages(seed: int) -> None:
    graph = skipping_graph(seed, groups=5 + seed % 4)
    least = Stages(graph).least_load(5)
    found = bound(graph, stages=5, upper_s=3 * max(sum(graph.times_s) / 5, *graph.times_s))
    assert found is not None
    assert found.lower_s <= least * (1 + 1e-12)


def skipping_graph(seed: int, *, groups: int) -> Graph:
    """A chain, more or less, with tensors over one, two and many works."""
    chance = random.Random(seed)
    edges: set[tuple[int, int]] = set()
    tensors = []
    for pair in ((tail, head) for head in range(1, groups) for tail in range(head)):
        length = pair[1] - pair[0]
        if chance.random() < (0.8 if length == 1 else 0.25 if length <= 3 else 0.1):
            edges.add(pair)
            tensors.append(Tensor(chance.choice((0.3, 1.0, 2.0)) * chance.random(), *turn(pair, chance)))
    times_s = tuple(chance.choice((0.3, 1.0, 2.0)) * chance.random() for _ in range(groups))
    nothing, own = (0,) * groups, tuple(range(groups))
    return Graph(times_s, nothing, nothing, nothing, frozenset(edges), tuple(tensors), (), own)


def test_the_bound_is_tight_on_most_graphs_and_its_ideals_attain_it() -> None:
    closed = attained = 0
    for seed in range(30):
        graph = chain_of_branches(seed, blocks=3)
        truth = Stages(graph)
        least = truth.least_load(3)
        found = bound(graph, stages=3, upper_s=1.2 * least)
        assert found is not None
        worst = max(truth.load(large & ~small) for small, large in zip(found.ideals, found.ideals[1:], strict=False))
        closed += found.lower_s >= least * (1 - 1e-9)
        attained += worst <= least * (1 + 1e-9)
    assert closed >= 15
    assert attained >= 15


def chain_of_branches(seed: int, *, blocks: int) -> Graph:
    """Blocks of two parallel works between one that feeds both and, next, one that takes both."""
    chance = random.Random(seed)
    edges, last = [], 0
    for _ in range(blocks):
        edges += [(last, last + 1), (last, last + 2), (last + 1, last + 3), (last + 2, last + 3)]
        last += 3
    tensors = tuple(Tensor(0.2 + 0.2 * chance.random(), *turn(pair, chance)) for pair in edges)
    times_s = tuple(1 + chance.random() for _ in range(last + 1))
    nothing, own = (0,) * (last + 1), tuple(range(last + 1))
    return Graph(times_s, nothing, nothing, nothing, frozenset(edges), tensors, (), own)


@pytest.mark.parametrize("seed", range(40))
def test_the_profile_has_all_ideals_that_no_other_beats(seed: int) -> None:
    graph = long_graph(seed, groups=2 + seed % 6)
    truth, labels = Stages(graph), labelling(graph)
    front = profile(labels, dear=np.inf, work=10**6)
    assert front is not None
    numbers = [
        (truth.time(mask) + truth.crossing(mask), truth.time(mask) - truth.crossing(mask)) for mask in truth.ideals()
    ]
    for ends, starts in numbers:
        at = int(np.searchsorted(front.ends * labels.quantum_s, ends + 1e-9, side="right")) - 1
        assert front.starts[at] * labels.quantum_s >= starts - 1e-9
    for at in range(len(front)):
        found = ideal(front, at, groups=graph.size)
        assert found in truth.ideals()
        assert truth.time(found) + truth.crossing(found) == pytest.approx(front.ends[at] * labels.quantum_s, abs=1e-9)
        assert truth.time(found) - truth.crossing(found) == pytest.approx(front.starts[at] * labels.quantum_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_a_stage_that_a_tensor_skips_gains_no_more_than_is_said(seed: int) -> None:
    graph = long_graph(seed, groups=2 + seed % 4)
    truth, labels = Stages(graph), labelling(graph)
    found = skips(labels)
    limit = sum(graph.times_s)
    gains = (found.gains * labels.quantum_s + limit * np.array(PRICES)[:, None]).min(axis=2)
    spanned = [set(labels.spanned[pair]) for pair in found.pairs]
    for small, large in product(truth.ideals(), repeat=2):
        load = truth.load(large & ~small)
        if small & ~large or load > limit:
            continue
        starts, ends = (truth.time(small) + sign * truth.crossing(small) for sign in (-1, 1))
        reached = [truth.time(large) + sign * truth.crossing(large) for sign in (-1, 1)]
        for index, tensor in enumerate(graph.tensors):
            pins = {tensor.producer, *tensor.consumers}
            if not (any(small >> pin & 1 for pin in pins) and any(not large >> pin & 1 for pin in pins)):
                continue
            rows = [row for row, tensors in enumerate(spanned) if index in tensors]
            assert min(found.least_ends[rows]) * labels.quantum_s <= ends + 1e-9
            assert max(found.most_starts[rows]) * labels.quantum_s >= reached[0] - 1e-9
            for at, share in enumerate(SHARES):
                base = share * ends + (1 - share) * starts
                for way in (0, 1):
                    assert max(gains[at, way, rows]) >= reached[way] - base - 1e-9


def test_thinned_profiles_still_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosplit.partition.bounds.elimination._POINTS", 3)
    monkeypatch.setattr("autosplit.partition.bounds.elimination._SUMS", 5)
    monkeypatch.setattr("autosplit.partition.bounds.elimination._MANY", 4)
    for seed in range(40):
        graph = long_graph(seed, groups=3 + seed % 5)
        least = Stages(graph).least_load(3)
        found = bound(graph, stages=3, upper_s=1.1 * least)
        assert found is not None
        assert found.lower_s <= least * (1 + 1e-12)
        assert set(found.ideals) <= set(Stages(graph).ideals())


def test_a_graph_that_is_too_wide_or_has_too_many_points_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain_of_branches(0, blocks=2)
    with monkeypatch.context() as patch:
        patch.setattr(bounds, "_TABLES", 10)
        assert bound(graph, stages=2, upper_s=10.0) is None
    monkeypatch.setattr(bounds, "_WORK", 10)
    assert bound(graph, stages=2, upper_s=10.0) is None


def test_the_same_graph_has_the_same_bound() -> None:
    graph = chain_of_branches(1, blocks=3)
    assert bound(graph, stages=3, upper_s=9.0) == bound(graph, stages=3, upper_s=9.0)


def test_a_clock_that_has_run_down_ends_the_search() -> None:
    with pytest.raises(OutOfTime):
        bound(chain_of_branches(1, blocks=3), stages=3, upper_s=9.0, clock=Clock(0.0))
