"""Proofs by threshold against the dynamic program over all ideals, and the lattice that both can be asked about."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals import thresholds as lattice_module
from autosplit.partition.ideals.chains import best_chain
from autosplit.partition.ideals.enumerate import list_ideals
from autosplit.partition.ideals.table import IdealTable
from autosplit.partition.ideals.thresholds import Lattice, lattice, threshold_search
from autosplit.partition.problem import Problem, TensorEdge, Work

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
