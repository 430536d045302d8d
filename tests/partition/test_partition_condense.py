"""Merges keep the best value: checked on random graphs."""

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
from autosplit.partition.ideals.condense import condense, without_small
from autosplit.partition.ideals.enumerate import list_ideals
from autosplit.partition.ideals.table import IdealTable
from autosplit.partition.problem import Problem, TensorEdge, Work
from tests.properties import examples

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
