"""Devices that hold several stages: what they carry together, and how near the best cut is found."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.ideals import shared
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_brute import brute_force, most_stages
from tests.partition.oracle_problems import Mix, random_problem, with_devices, with_extras
from tests.partition.oracle_verdict import smallest_capacity, solved

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0 + index, 1.0, static_bytes=10, transient_bytes=index) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.25, 0.25) for index in range(3)),
    tuple(Hold(5, index, (), (index,)) for index in range(4)),
    microbatches=4,
    schedule="looped_bfs",
    virtual_stages=2,
)


def test_loads_and_bytes_add_up_and_the_worst_transient_counts_once() -> None:
    costs = check(CHAIN, (0, 1, 2, 3))
    assert costs.lane == (0, 1, 0, 1)
    assert costs.loads_s == (2.5, 4.0, 5.0, 5.5)
    assert (costs.device_loads_s, costs.bottleneck_s) == ((7.5, 9.5), 9.5)
    assert costs.stage_bytes == (30, 31, 32, 33)
    assert costs.device_bytes == (2 * 30 + 2, 2 * 30 + 3)


def test_one_recompute_option_per_device() -> None:
    problem = replace(CHAIN, recompute=("never", "always"), devices=devices_of((61, None)))
    costs = check(problem, (0, 1, 2, 3))
    assert costs.recompute == ("always", "never", "always", "never")
    assert costs.device_loads_s == (7.5 + 1 + 3, 9.5)


def test_few_cuts_are_all_judged() -> None:
    partition = solve(CHAIN, stages=4)
    assert (partition.value_s, partition.lower_bound_s, partition.status) == (9.5, 9.5, "optimal")
    assert smallest_capacity(CHAIN, stages=4) == 63
    with pytest.raises(InfeasibleError, match="no partition fits"):
        solve(replace(CHAIN, devices=devices_of((62, 62))))


def test_too_few_groups_for_one_device() -> None:
    with pytest.raises(InfeasibleError, match="looped_bfs puts 2 stages on a device, and the works fall into 1 group"):
        solve(Problem((Work("a", 1.0, 0.0),), (), microbatches=2, schedule="looped_bfs", virtual_stages=2), stages=2)


def small(seed: int) -> tuple[Problem, int]:
    chance = random.Random(seed)
    problem = random_problem(seed, Mix(chance.randint(4, 7)))
    stages = most_stages(problem, stages=4) // 2 * 2
    problem = replace(problem, schedule=chance.choice(("looped_bfs", "zb_v")), virtual_stages=2)
    if chance.random() < 0.3:
        problem = replace(problem, schedule="interleaved", microbatches=4)
    problem = with_devices(problem, seed, stages=stages // 2)
    problem = with_extras(problem, seed, ties=chance.random() < 0.3, recompute=chance.random() < 0.5, replicas=False)
    capacity = chance.choice((None, None, 150, 250))
    devices = tuple(replace(device, capacity_bytes=capacity) for device in problem.devices or ())
    free = chance.random() < 0.4
    return replace(problem, devices=devices, free_order=free, links=None if free else problem.links), stages


def test_small_cuts_equal_brute_force() -> None:
    feasible = 0
    for seed in range(40):
        problem, stages = small(seed)
        if stages:
            optimum = brute_force(problem, stages=stages).value
            feasible += solved(problem, stages=stages, optimum=optimum) is not None
    assert 15 < feasible < 40


def test_the_local_search_is_near_the_best_and_its_bound_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_FEW", 0)
    excess = []
    for seed in range(40):
        problem, stages = small(seed)
        if not stages:
            continue
        problem = replace(problem, devices=tuple(replace(own, capacity_bytes=None) for own in problem.devices or ()))
        optimum = brute_force(problem, stages=stages).value
        partition = solve(problem, stages=stages)
        assert partition.lower_bound_s <= optimum * (1 + 1e-9)
        assert partition.value_s >= optimum * (1 - 1e-9)
        assert partition.status == "bounded" or partition.value_s == pytest.approx(optimum)
        excess.append(partition.value_s / optimum - 1 if optimum else 0.0)
    assert max(excess) < 0.15
    assert sum(excess) / len(excess) < 0.02


def test_a_longer_chain_is_cut_evenly_over_devices() -> None:
    chance = random.Random(1)
    works = tuple(Work(f"w{index}", chance.uniform(1, 3), chance.uniform(2, 6), static_bytes=10) for index in range(48))
    nets = tuple(TensorEdge(index, (index + 1,), 0.05, 0.05) for index in range(47))
    problem = Problem(works, nets, microbatches=8, schedule="interleaved", virtual_stages=2, devices=(Device(),) * 4)
    partition = solve(problem)
    whole_s = math.fsum(work.forward_s + work.backward_s for work in works)
    assert partition.bottleneck_s < 1.03 * whole_s / 4
    assert partition.gap < 0.03
    tight = replace(problem, devices=devices_of((130,) * 4))
    assert max(solve(tight).costs.device_bytes) <= 130
