"""The solver against brute force, against an unpruned search, and against its own checker."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_verdict import smallest_capacity
from tests.properties import examples


@st.composite
def problems(draw: st.DrawFn, *, largest: int = 7, capacities: bool = False) -> Problem:
    """Small problems with branches, shared tensors, zero costs, colours, order pairs and storages."""
    count = draw(st.integers(1, largest))
    index = st.integers(0, count - 1)
    small = st.sampled_from((0, 0, 1, 2, 3, 5))
    works = tuple(
        Work(
            f"w{number}",
            draw(small),
            draw(small),
            static_bytes=draw(small),
            transient_bytes=draw(small),
            colocation_group=draw(st.sampled_from((None, None, None, None, "red", "blue"))),
        )
        for number in range(count)
    )
    nets, holds, order = [], [], []
    for producer in range(count - 1):
        consumers = draw(st.lists(st.integers(producer + 1, count - 1), max_size=3, unique=True))
        if consumers:
            nets.append(TensorEdge(producer, tuple(consumers), draw(small), draw(small)))
            savers = draw(st.lists(st.sampled_from((producer, *consumers)), max_size=2, unique=True))
            holds.append(Hold(draw(small), producer, tuple(consumers), tuple(savers)))
    for _ in range(draw(st.integers(0, 2))):
        holds.append(
            Hold(draw(small), draw(st.none() | index), tuple(draw(st.lists(index, max_size=2))), (draw(index),))
        )
    for _ in range(draw(st.integers(0, 2))):
        order.append(tuple(sorted((draw(index), draw(index)))))
    return Problem(
        works,
        tuple(nets),
        tuple(holds),
        tuple(order),
        microbatches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(("1f1b", "gpipe"))),
    )


def legal_assignments(problem: Problem, *, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every legal assignment to exactly ``stages`` non-empty stages, by plain enumeration."""
    precedence = problem.precedence
    colours = [work.colocation_group for work in problem.works]
    for assignment in itertools.product(range(stages), repeat=len(problem.works)):
        if len(set(assignment)) == stages and all(
            assignment[before] <= assignment[after] for before, after in precedence
        ):
            seen: dict[object, int] = {}
            pairs = zip(colours, assignment, strict=True)
            if all(colour is None or seen.setdefault(colour, stage) == stage for colour, stage in pairs):
                yield assignment


def brute_force(problem: Problem, *, stages: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return (bottleneck, stage bytes) of every legal assignment to ``stages`` stages, or as many as there can be."""
    for count in range(stages, 0, -1):
        costs = [check(problem, assignment) for assignment in legal_assignments(problem, stages=count)]
        if costs:
            return [(cost.bottleneck_s, cost.stage_bytes) for cost in costs]
    raise AssertionError("one stage is always legal")


@settings(max_examples=examples(250), deadline=None)
@given(problem=problems(), stages=st.integers(1, 4))
def test_solve_equals_brute_force(problem: Problem, stages: int) -> None:
    every = brute_force(problem, stages=stages)
    partition = solve(problem, stages=stages)
    costs = check(problem, partition.assignment)
    assert partition.status == "optimal"
    assert partition.stages == len(every[0][1]) == len(set(partition.assignment))
    assert partition.bottleneck_s == pytest.approx(min(bottleneck for bottleneck, _ in every))
    assert partition.lower_bound_s <= partition.bottleneck_s
    assert (partition.loads_s, partition.stage_bytes) == (costs.loads_s, costs.stage_bytes)


@settings(max_examples=examples(250), deadline=None)
@given(problem=problems(), stages=st.integers(1, 4), data=st.data())
def test_solve_under_capacities_equals_brute_force(problem: Problem, stages: int, data: st.DataObject) -> None:
    every = brute_force(problem, stages=stages)
    # Capacities around what some assignment needs, so that they bind.
    basis = data.draw(st.sampled_from(every))[1]
    capacity = tuple(
        max(0, basis[min(stage, len(basis) - 1)] + data.draw(st.integers(-2, 1))) for stage in range(stages)
    )
    problem = replace(problem, devices=devices_of(capacity))
    fitting = [cost for cost, bytes_ in every if all(need <= cap for need, cap in zip(bytes_, capacity, strict=False))]
    if fitting:
        partition = solve(problem, stages=stages)
        assert partition.status == "optimal"
        assert partition.bottleneck_s == pytest.approx(min(fitting))
        assert all(need <= cap for need, cap in zip(partition.stage_bytes, capacity, strict=False))
    else:
        with pytest.raises(InfeasibleError, match="no partition fits"):
            solve(problem, stages=stages)


@settings(max_examples=examples(200), deadline=None)
@given(problem=problems(), stages=st.integers(1, 4))
def test_smallest_capacity_equals_brute_force(problem: Problem, stages: int) -> None:
    least = min(max(bytes_) for _, bytes_ in brute_force(problem, stages=stages))
    assert smallest_capacity(problem, stages=stages) == least


@settings(max_examples=6, deadline=None)
@given(problem=problems(largest=10).filter(lambda problem: len(problem.works) >= 9), stages=st.integers(2, 3))
def test_solve_equals_brute_force_on_ten_works(problem: Problem, stages: int) -> None:
    assert solve(problem, stages=stages).bottleneck_s == pytest.approx(min(brute_force(problem, stages=stages))[0])


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems(), stages=st.integers(1, 4))
def test_without_room_for_ideals_the_bounds_hold(problem: Problem, stages: int) -> None:
    least = min(bottleneck for bottleneck, _ in brute_force(problem, stages=stages))
    partition = solve(problem, stages=stages, ideal_limit=1)
    assert partition.lower_bound_s <= least + 1e-9
    assert partition.bottleneck_s >= least - 1e-9
    if partition.status == "optimal":
        assert partition.bottleneck_s == pytest.approx(least)


def random_problem(seed: int, *, count: int, reach: int) -> Problem:
    """A layered graph with short and long tensors and uneven costs."""
    chance = random.Random(seed)
    works = tuple(
        Work(
            f"w{index}",
            chance.choice((0, 1, 2, 7, 20)),
            chance.choice((0, 1, 3)),
            chance.randrange(50),
            chance.randrange(9),
        )
        for index in range(count)
    )
    nets, holds = [], []
    for producer in range(count - 1):
        last = min(count - 1, producer + reach)
        consumers = {producer + 1} if chance.random() < 0.6 else set()
        consumers |= {chance.randint(producer + 1, last) for _ in range(chance.choice((0, 1, 1)))}
        if chance.random() < 0.1:
            consumers.add(chance.randint(producer + 1, count - 1))
        if consumers:
            nets.append(TensorEdge(producer, tuple(consumers), chance.choice((0, 1, 4, 9)), chance.choice((0, 1, 4))))
            holds.append(Hold(chance.randrange(30), producer, tuple(consumers), (min(consumers),)))
    return Problem(works, tuple(nets), tuple(holds), microbatches=4)


def oracle(problem: Problem, *, stages: int, capacity: float) -> float:
    """Return the least bottleneck by recursion over all ideals: no pruning, no merging, costs from the checker."""
    count = len(problem.works)
    before = [{tail for tail, head in problem.precedence if head == index} for index in range(count)]
    ideals = {frozenset[int]()}
    level = set(ideals)
    while level:
        level = {
            ideal | {index}
            for ideal in level
            for index in range(count)
            if index not in ideal and before[index] <= ideal
        }
        ideals |= level
    everything = frozenset(range(count))

    @cache
    def stage_cost(inside: frozenset[int], stage: int) -> float:
        # Any assignment that puts just these works on this stage tells its cost; the others' legality plays no part.
        bare = replace(problem, order=(), nets=())
        assignment = [
            stage if index in inside else (stages - 1 if stage != stages - 1 else 0) for index in range(count)
        ]
        assignment_bytes = check(bare, assignment).stage_bytes
        needed = assignment_bytes[stage] if stage < len(assignment_bytes) else 0
        load = sum(problem.works[index].forward_s + problem.works[index].backward_s for index in inside)
        for net in problem.nets:
            pins = inside & {net.producer, *net.consumers}
            if 0 < len(pins) < len({net.producer, *net.consumers}):
                load += net.forward_s + net.backward_s
        return load if needed <= capacity else math.inf

    @cache
    def best(ideal: frozenset[int], used: int) -> float:
        if used == 0:
            return 0.0 if not ideal else math.inf
        smaller = (other for other in ideals if other < ideal)
        return min(
            (max(best(other, used - 1), stage_cost(ideal - other, used - 1)) for other in smaller), default=math.inf
        )

    return best(everything, stages)


@pytest.mark.parametrize("seed", range(8))
def test_solve_equals_an_unpruned_search_on_larger_graphs(seed: int) -> None:
    problem = random_problem(seed, count=13, reach=3)
    assert solve(problem, stages=4).bottleneck_s == pytest.approx(oracle(problem, stages=4, capacity=math.inf))
    capacity = int(smallest_capacity(problem, stages=4) * 1.05)
    limited = solve(replace(problem, devices=devices_of((capacity,) * 4)), stages=4)
    assert limited.bottleneck_s == pytest.approx(oracle(problem, stages=4, capacity=capacity))
    assert max(limited.stage_bytes) <= capacity


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_on_ideals_gives_valid_bounds_around_the_optimum(seed: int) -> None:
    problem = random_problem(seed, count=40, reach=3)
    exact = solve(problem, stages=5)
    rough = solve(problem, stages=5, ideal_limit=60)
    assert exact.status == "optimal"
    assert rough.lower_bound_s <= exact.bottleneck_s * (1 + 1e-9)
    assert rough.bottleneck_s >= exact.bottleneck_s * (1 - 1e-9)
