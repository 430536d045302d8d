"""Merges keep the best value: checked on random graphs, each concern by itself."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals.chains import best_chain
from autosplit.partition.ideals.condense import MergeObjective, condense, merge_inseparable
from autosplit.partition.ideals.enumerate import all_ideals, neighbourhood, prefix_ideals, some_orders
from autosplit.partition.ideals.table import Table
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work
from tests.properties import examples

GOALS = {
    "load": (Goal((2, 1, 1)), MergeObjective(loads=True, bytes=False)),
    "bytes": (Goal((2, 1, 1), least="bytes"), MergeObjective(loads=False, bytes=True)),
    "both": (Goal((3, 2, 1), capacity_bytes=(14.0, 12.0, 10.0)), MergeObjective(loads=True, bytes=True)),
}


def thin_graph(seed: int) -> Graph:
    """A graph of few branches whose works are light and whose tensors are dear, so that much can be merged."""
    chance = random.Random(seed)
    count = chance.randint(3, 7)
    works = tuple(
        Work(f"w{index}", chance.choice((0, 0, 1, 4)), 0.0, chance.choice((0, 0, 0, 3)), chance.choice((0, 1, 2, 5)))
        for index in range(count)
    )
    nets, holds = [], []
    for index in range(count - 1):
        if chance.random() < 0.9:
            consumers = {index + 1, chance.randint(index + 1, count - 1)} if chance.random() < 0.5 else {index + 1}
            nets.append(TensorEdge(index, tuple(sorted(consumers)), chance.choice((0, 1, 2, 5)), 0.0))
            savers = {chance.choice((index, *consumers))} if chance.random() < 0.4 else set()
            holds.append(Hold(chance.choice((1, 2, 4)), index, tuple(sorted(consumers)), tuple(savers)))
    return base_graph(Problem(works, tuple(nets), tuple(holds), microbatches=4))


def tangled_graph(seed: int) -> Graph:
    """A graph with tensors that flow against the order or beside it, and storages that anyone may save."""
    chance = random.Random(seed)
    count = chance.randint(3, 8)
    works = tuple(
        Work(f"w{index}", chance.choice((0, 0, 0, 1, 4)), 0.0, chance.choice((0, 0, 0, 3)), chance.choice((0, 0, 1, 5)))
        for index in range(count)
    )
    nets, holds = [], []
    for producer, _ in itertools.product(range(count), range(2)):
        ordered = chance.random() < 0.5
        pool = [index for index in range(producer + 1 if ordered else 0, count) if index != producer]
        if pool and chance.random() < 0.7:
            consumers = tuple(sorted({chance.choice(pool) for _ in range(chance.choice((1, 1, 2, 3)))}))
            nets.append(TensorEdge(producer, consumers, chance.choice((0, 1, 2, 5)), 0.0, ordered))
            savers = tuple(sorted({chance.randrange(count) for _ in range(chance.choice((0, 0, 1, 2)))}))
            holds.append(Hold(chance.choice((0, 1, 4)), chance.choice((producer, producer, None)), consumers, savers))
    return base_graph(Problem(works, tuple(nets), tuple(holds), microbatches=4))


def value(graph: Graph, goal: Goal) -> float:
    ideals = all_ideals(graph, limit=10**6)
    assert ideals is not None
    chain = best_chain(Table(graph, ideals), goal=goal)
    return math.inf if chain is None else chain.value


@pytest.mark.parametrize("name", GOALS)
@pytest.mark.parametrize("make", [thin_graph, tangled_graph])
def test_condensing_keeps_the_best_value_when_stages_may_be_empty(make: Callable[[int], Graph], name: str) -> None:
    goal, concern = GOALS[name]
    merged = finite = 0
    seeds = examples(500, few=150)
    for seed in range(seeds):
        graph = make(seed)
        smaller = condense(graph, concern=concern)
        expected = value(graph, replace(goal, empty=True))
        assert value(smaller, replace(goal, empty=True)) == pytest.approx(expected), seed
        merged += smaller.size < graph.size
        finite += expected < math.inf
    assert merged > seeds / 5
    assert finite > seeds / 5


def test_gluing_what_is_dear_to_cut_keeps_the_optimum() -> None:
    glued = 0
    for seed in range(300):
        graph = (thin_graph, tangled_graph)[seed % 2](seed)
        goal = Goal((1,) * min(3, graph.size))
        least = value(graph, goal)
        smaller = merge_inseparable(graph, bound_s=least)
        assert value(smaller, goal) == pytest.approx(least), seed
        glued += smaller.size < graph.size
    assert glued > 30


def test_a_pinned_work_is_not_moved_but_may_be_joined() -> None:
    works = (Work("a", 1.0, 0.0), Work("leaf", 0.0, 0.0), Work("b", 4.0, 0.0), Work("late", 0.0, 0.0))
    nets = (TensorEdge(0, (1,), 2.0, 0.0), TensorEdge(0, (2,), 0.5, 0.0), TensorEdge(2, (3,), 2.0, 0.0))
    graph = base_graph(Problem(works, nets, microbatches=2))
    assert condense(graph, concern=MergeObjective(loads=True, bytes=False)).size == 2
    assert condense(graph, concern=MergeObjective(loads=True, bytes=False, pinned=frozenset((0, 1, 2, 3)))).size == 4
    smaller = condense(graph, concern=MergeObjective(loads=True, bytes=False, pinned=frozenset((1, 2))))
    assert smaller.size == 3
    assert smaller.group_of[3] == smaller.group_of[2]


def test_ideals_of_a_diamond() -> None:
    works = tuple(Work(name, 1.0, 0.0) for name in "abcd")
    nets = (TensorEdge(0, (1, 2), 1.0, 0.0), TensorEdge(1, (3,), 1.0, 0.0), TensorEdge(2, (3,), 1.0, 0.0))
    graph = base_graph(Problem(works, nets, microbatches=1))
    everything = [0b0000, 0b0001, 0b0011, 0b0101, 0b0111, 0b1111]
    assert all_ideals(graph, limit=6) == everything
    assert all_ideals(graph, limit=5) is None
    assert set(prefix_ideals(some_orders(graph))) <= set(everything)
    assert sorted(neighbourhood(graph, [0b0011], width=3)) == [0b0001, 0b0011, 0b0111]
    assert sorted(neighbourhood(graph, [0b0011], width=10)) == everything
