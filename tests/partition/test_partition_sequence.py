"""The best pieces of one order against all its pieces, one by one."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from autosplit.partition.goal import Goal, Terms
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals import some_orders
from autosplit.partition.problem import Hold, Net, Problem, Work
from autosplit.partition.sequence import best_prefixes


def tangled_graph(chance: random.Random, count: int) -> Graph:
    """Works with tensors and storages between any of them, some with savers before the producer or without one."""
    costs = (0, 0, 1, 2, 5)
    works = tuple(
        Work(f"w{index}", chance.choice(costs), 0.0, chance.choice(costs), chance.choice(costs))
        for index in range(count)
    )
    nets, holds = [], []
    for index in range(count - 1):
        consumers = tuple(sorted(chance.sample(range(index + 1, count), chance.randint(1, min(3, count - index - 1)))))
        nets.append(Net(index, consumers, chance.choice(costs), 0.0))
        savers = tuple(chance.sample(range(count), chance.randint(0, 2)))
        holds.append(Hold(chance.choice(costs), chance.choice((None, index, index)), consumers, savers))
    backward = chance.sample(range(count), 2) if count > 1 else []
    if backward:
        nets.append(Net(max(backward), (min(backward),), 2.0, 0.0, ordered=False))
    return base_graph(Problem(works, tuple(nets), tuple(holds), microbatches=4))


def stage_costs(graph: Graph, inside: set[int]) -> tuple[float, float, float, float]:
    """Return time, transfers, fixed bytes and bytes per microbatch of a stage, from the definitions."""
    paid = 0.0
    for tensor in graph.tensors:
        pins = {tensor.producer, *tensor.consumers}
        paid += tensor.cost_s * (bool(pins & inside) and not pins <= inside)
    kept = float(sum(graph.resident_bytes[group] for group in inside))
    for storage in graph.storages:
        outside = storage.producer not in inside
        cut = bool(storage.consumers & inside) if outside else not storage.consumers <= inside
        kept += storage.bytes * (cut or bool(storage.savers & inside))
    static = sum(graph.static_bytes[group] for group in inside)
    fixed = static + max((graph.transient_bytes[group] for group in inside), default=0)
    return sum(graph.times_s[group] for group in inside), paid, float(fixed), kept


def brute_force(graph: Graph, order: list[int], goal: Goal) -> float:
    terms = goal.terms or (Terms(),) * goal.stages
    capacity = goal.capacity_bytes or (math.inf,) * goal.stages
    least = math.inf
    fewest = 0 if goal.empty else 1
    for cuts in itertools.combinations_with_replacement(range(graph.size + 1), goal.stages - 1):
        ends = (0, *cuts, graph.size)
        if any(end - start < fewest for start, end in itertools.pairwise(ends)):
            continue
        costs = [stage_costs(graph, set(order[start:end])) for start, end in itertools.pairwise(ends)]
        loads = [term.work * cost[0] + term.net * cost[1] for term, cost in zip(terms, costs, strict=True)]
        sizes = [cost[2] + flight * cost[3] for flight, cost in zip(goal.in_flight, costs, strict=True)]
        if max(loads) <= goal.load_limit_s and all(size <= most for size, most in zip(sizes, capacity, strict=True)):
            least = min(least, max(sizes if goal.least == "bytes" else loads))
    return least


def value(graph: Graph, order: list[int], goal: Goal) -> float:
    chain = best_prefixes(graph, order, goal=goal)
    if chain is None:
        return math.inf
    inner = [second & ~first for first, second in itertools.pairwise(chain.ideals)]
    assert (chain.ideals[0], chain.ideals[-1]) == (0, (1 << graph.size) - 1)
    stages = [{group for group in range(graph.size) if mask >> group & 1} for mask in inner]
    terms = goal.terms or (Terms(),) * goal.stages
    costs = [stage_costs(graph, stage) for stage in stages]
    if goal.least == "bytes":
        own = max(cost[2] + flight * cost[3] for flight, cost in zip(goal.in_flight, costs, strict=True))
    else:
        own = max(term.work * cost[0] + term.net * cost[1] for term, cost in zip(terms, costs, strict=True))
    assert own == pytest.approx(chain.value), "the chain does not cost what it says"
    return chain.value


@pytest.mark.parametrize("kind", ["load", "empty", "terms", "capacity", "bytes", "limited bytes"])
def test_the_best_prefixes_equal_brute_force(kind: str) -> None:
    chance = random.Random(len(kind))
    finite = 0
    for _ in range(150):
        graph = tangled_graph(chance, chance.randint(1, 8))
        order = chance.choice(some_orders(graph))
        stages = chance.randint(1, min(4, graph.size))
        goal = Goal(tuple(range(stages, 0, -1)), empty=kind == "empty")
        if kind == "terms":
            terms = tuple(Terms(chance.choice((0.5, 1.0, 2.0)), chance.choice((0.0, 1.0, 3.0))) for _ in range(stages))
            goal = replace(goal, terms=terms)
        if kind == "capacity":
            goal = replace(goal, capacity_bytes=tuple(chance.uniform(5.0, 60.0) for _ in range(stages)))
        if "bytes" in kind:
            goal = replace(goal, least="bytes")
        if kind == "limited bytes":
            goal = replace(goal, load_limit_s=brute_force(graph, order, replace(goal, least="load")) + 2.0)
        expected = brute_force(graph, order, goal)
        assert value(graph, order, goal) == pytest.approx(expected)
        finite += expected < math.inf
    assert finite > 40


def test_a_load_limit_that_nothing_keeps_has_no_chain() -> None:
    chance = random.Random(0)
    for _ in range(50):
        graph = tangled_graph(chance, 6)
        goal = Goal((1, 1, 1))
        least = brute_force(graph, list(range(graph.size)), goal)
        assert (
            best_prefixes(graph, range(graph.size), goal=replace(goal, load_limit_s=least * 0.999)) is None or not least
        )
        assert best_prefixes(graph, range(graph.size), goal=replace(goal, load_limit_s=least)) is not None
