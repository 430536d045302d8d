"""Merges and proofs by threshold, against the dynamic program over all ideals; and the lattice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals import thresholds as lattice_module
from autosplit.partition.ideals.chains import best_chain
from autosplit.partition.ideals.condense import condense, without_small
from autosplit.partition.ideals.enumerate import list_ideals
from autosplit.partition.ideals.table import IdealTable
from autosplit.partition.ideals.thresholds import Lattice, lattice, threshold_search
from autosplit.partition.problem import Problem, TensorEdge, Work
from tests.properties import examples

NEAR = 1 + 1e-8


def narrow_graph(seed: int) -> Graph:
    """A long graph of blocks with a few branches each, tensors that skip blocks, and some against the order."""
    chance = random.Random(seed)
    costs = chance.choice(((0, 1, 2, 3), (0, 0, 1, 5, 9), (1,)))
    count = chance.randint(2, 16)
    works = tuple(Work(f"w{index}", chance.choice(costs), 0.0) for index in range(count))
    nets = []
    for index in range(count - 1):
        consumers = {min(index + chance.choice((1, 1, 1, 1, 2)), count - 1)}
        if chance.random() < 0.3:
            consumers.add(min(index + chance.randint(1, 4), count - 1))
        if chance.random() < 0.1:
            consumers.add(chance.randint(index + 1, count - 1))
        nets.append(TensorEdge(index, tuple(sorted(consumers)), chance.choice(costs), 0.0))
        if index and chance.random() < 0.2:
            nets.append(
                TensorEdge(index, (chance.randint(max(index - 3, 0), index - 1),), chance.choice(costs), 0.0, False)
            )
    return base_graph(Problem(works, tuple(nets), microbatches=1))


def optimum(graph: Graph, stages: int) -> float:
    ideals = list_ideals(graph, limit=10**6)
    assert ideals is not None
    chain = best_chain(IdealTable(graph, list(ideals)), goal=Goal(stages, empty=True))
    assert chain is not None
    return chain.value


def whole_lattice(graph: Graph) -> Lattice:
    found = lattice(graph, limit=10**6)
    assert found is not None
    return found


def load(graph: Graph, inside: int) -> float:
    paid = sum(graph.times_s[group] for group in range(graph.size) if inside >> group & 1)
    for tensor in graph.tensors:
        mask = sum(1 << end for end in tensor.ends)
        paid += tensor.cost_s if mask & inside and mask & ~inside else 0.0
    return paid


@pytest.fixture(params=[3, 2048])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few ideals and of all."""
    monkeypatch.setattr(lattice_module, "_BLOCK", request.param)


@pytest.mark.usefixtures("block")
def test_the_lattice_holds_every_ideal_and_the_loads_between_them() -> None:
    chance = random.Random(0)
    pairs = 0
    for seed in range(40):
        graph = narrow_graph(seed)
        found = whole_lattice(graph)
        ideals = found.ideals
        assert sorted(ideals) == sorted(list_ideals(graph, limit=10**6) or ())
        assert lattice(graph, limit=len(found) - 1) is None
        assert found.cut_s.tolist() == [
            pytest.approx(
                load(graph, ideal) - sum(graph.times_s[group] for group in range(graph.size) if ideal >> group & 1)
            )
            for ideal in ideals
        ]
        for first in chance.sample(range(len(ideals)), min(6, len(ideals))):
            start = chance.randint(0, len(ideals) - 1)
            stop = chance.randint(start + 1, len(ideals))
            loads = found.loads(first, start=start, stop=stop)
            subsets = found.subsets(first, start=start, stop=stop)
            for second in range(start, stop):
                outside = ideals[first] & ~ideals[second]
                expected = np.inf if outside else load(graph, ideals[second] & ~ideals[first])
                assert loads[second - start] == pytest.approx(expected)
                assert subsets[second - start] == (not ideals[second] & ~ideals[first])
                assert not (second < first and not outside and ideals[second] != ideals[first]), "subsets come first"
                pairs += expected < np.inf
    assert pairs > 200


@pytest.mark.usefixtures("block")
def test_thresholds_find_the_optimum_and_prove_it() -> None:
    better = 0
    for seed in range(120):
        graph = narrow_graph(seed)
        stages = random.Random(seed).randint(1, 6)
        least = optimum(graph, stages)
        whole = load(graph, (1 << graph.size) - 1)
        found = threshold_search(whole_lattice(graph), stages=stages, lower=0.0, upper=whole)
        assert found.lower_bound <= least * NEAR, seed
        assert found.lower_bound == pytest.approx(least), seed
        if least < whole:
            assert found.chain is not None
            stage_loads = [load(graph, second & ~first) for first, second in itertools.pairwise(found.chain.ideals)]
            assert (len(stage_loads), max(stage_loads)) == (stages, pytest.approx(least)), seed
            better += 1
        sure = threshold_search(whole_lattice(graph), stages=stages, lower=0.0, upper=least)
        assert (sure.lower_bound, sure.chain) == (least, None), seed
    assert better > 60


STAGES = 3


def drawn_works(chance: random.Random, count: int) -> tuple[Work, ...]:
    return tuple(
        Work(f"w{index}", chance.choice((0, 0, 0, 1, 4)), chance.choice((0, 0, 1)), chance.choice((0, 0, 0, 3)))
        for index in range(count)
    )


def tangled(seed: int) -> Problem:
    """A graph with tensors that flow against the order or beside it."""
    chance = random.Random(seed)
    count, nets = chance.randint(3, 8), []
    for producer, _ in itertools.product(range(count), range(2)):
        ordered = chance.random() < 0.5
        pool = [index for index in range(producer + 1 if ordered else 0, count) if index != producer]
        if pool and chance.random() < 0.7:
            consumers = tuple(sorted({chance.choice(pool) for _ in range(chance.choice((1, 1, 2, 3)))}))
            nets.append(TensorEdge(producer, consumers, chance.choice((0, 1, 2, 5)), 0.0, ordered))
    return Problem(drawn_works(chance, count), tuple(nets), microbatches=4)


def thin(seed: int) -> Problem:
    """A graph of cheap works behind dear tensors, so that much may be merged."""
    chance = random.Random(seed)
    count, nets = chance.randint(3, 7), []
    for producer in range(count - 1):
        consumers = tuple(sorted({chance.randint(producer + 1, min(count - 1, producer + 2)) for _ in range(2)}))
        nets.append(TensorEdge(producer, consumers, chance.choice((0, 1, 2, 5)), 0.0))
    return Problem(drawn_works(chance, count), tuple(nets), microbatches=4)


def value(graph: Graph, goal: Goal) -> float:
    ideals = list_ideals(graph, limit=10**6)
    assert ideals is not None
    chain = best_chain(IdealTable(graph, list(ideals), by_bytes=goal.least == "bytes"), goal=goal)
    return math.inf if chain is None else chain.value


@pytest.mark.parametrize("case", ["loads", "both", "bytes"])
@pytest.mark.parametrize("make", [tangled, thin])
def test_condensing_keeps_the_best_value_when_stages_may_be_empty(make: Callable[[int], Problem], case: str) -> None:
    merged = finite = 0
    seeds = examples(500, few=200)
    for seed in range(seeds):
        graph = base_graph(make(seed))
        room = random.Random(seed).choice((5, 8, 12))
        goal = Goal(STAGES, "bytes" if case == "bytes" else "load", empty=True)
        goal = replace(goal, capacity_bytes=room) if case == "both" else goal
        smaller = condense(graph, loads=case != "bytes", bytes_=case != "loads")
        expected = value(graph, goal)
        assert value(smaller, goal) == pytest.approx(expected), seed
        merged += smaller.size < graph.size
        finite += expected < math.inf
    assert merged > seeds / 10
    assert finite > seeds / 5


@pytest.mark.parametrize("make", [tangled, thin])
def test_leaving_out_small_costs_gives_bounds(make: Callable[[int], Problem]) -> None:
    below = 0
    for seed in range(120):
        graph = base_graph(make(seed))
        goal = Goal(min(STAGES, graph.size))
        optimum = value(graph, goal)
        relaxed = condense(without_small(graph, small_s=0.2 * optimum), loads=True, bytes_=False)
        bound = value(relaxed, replace(goal, empty=True))
        assert bound <= optimum * (1 + 1e-9)
        below += bound < optimum
    assert below > 2
