"""Moves of a line's boundaries: what comes out, no move makes shorter."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch, moved, paired, stages_of
from autosplit.partition.problem import RECOMPUTE
from tests.partition.test_line_search import random_problem

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
