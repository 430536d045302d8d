"""Cuts of all configurations: what a second core does of them, and what is left out, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.aside import Aside, second_core
from autosplit.options import Options, Sample
from autosplit.partition.line_search import Moved
from autosplit.planning import sweep, weighing
from autosplit.planning.choose import Space
from autosplit.planning.sweep import Entry, Sweep
from autosplit.planning.weighing import Weighed, Weighing
from autosplit.trace.ladder import Trace, trace

SPACE = Space((2, 4, 8), (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)))

needs_forks = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Return layers that grow, so that boundaries are worth moving."""
    return nn.Sequential(*[nn.Linear(16 + 4 * place, 20 + 4 * place) for place in range(12)])


@pytest.fixture(scope="module")
def found(model: nn.Module) -> Trace:
    return trace(model, Sample(torch.zeros(64, 16)))


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for module in (sweep, weighing):
        monkeypatch.setattr(module, "_WORTH", 0)
    with second_core():
        yield


def swept(model: nn.Module, found: Trace, limit: int | None) -> Sweep:
    options = Options((torch.device("cpu"),) * 3, 8, memory_limit=limit, measure=False)
    return Sweep(model, found, options, SPACE, rows=64)


def weighed(model: nn.Module, found: Trace, limit: int | None) -> Weighing:
    own = Weighing(swept(model, found, limit), None)
    own.weigh()
    return own


def told(own: Weighing) -> list[tuple[Any, ...]]:
    return [
        (each.entry.options.chunks, each.entry.settled.schedule, tuple(each.way), each.cut, each.room, each.moved)
        for each in own.weighed
    ]


def learned(own: Weighing) -> list[tuple[set[bytes], list[bytes]]]:
    kept = [
        (each.search.learned if "search" in vars(each) else each.learned or each.search.learned).paths
        for each in own.entries
    ]
    return [(each.known, [path.counts.tobytes() for path in each.found]) for each in kept]


@needs_forks
@pytest.mark.parametrize("gained", [weighing._GAINED, 1.0])
@pytest.mark.parametrize("limit", [None, 200_000])
def test_with_a_second_core_cuts_and_what_is_learned_are_the_same(
    model: nn.Module,
    found: Trace,
    limit: int | None,
    gained: float,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(weighing, "_GAINED", gained)
    alone = weighed(model, found, limit)
    request.getfixturevalue("_two_cores")
    asked: list[Weighed] = []
    moves = Weighing._moves

    def counted(own: Weighing, each: Weighed) -> Moved:
        asked.append(each)
        return moves(own, each)

    monkeypatch.setattr(Weighing, "_moves", counted)
    helped = weighed(model, found, limit)
    assert told(helped) == told(alone)
    assert learned(helped) == learned(alone)
    moved = sum(each.moved and alone.fits(each) for each in alone.weighed)
    assert moved < len([each for each in alone.weighed if alone.fits(each)])
    assert 0 < len(asked) < moved  # here; the others were moved by the child


@needs_forks
def test_what_was_moved_aside_in_vain_leaves_no_trace(
    model: nn.Module, found: Trace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    alone = weighed(model, found, 200_000)
    request.getfixturevalue("_two_cores")
    begun = Weighing._begun

    def all_begun(own: Weighing, likely: Sequence[int]) -> AbstractContextManager[Callable[[int], Moved | None]]:
        """Begin with what is beaten, so that others of the configuration learn from it."""
        every = [place for place, each in enumerate(own.weighed) if own.fits(each) and not each.moved]
        assert set(likely) < set(every)
        return begun(own, sorted(every, key=lambda place: (place in likely, place)))

    monkeypatch.setattr(Weighing, "_begun", all_begun)
    helped = weighed(model, found, 200_000)
    assert told(helped) == told(alone)
    assert learned(helped) == learned(alone)


@needs_forks
@pytest.mark.usefixtures("_two_cores")
def test_while_sizes_are_waited_for_those_that_are_there_are_cut(
    model: nn.Module, found: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, early = weighed(model, found, None), Weighing(swept(model, found, None), None)
    done, cuts = list[int](), early._cuts

    def counted(entry: Entry) -> object:
        done.append(entry.options.chunks)
        return cuts(entry)

    monkeypatch.setattr(early, "_cuts", counted)
    monkeypatch.setattr(Aside, "ready", property(lambda own: not own.elsewhere))
    early.weigh()
    assert done[:3] == [2, 2, 2]
    assert told(early) == told(plain)


def test_where_moves_would_go_over_the_limits_a_cut_within_them_is_looked_for() -> None:
    widths = (48, 48, 8, 32, 48, 32, 32, 32, 32, 16, 32, 16, 8)
    model = nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)])
    found = trace(model, Sample(torch.zeros(64, 48)))
    entry = weighed(model, found, None).entries[0]
    plain, moved = (entry.best(["never"], None, move=move) for move in (False, True))
    assert plain is not None
    assert moved is not None
    limit = int(max(plain.device_bytes)) + 1
    assert max(moved.device_bytes) > limit
    own = weighed(model, found, limit)
    cuts = [each for each in own.weighed if each.entry.settled == entry.settled]
    assert any(each.room is not None and each.way == ["never"] for each in cuts)
    assert len({tuple(each.way) for each in cuts}) > 1


@needs_forks
@pytest.mark.usefixtures("_two_cores")
def test_behind_a_cut_that_was_not_foreseen_nothing_is_known(
    model: nn.Module, found: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weighing, "_move", lambda _: None)
    own = weighed(model, found, 200_000)
    places = [place for place, each in enumerate(own.weighed) if own.fits(each)]
    rows = [[place for place in places if own.weighed[place].entry is entry] for entry in own.entries]
    row = max(rows, key=len)
    assert len(row) > 2
    with own._begun(places) as known:
        assert all(known(place) is not None for place in row)
    with own._begun([place for place in places if place != row[1]]) as known:
        assert [known(place) is not None for place in row] == [True] + [False] * (len(row) - 1)
