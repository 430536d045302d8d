"""Merges keep the best value: checked on random graphs, on devices that are alike and on uneven ones."""

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
from autosplit.partition.ideals.condense import lossless, without_small
from autosplit.partition.ideals.enumerate import list_ideals
from autosplit.partition.ideals.table import IdealTable
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Work, devices_of
from tests.properties import examples

STAGES = 3


def tangled(seed: int) -> Problem:
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
    return Problem(works, tuple(nets), tuple(holds), microbatches=4, devices=devices_of((14, 12, 10)))


def thin(seed: int) -> Problem:
    """A graph of cheap works behind dear tensors, so that much may be merged, on devices that differ."""
    chance = random.Random(seed)
    count = chance.randint(3, 7)
    works = tuple(
        Work(
            f"w{index}",
            chance.choice((0, 0, 0, 1, 4)),
            chance.choice((0, 0, 1)),
            chance.choice((0, 0, 0, 3)),
            chance.choice((0, 0, 1, 5)),
        )
        for index in range(count)
    )
    nets, holds = [], []
    for producer in range(count - 1):
        consumers = tuple(sorted({chance.randint(producer + 1, min(count - 1, producer + 2)) for _ in range(2)}))
        nets.append(TensorEdge(producer, consumers, chance.choice((0, 1, 2, 5)), 0.0))
        savers = tuple(sorted({chance.randrange(count) for _ in range(chance.choice((0, 0, 1)))}))
        holds.append(Hold(chance.choice((0, 1, 4)), producer, consumers, savers))
    return Problem(
        works,
        tuple(nets),
        tuple(holds),
        microbatches=chance.choice((1, 4)),
        devices=tuple(Device(chance.choice((0.5, 1.0, 3.0)), chance.choice((None, 12, 20))) for _ in range(STAGES)),
        links=(chance.choice((0.0, 1.0, 3.0)), 0.5),
    )


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
        problem = make(seed)
        goal = Goal.of(problem, stages=STAGES, least="bytes" if case == "bytes" else "load", empty=True)
        if case == "loads":
            goal = replace(goal, capacity_bytes=None)
        graph = base_graph(problem)
        smaller = lossless(graph, goal=goal, loads=case != "bytes", bytes_=case != "loads")
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
        problem = make(seed)
        graph = base_graph(problem)
        goal = Goal.of(problem, stages=min(STAGES, graph.size), least="load")
        optimum = value(graph, goal)
        if optimum == math.inf:
            continue
        bare = without_small(graph, goal=goal, small_s=0.2 * optimum)
        relaxed = lossless(bare, goal=goal.relaxed(), loads=True, bytes_=False)
        bound = value(relaxed, replace(goal.relaxed(), empty=True))
        assert bound <= optimum * (1 + 1e-9)
        below += bound < optimum
    assert below > 2
