"""Moves of a line's boundaries: bounds from known paths against simulated steps, the pruned search against all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autosplit.partition.line.line import Line
from autosplit.partition.line.moves import moved, paired, stages_of
from autosplit.partition.line.search import LineSearch
from autosplit.partition.problem import RECOMPUTE, TensorEdge
from tests.partition.test_line_search import all_cuts, random_problem

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2)]


def searched(seed: int, schedule: str, virtual: int, *, works: int = 14) -> LineSearch:
    """Return the search on a problem with links of several speeds and no two works alike."""
    problem = replace(random_problem(seed, works=works, schedule=schedule, virtual=virtual), links=(1.0, 0.5))
    chance = np.random.default_rng(seed)
    uneven = tuple(replace(work, forward_s=work.forward_s * (1 + chance.random())) for work in problem.works)
    nets = tuple(replace(net, forward_s=net.forward_s + 0.1 * chance.random()) for net in problem.nets)
    problem = replace(problem, works=uneven, nets=nets)
    return LineSearch(Line(problem), problem, stages=3 * virtual)


def some_cuts(search: LineSearch, seed: int, count: int = 40) -> np.ndarray:
    cuts = all_cuts(search.line.size, search.stages)
    chance = np.random.default_rng(seed)
    return np.array([cuts[place] for place in chance.choice(len(cuts), count)])


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_path_is_as_long_as_its_cut_and_no_longer_than_others(seed: int, schedule: str, virtual: int) -> None:
    search = searched(seed, schedule, virtual)
    chains = some_cuts(search, seed)
    again = np.random.default_rng(seed).random((len(chains), search.stages))
    steps = search.model.steps(stages_of(chains, search.line.size), again)
    for chain, own in zip(chains[:5], again[:5], strict=True):
        search._steps(chain[None], own[None])
    lower = search.paths.bounds(chains, again)
    assert (lower <= steps * (1 + 1e-9)).all()
    assert (lower > 0.5 * steps).mean() > 0.5
    near_ones = replace(
        search.problem, nets=tuple(TensorEdge(n, (n + 1,), 0.1, 0.2) for n in range(search.line.size - 1))
    )
    plain = LineSearch(Line(near_ones), near_ones, stages=search.stages)
    own_s = plain._steps(chains[:1], again[:1])
    assert plain.paths.bounds(chains[:1], again[:1]) == pytest.approx(own_s, rel=1e-9)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_no_move_is_left_out_that_is_shorter(seed: int, schedule: str, virtual: int) -> None:
    search = searched(seed, schedule, virtual)
    chance = np.random.default_rng(seed)
    kept = every = 0
    for chain in some_cuts(search, seed, 6):
        now = chance.random(search.stages)
        below = float(search._steps(chain[None], now[None])[0])
        chains = moved(chain, further=True)
        again = np.tile(now, (len(chains), 1))
        found = {tuple(each) for each in search.paths.shorter(chains, again, below=below).tolist()}
        steps = search.model.steps(stages_of(chains, search.line.size), again)
        wanted = {tuple(each) for each in chains[steps < below * (1 - 1e-9)].tolist()}
        assert wanted <= found
        kept, every = kept + len(found), every + len(chains)
    assert kept < 0.9 * every


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limited", [False, True])
def test_what_comes_out_no_move_makes_shorter(seed: int, schedule: str, virtual: int, limited: bool) -> None:
    search = searched(seed, schedule, virtual)
    options, room = (list(RECOMPUTE) if limited else ["never"]), None
    if limited:
        least = max(search.min_memory_cut(options, [1e9] * 3).device_bytes)
        free = search.fastest(["never"])
        assert free is not None
        room = [(least + max(free.device_bytes)) / 2] * 3
    found = search.fastest(options, room)
    assert found is not None
    chains = np.concatenate([moved(found.bounds, further=True), paired(found.bounds)])
    assert all(left < right for chain in chains.tolist() for left, right in pairwise(chain))
    ranked = sorted(options, key=search.share)
    chosen = search._fitting(chains, ranked, room)
    steps = search.model.steps(stages_of(chosen.chains, search.line.size), search._redone(chosen, ranked))
    assert (steps >= found.step_s * (1 - 2e-9)).all()


@pytest.mark.parametrize("seed", range(3))
def test_options_beside_a_cut_are_those_from_nothing(seed: int) -> None:
    search = searched(seed, "interleaved", 2)
    ranked = sorted(RECOMPUTE, key=search.share)
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
    every, block, always = (search.fastest(list(RECOMPUTE)), search.fastest(["block"]), search.fastest(["always"]))
    assert block is not None
    assert always is not None
    assert every == search.fastest(["never"])
    assert (block.bounds, block.step_s) == (always.bounds, always.step_s)
    assert block.device_bytes == search.cut(block.bounds, block.recompute).device_bytes
    assert set(block.recompute) == {"block"}
