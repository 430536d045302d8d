"""Groups that change stages: what comes out is legal, fits, costs what it says, and is no worse than before."""

from __future__ import annotations

import pytest

from autosplit.partition.checker import check
from autosplit.partition.goal import FOREVER, Clock, Goal, OutOfTime
from autosplit.partition.graph import base_graph
from autosplit.partition.ideals.search import Found, search
from autosplit.partition.ideals.swaps import best_nearby
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve

WIDE = Problem(
    tuple(Work(f"w{index}", float(2 + index % 5), 0.0, static_bytes=3 * index % 7) for index in range(18)),
    tuple(TensorEdge(index, (index + 9,), 1.0, 0.0) for index in range(9)),
    tuple(Hold(2, index, (index + 9,), (index + 9,)) for index in range(9)),
    microbatches=2,
    devices=devices_of((36, 33, 30)),
)


def test_a_cut_under_capacities_gets_better_and_costs_what_it_says() -> None:
    graph = base_graph(WIDE)
    goal = Goal.of(WIDE, stages=3)
    start = tuple((1 << count) - 1 for count in (0, 3, 4, 18))
    chain = best_nearby(graph, start, goal=goal, clock=FOREVER)
    assert chain is not None
    costs = check(WIDE, Found(chain, graph).assignment)
    assert costs.bottleneck_s == pytest.approx(chain.value)
    assert all(need <= device.capacity_bytes for need, device in zip(costs.stage_bytes, WIDE.devices, strict=True))
    assert chain.value < 36.0
    assert chain == best_nearby(graph, start, goal=goal, clock=FOREVER)


def test_where_nothing_fits_nothing_comes_back() -> None:
    tight = Problem(WIDE.works, WIDE.nets, WIDE.holds, microbatches=2, devices=devices_of((5, 5, 5)))
    start = tuple((1 << count) - 1 for count in (0, 3, 4, 18))
    assert best_nearby(base_graph(tight), start, goal=Goal.of(tight, stages=3), clock=FOREVER) is None


def test_no_time_still_gives_a_cut_and_a_bound_that_holds() -> None:
    with pytest.raises(OutOfTime):
        Clock.start(0.0).check()
    free = Problem(WIDE.works, WIDE.nets, microbatches=2)
    hasty, patient = solve(free, stages=3, time_limit_s=0.0), solve(free, stages=3)
    assert hasty.lower_bound_s <= patient.value_s * (1 + 1e-9) <= hasty.value_s * (1 + 2e-9)
    outcome = search(free, stages=3, least="load", empty=False, ideal_limit=10**5, clock=Clock.start(0.0))
    assert outcome.assignment is not None
