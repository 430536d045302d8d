"""The line of units: its tables against the checker, its cuts against all cuts and moves, its bound against each."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from autosplit.partition.checker import check
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch, listed, moved, paired, stages_of
from autosplit.partition.problem import RECOMPUTE, Device, Hold, Problem, TensorEdge, Tie, Work
from autosplit.partition.step_bound import spread_bound


def random_problem(seed: int, *, works: int = 9, schedule: str = "1f1b", virtual: int = 1, devices: int = 3) -> Problem:
    """Return a chain with skips, storages with any pins, blocks of two, and a tied parameter."""
    chance = random.Random(seed)
    nets, holds = [], []
    for place in range(works - 1):
        others = {place + 1} | {chance.randrange(place + 1, works) for _ in range(chance.randrange(2))}
        seconds = chance.choice((0.0, 0.1, 0.3))
        nets.append(TensorEdge(place, tuple(sorted(others)), seconds, seconds))
        savers = tuple(own for own in sorted({place, *others}) if chance.random() < 0.6)
        holds.append(Hold(chance.randrange(1, 50), place, tuple(sorted(others)), savers))
    holds.append(Hold(7, None, (0, works // 2), (0,)))
    return Problem(
        tuple(
            Work(
                str(place),
                (forward := chance.choice((0.5, 1.0, 2.0))),
                2 * forward,
                chance.randrange(100),
                chance.randrange(20),
                weight_s=forward,
                block=place // 2,
            )
            for place in range(works)
        ),
        tuple(nets),
        tuple(holds),
        ties=(Tie((0, works - 1), 60, 20, 0.2),),
        microbatches=6,
        schedule=schedule,
        virtual_stages=virtual,
        devices=tuple(Device(slowdown=1.0 + 0.5 * (place == 1)) for place in range(devices)),
    )


def all_cuts(size: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, size) for inner in combinations(range(1, size), stages - 1)]


def assigned(bounds: tuple[int, ...]) -> list[int]:
    return [stage for stage in range(len(bounds) - 1) for _ in range(bounds[stage], bounds[stage + 1])]


@pytest.mark.parametrize("seed", range(6))
def test_tables_have_what_the_checker_counts(seed: int) -> None:
    problem = random_problem(seed)
    search = LineSearch(Line(problem), problem, stages=3)
    for bounds in all_cuts(9, 3)[::3]:
        for option in RECOMPUTE:
            cut = search.cut(bounds, (option,) * 3)
            costs = check(problem, assigned(bounds), recompute=(option,) * 3)
            assert cut.device_bytes == costs.device_bytes
            assert cut.step_s == pytest.approx(costs.step_s, rel=1e-12)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_cut_is_within_two_percent_of_the_best_of_all(seed: int, schedule: str, virtual: int) -> None:
    problem = random_problem(seed, schedule=schedule, virtual=virtual)
    stages = 3 * virtual
    search = LineSearch(Line(problem), problem, stages=stages)
    every = [check(problem, assigned(bounds), recompute=("never",) * stages) for bounds in all_cuts(9, stages)]
    best = min(costs.step_s for costs in every)
    found = search.fastest([("never",)] * search.stages)
    assert found is not None
    assert best * (1 - 1e-9) <= found.step_s <= best * 1.02


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_keeps_its_room_and_recomputes_only_what_it_must(seed: int) -> None:
    problem = random_problem(seed)
    search = LineSearch(Line(problem), problem, stages=3)
    least = max(search.min_memory_cut([RECOMPUTE] * search.stages, [1e9] * 3).device_bytes)
    free = search.fastest([("never",)] * search.stages)
    assert free is not None
    room = (least + max(free.device_bytes)) / 2
    found = search.fastest([RECOMPUTE] * search.stages, [room] * 3)
    assert found is not None
    assert max(found.device_bytes) <= room
    pairs = product(all_cuts(9, 3), product(RECOMPUTE, repeat=3))
    every = (check(problem, assigned(bounds), recompute=options) for bounds, options in pairs)
    best = min(costs.step_s for costs in every if max(costs.device_bytes) <= room)
    assert found.step_s <= best * 1.02
    assert search.fastest([RECOMPUTE] * search.stages, [least * 0.9] * 3) is None


def test_a_neighbour_fits_where_one_of_a_devices_stages_needs_most_of_its_room() -> None:
    works = tuple(Work(str(place), 1.0, 2.0, 100 if place == 7 else 10) for place in range(8))
    problem = Problem(works, (), schedule="interleaved", virtual_stages=2, microbatches=4, devices=(Device(), Device()))
    search = LineSearch(Line(problem), problem, stages=4)
    before = search.cut((0, 2, 4, 6, 8), ["never"] * 4)
    assert before.device_bytes == (40, 130)
    room = [50.0, 120.0]
    assert search.fastest([("never",)] * search.stages, room) is None
    found = search.fastest([("never",)] * search.stages, room, near=before)
    assert found is not None
    assert found.device_bytes in {(50, 120), (40, 120)}
    assert search.fastest([("never",)] * search.stages, [30.0, 30.0], near=before) is None


def test_a_devices_stages_update_at_once_and_keep_their_last_microbatches_at_once() -> None:
    works = tuple(Work(str(place), 1.0, 2.0, 10, step_bytes=50) for place in range(4))
    holds = tuple(Hold(30, place, (), (place,)) for place in range(4))
    one = Problem(works, (), holds, schedule="interleaved", virtual_stages=2, microbatches=4, devices=(Device(),) * 2)
    search = LineSearch(Line(one), one, stages=4)
    assert search.device_bytes((0, 1, 2, 3, 4), ["always"] * 4) == (2 * 10 + 2 * 50,) * 2
    light = replace(one, works=tuple(replace(work, step_bytes=0) for work in works))
    search = LineSearch(Line(light), light, stages=4)
    assert search.device_bytes((0, 1, 2, 3, 4), ["always"] * 4) == (2 * 10 + 30,) * 2
    assert search.device_bytes((0, 1, 2, 3, 4), ["except_last"] * 4) == (2 * 10 + 2 * 30,) * 2
    even = search.cut((0, 1, 2, 3, 4), ["except_last"] * 4)
    assert search.fastest([("except_last",)] * search.stages, [79.0] * 2, near=even) is None
    leaner = search.fastest([("except_last", "always")] * search.stages, [79.0] * 2, near=even)
    assert leaner is not None
    assert max(leaner.device_bytes) <= 79


def test_what_is_listed_is_recomputed_stage_by_stage() -> None:
    problem = random_problem(0)
    found = LineSearch(Line(problem), problem, stages=3).fastest(listed(("block", "never", "always")))
    assert found is not None
    assert found.recompute == ("block", "never", "always")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("seed", range(3))
def test_no_cut_is_below_the_bound(seed: int, schedule: str) -> None:
    problem = replace(random_problem(seed, schedule=schedule), nets=(), ties=())
    bound_s = spread_bound(problem, stages=3)
    every = [check(problem, assigned(bounds), recompute=("never",) * 3) for bounds in all_cuts(9, 3)]
    assert 0 < bound_s <= min(costs.step_s for costs in every)


def test_the_bound_is_near_the_step_of_an_even_pipeline() -> None:
    works = tuple(Work(str(place), 1.0, 2.0, weight_s=1.0) for place in range(8))
    for schedule, least in (("1f1b", 0.98), ("zb_h1", 0.97)):
        problem = Problem(works, (), microbatches=32, schedule=schedule)
        step_s = check(problem, range(8)).step_s
        assert least * step_s <= spread_bound(problem, stages=8) <= step_s


SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2)]


def searched(seed: int, schedule: str, virtual: int, *, works: int = 14) -> LineSearch:
    """Return the search on a problem with links of several speeds and no two works alike."""
    problem = replace(random_problem(seed, works=works, schedule=schedule, virtual=virtual), links=(1.0, 0.5))
    chance = np.random.default_rng(seed)
    uneven = tuple(replace(work, forward_s=work.forward_s * (1 + chance.random())) for work in problem.works)
    nets = tuple(replace(net, forward_s=net.forward_s + 0.1 * chance.random()) for net in problem.nets)
    problem = replace(problem, works=uneven, nets=nets)
    return LineSearch(Line(problem), problem, stages=3 * virtual)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limited", [False, True])
def test_what_comes_out_no_move_makes_shorter(seed: int, schedule: str, virtual: int, limited: bool) -> None:
    search = searched(seed, schedule, virtual)
    options, room = [RECOMPUTE if limited else ("never",)] * search.stages, None
    if limited:
        least = max(search.min_memory_cut(options, [1e9] * 3).device_bytes)
        free = search.fastest([("never",)] * search.stages)
        assert free is not None
        room = [(least + max(free.device_bytes)) / 2] * 3
    found = search.fastest(options, room)
    assert found is not None
    chains = np.concatenate([moved(found.bounds, further=True), paired(found.bounds)])
    assert all(left < right for chain in chains.tolist() for left, right in pairwise(chain))
    chosen = search._fitting(chains, options, room)
    again = np.array([[search.share(option) for option in chosen.recompute(row)] for row in range(len(chosen.chains))])
    steps = search.model.steps(stages_of(chosen.chains, search.line.size), again)
    assert (steps >= found.step_s * (1 - 2e-9)).all()


@pytest.mark.parametrize("seed", range(3))
def test_options_beside_a_cut_are_those_from_nothing(seed: int) -> None:
    search = searched(seed, "interleaved", 2)
    ranked = [RECOMPUTE] * search.stages
    least = max(search.min_memory_cut(ranked, [1e9] * 3).device_bytes)
    room = [1.15 * least] * 3
    found = search.fastest(ranked, room)
    assert found is not None
    chains = moved(found.bounds, further=True)
    beside, alone = search._fitting(chains, ranked, room, beside=found), search._fitting(chains, ranked, room)
    assert np.array_equal(beside.chains, alone.chains)
    assert np.array_equal(beside.options, alone.options)
    assert 0 < len(alone.chains) < len(chains)


def test_without_limits_what_takes_the_same_time_is_the_same_cut() -> None:
    search = searched(1, "1f1b", 1)
    every, never, block, always = (
        search.fastest([options] * search.stages) for options in (RECOMPUTE, ("never",), ("block",), ("always",))
    )
    assert block is not None
    assert always is not None
    assert every == never
    assert (block.bounds, block.step_s) == (always.bounds, always.step_s)
    assert block.device_bytes == search.cut(block.bounds, block.recompute).device_bytes
    assert set(block.recompute) == {"block"}
