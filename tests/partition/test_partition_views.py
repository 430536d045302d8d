"""Merges on uneven devices: the best value survives them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autosplit.partition.goal import Goal
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals.chains import best_chain
from autosplit.partition.ideals.condense import glued, lossless, without_small
from autosplit.partition.ideals.enumerate import all_ideals
from autosplit.partition.ideals.table import Table
from autosplit.partition.problem import RECOMPUTE, Device, Hold, Problem, TensorEdge, Tie, Work

STAGES = 3


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
            sync_s=chance.choice((0, 0, 4)),
            block=chance.choice((None, index // 3)),
        )
        for index in range(count)
    )
    nets, holds = [], []
    for producer in range(count - 1):
        consumers = tuple(sorted({chance.randint(producer + 1, min(count - 1, producer + 2)) for _ in range(2)}))
        nets.append(TensorEdge(producer, consumers, chance.choice((0, 1, 2, 5)), 0.0))
        savers = tuple(sorted({chance.randrange(count) for _ in range(chance.choice((0, 0, 1)))}))
        holds.append(Hold(chance.choice((0, 1, 4)), producer, consumers, savers))
    pair = tuple(sorted(chance.sample(range(count), 2)))
    free = chance.random() < 0.3
    bare = chance.random() < 0.3
    options = tuple(option for option in RECOMPUTE if chance.random() < 0.5) or ("block",)
    return Problem(
        works,
        tuple(nets),
        tuple(holds),
        ties=(Tie(pair, chance.choice((0, 4)), chance.choice((0, 4)), chance.choice((0.0, 3.0))),) * (seed % 2),
        microbatches=chance.choice((1, 4)),
        devices=tuple(
            Device(chance.choice((0.5, 1.0, 3.0)), chance.choice((None, 12, 20)), chance.choice((1, 1, 3)))
            for _ in range(STAGES)
        ),
        links=(chance.choice((0.0, 0.5, 2.0)),) * 2 if free else (chance.choice((0.0, 1.0, 3.0)), 0.5),
        free_order=free,
        recompute=("never",) if bare else options,
    )


def value(graph: Graph, goal: Goal) -> float:
    ideals = all_ideals(graph, limit=10**6)
    assert ideals is not None
    chain = best_chain(Table(graph, ideals, by_bytes=goal.least == "bytes"), goal=goal)
    return math.inf if chain is None else chain.value


@pytest.mark.parametrize("case", ["loads", "both", "bytes"])
def test_condensing_keeps_the_best_value_when_stages_may_be_empty(case: str) -> None:
    merged = finite = 0
    for seed in range(250):
        problem = thin(seed)
        goal = Goal.of(problem, stages=STAGES, least="bytes" if case == "bytes" else "load", empty=True)
        if case == "loads":
            goal = replace(goal, capacity_bytes=None)
        graph = base_graph(problem)
        smaller = lossless(graph, goal=goal, loads=case != "bytes", bytes_=case != "loads")
        expected = value(graph, goal)
        assert value(smaller, goal) == pytest.approx(expected), seed
        merged += smaller.size < graph.size
        finite += expected < math.inf
    assert merged > 25
    assert finite > 75


def test_gluing_and_leaving_out_small_costs_give_bounds() -> None:
    smaller = below = 0
    for seed in range(120):
        problem = thin(seed)
        goal = Goal.of(problem, stages=min(STAGES, base_graph(problem).size), least="load")
        graph = base_graph(problem)
        optimum = value(graph, goal)
        if optimum == math.inf:
            continue
        kept = glued(graph, goal=goal, bound_s=optimum)
        if kept.size >= goal.stages:
            assert value(kept, goal) == pytest.approx(optimum), seed
        smaller += kept.size < graph.size
        bare = without_small(graph, goal=goal, small_s=0.2 * optimum)
        relaxed = lossless(bare, goal=goal.relaxed(), loads=True, bytes_=False)
        bound = value(relaxed, replace(goal.relaxed(), empty=True))
        assert bound <= optimum * (1 + 1e-9)
        below += bound < optimum
    assert smaller > 1
    assert below > 2


@pytest.mark.parametrize(("recompute", "size", "least_s"), [("never", 1, 6.0), ("always", 2, 11.0)])
def test_what_is_recomputed_weighs_twice(recompute: str, size: int, least_s: float) -> None:
    works = (Work("a", 4.0, 0.0), Work("b", 2.0, 0.0))
    problem = Problem(works, (TensorEdge(0, (1,), 3.0, 0.0),), microbatches=4, recompute=(recompute,))
    goal = Goal.of(problem, stages=2, empty=True)
    smaller = lossless(base_graph(problem), goal=goal, loads=True, bytes_=False)
    assert (smaller.size, value(smaller, goal)) == (size, least_s)
