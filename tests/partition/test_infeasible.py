"""Limits that no partition can keep: what is named, and that the limit in the message is the smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import InfeasibleError
from autosplit.partition.checker import check
from autosplit.partition.infeasible import over_capacity, require_separable
from autosplit.partition.problem import Problem, TensorEdge, Work, devices_of
from autosplit.partition.solve import solve
from tests.partition.oracle_brute import assignments, most_stages
from tests.partition.oracle_problems import Mix, random_problem


def chain(*sizes: int, colocated: str = "", limit: int, stages: int) -> Problem:
    """Works in a row, of one second and these bytes; a dot is no colour."""
    names = colocated or "." * len(sizes)
    works = tuple(
        Work(f"w{index}", 1.0, 0.0, size, colocation_group=None if names[index] == "." else names[index])
        for index, size in enumerate(sizes)
    )
    nets = tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(len(sizes) - 1))
    return Problem(works, nets, microbatches=2, devices=devices_of((limit,) * stages))


def refusal(problem: Problem, *, stages: int, empty: bool = False) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, stages=stages, empty=empty)
    return caught.value


def test_a_work_that_fits_nowhere_is_named() -> None:
    error = refusal(chain(5, 90, 5, limit=80, stages=2), stages=2)
    assert str(error) == (
        "no partition fits 2 stages: node 1 'w1' alone needs at least 90 B (90 bytes) on one device, none has more "
        "than 80 B (80 bytes); the smallest limit that can be met is 95 B (95 bytes) per device"
    )
    assert error.smallest_bytes == 95


def test_a_colour_that_fits_nowhere_is_named_with_what_lies_between_its_works() -> None:
    error = refusal(chain(30, 40, 10, 30, 1, colocated="r..rb", limit=80, stages=3), stages=3)
    assert str(error) == (
        "no partition fits 3 stages: colocation group 'r' holds 4 nodes together (0 'w0', 1 'w1', 2 'w2' and 1 more), "
        "which need at least 110 B (110 bytes) on one device, none has more than 80 B (80 bytes); the smallest limit "
        "that can be met is 110 B (110 bytes) per device"
    )


def test_too_little_room_in_all_says_so_with_the_largest_part() -> None:
    error = refusal(chain(30, 40, 10, 30, limit=50, stages=2), stages=2)
    assert str(error) == (
        "no partition fits 2 stages: the nodes have 110 B (110 bytes) of static memory, all devices together 100 B "
        "(100 bytes), and node 1 'w1' alone needs at least 40 B (40 bytes) of it; the smallest limit that can be met "
        "is 70 B (70 bytes) per device, or use more devices"
    )


def test_a_stage_that_is_over_is_named_with_its_largest_part() -> None:
    error = refusal(chain(30, 40, 10, 30, limit=60, stages=2), stages=2)
    assert str(error) == (
        "no partition fits 2 stages: with the most even use of memory stage 0 needs 70 B (70 bytes), its device has "
        "60 B (60 bytes), and node 1 'w1' alone needs at least 40 B (40 bytes) of it; the smallest limit that can be "
        "met is 70 B (70 bytes) per device, or use more devices"
    )


@pytest.mark.parametrize("empty", [False, True])
def test_the_smallest_limit_is_the_smallest(empty: bool) -> None:
    refused = 0
    for seed in range(80):
        problem = random_problem(seed, Mix(count=3 + seed % 5, colours=0.2, static=True))
        stages = most_stages(problem, stages=1 + seed % 3)
        every = [
            max(check(problem, assignment).stage_bytes)
            for assignment in assignments(problem, stages=stages, empty=empty)
        ]
        least = min(every)
        if not least:
            continue
        limited = replace(problem, devices=devices_of((least - 1 - seed % 2 * (least // 2),) * stages))
        error = refusal(limited, stages=stages, empty=empty)
        assert error.smallest_bytes == least, seed
        met = replace(problem, devices=devices_of((error.smallest_bytes,) * stages))
        assert max(solve(met, stages=stages, empty=empty).costs.stage_bytes) <= least
        refused += 1
    assert refused > 60


def test_an_incomplete_search_names_a_limit_that_it_can_meet() -> None:
    works = tuple(Work(f"w{index}", 1.0, 0.0, 10 + index) for index in range(12))
    problem = Problem(works, (), microbatches=1, devices=devices_of((70, 70)))
    with pytest.raises(InfeasibleError, match="the smallest limit that was found to be met is") as caught:
        solve(problem, stages=2, ideal_limit=8)
    limit = caught.value.smallest_bytes
    assert limit is not None
    met = replace(problem, devices=devices_of((limit, limit)))
    assert max(solve(met, stages=2, ideal_limit=8).costs.stage_bytes) <= limit


def test_stages_over_a_replayed_peak_name_their_largest_part() -> None:
    problem = chain(5, 30, 20, 20, colocated=".rr.", limit=60, stages=2)
    error = over_capacity(problem, (0, 1, 1, 1), stage_bytes=(9, 77))
    assert str(error) == (
        "no partition was found that fits 2 stages: with the most even use of memory stage 1 needs 77 B (77 bytes) "
        "(its largest part that cannot be cut: colocation group 'r' holds 2 nodes together (1 'w1', 2 'w2')), its "
        "device has 60 B (60 bytes); devices of 77 B (77 bytes) each would hold it, or use more devices or smaller "
        "microbatches"
    )
    assert error.smallest_bytes == 77


def test_one_colour_that_leaves_nothing_to_cut_is_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        require_separable(chain(1, 1, 1, 1, colocated="rbbr", limit=9, stages=3), stages=3)
    assert str(caught.value) == (
        "3 stages were asked for, and there is nothing to cut: colocation group 'r' holds 4 nodes together (0 'w0', "
        "1 'w1', 2 'w2' and 1 more); ask for 1 stage, or make that colocation group smaller"
    )
    assert caught.value.smallest_bytes is None
