"""Devices that differ, links, replicas and free order: costs by hand, and the solver against brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.ideals import enumerate as ideals
from autosplit.partition.ideals import search
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Work
from autosplit.partition.solve import solve
from tests.partition.oracle_brute import brute_force
from tests.partition.oracle_problems import Mix, random_problem

CHAIN = Problem(
    tuple(Work(f"w{index}", 1.0, 2.0, static_bytes=100, weight_s=1.0, sync_s=4.0) for index in range(4)),
    tuple(TensorEdge(index, (index + 1,), 0.25, 0.5) for index in range(3)),
    tuple(Hold(10, index, (index + 1,), (index + 1,)) for index in range(3)),
    microbatches=8,
)


def test_a_slow_device_and_its_link_by_hand() -> None:
    problem = replace(CHAIN, devices=(Device(2.0), Device()), links=(4.0,))
    costs = check(problem, (0, 1, 1, 1))
    assert costs.loads_s == (2 * 3 + 4 * 0.75, 9 + 4 * 0.75)
    assert (costs.order, costs.device_loads_s) == ((0, 1), costs.loads_s)
    partition = solve(problem)
    assert (partition.assignment, partition.bottleneck_s, partition.status) == ((0, 1, 1, 1), 12.0, "optimal")


def test_the_slower_of_the_links_next_to_a_device_counts() -> None:
    problem = replace(CHAIN, devices=(Device(),) * 3, links=(2.0, 6.0))
    assert check(problem, (0, 1, 1, 2)).loads_s == (3 + 2 * 0.75, 6 + 6 * 1.5, 3 + 6 * 0.75)
    # Two stages end before the slow link, which is next to the second device all the same.
    assert check(problem, (0, 1, 1, 1)).loads_s == (3 + 2 * 0.75, 9 + 6 * 0.75)


def test_replicas_share_microbatches_and_synchronise_once_per_step() -> None:
    problem = replace(CHAIN, devices=(Device(replicas=4), Device()))
    assert check(problem, (0, 0, 0, 1)).loads_s == ((9 + 0.75) / 4 + 12 * 3 / 4 / 8, 3.75)
    partition = solve(problem)
    assert (partition.assignment, partition.bottleneck_s) == ((0, 0, 0, 1), 3.75)


def test_free_order_puts_the_small_fast_device_where_little_is_held() -> None:
    # The first stage holds two microbatches, the last one; only the slow device has room for the first.
    works = (Work("a", 1.0, 1.0), Work("b", 4.0, 4.0))
    problem = Problem(works, (), (Hold(10, 0, (), (0,)),), microbatches=8, devices=(Device(1.0, 5), Device(3.0, 20)))
    problem = replace(problem, order=((0, 1),))
    with pytest.raises(InfeasibleError, match="no partition fits"):
        solve(problem)
    partition = solve(replace(problem, free_order=True))
    assert (partition.order, partition.assignment, partition.bottleneck_s) == ((1, 0), (0, 1), 8.0)


def test_fewer_groups_than_devices_take_the_best_devices() -> None:
    works = (Work("a", 2.0, 0.0), Work("b", 3.0, 0.0))
    devices = (Device(4.0), Device(1.0), Device(2.0))
    problem = Problem(works, (TensorEdge(0, (1,), 0.0, 0.0),), microbatches=1, devices=devices, free_order=True)
    partition = solve(problem)
    assert (partition.order, partition.loads_s, partition.status) == ((2, 1), (4.0, 3.0), "optimal")


def test_the_simulated_step_by_hand() -> None:
    works = (Work("a", 1.0, 2.0, sync_s=1.0), Work("b", 3.0, 4.0, sync_s=8.0))
    problem = Problem(
        works,
        (TensorEdge(0, (1,), 0.5, 0.25), TensorEdge(1, (0,), 0.125, 0.0, ordered=False)),
        microbatches=1,
        devices=(Device(2.0), Device(1.0, replicas=2)),
        links=(2.0,),
    )
    costs = check(problem, (0, 1))
    forward_s = 2 * 1 + 2 * 0.5 + 3 / 2
    backward_s = 4 / 2 + 2 * (0.25 + 0.125) + 2 * 2
    assert costs.step_s == forward_s + backward_s + 8 / 2


def test_two_kinds_of_device_on_a_long_chain_beat_a_cut_that_ignores_them() -> None:
    chance = random.Random(3)
    works = tuple(Work(f"w{index}", chance.uniform(1, 3), chance.uniform(2, 6)) for index in range(60))
    nets = tuple(TensorEdge(index, (index + 1,), 0.1, 0.1) for index in range(59))
    problem = Problem(works, nets, microbatches=16, devices=(Device(),) * 4 + (Device(2.0),) * 4, free_order=True)
    partition = solve(problem)
    blind = solve(replace(problem, devices=None, free_order=False), stages=8)
    aware_s, blind_s = partition.bottleneck_s, check(problem, blind.assignment).bottleneck_s
    assert partition.status == "optimal"
    assert aware_s < 0.8 * blind_s
    # Six fast devices' worth of speed; no cut of such works is perfectly even.
    whole_s = math.fsum(work.forward_s + work.backward_s for work in works)
    assert whole_s / 6 <= aware_s < 1.15 * whole_s / 6


@pytest.mark.parametrize("seed", range(6))
def test_large_graphs_start_from_runs_of_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(random_problem(seed, Mix(24)), devices=(Device(), Device(2.0), Device()))
    exact = solve(problem)
    monkeypatch.setattr(ideals, "_MOST_GROUPS", 8)
    monkeypatch.setattr(search, "_ENTRIES", 200)
    rough = solve(problem)
    assert rough.lower_bound_s <= exact.bottleneck_s * (1 + 1e-9)
    assert exact.bottleneck_s * (1 - 1e-9) <= rough.bottleneck_s < 1.5 * exact.bottleneck_s
    assert (exact.status, len(set(rough.assignment))) == ("optimal", 3)


def test_more_devices_than_works_in_free_order_equal_brute_force() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        problem = random_problem(seed, Mix(chance.randint(2, 4), zero=0.0))
        devices = tuple(Device(chance.choice((0.5, 1.0, 4.0))) for _ in range(5))
        problem = replace(problem, devices=devices, free_order=True)
        partition = solve(problem)
        assert partition.status == "optimal"
        assert partition.value_s == pytest.approx(brute_force(problem, stages=5).value), seed
