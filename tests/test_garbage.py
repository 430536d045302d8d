"""The garbage collector comes rarely while a plan is made, and as the caller has set it before and after."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autosplit import __main__ as entry
from autosplit import api
from autosplit.cli import app
from autosplit.errors import InputError
from autosplit.garbage import COMMAND_OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_plan_is_made_with_rare_collections_and_leaves_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def prepare(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        return own(*args, **kwargs)

    own = api.prepare
    monkeypatch.setattr(api, "prepare", prepare)
    gc.set_threshold(500, 7, 3)
    api.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2xL4-24GB", sample=torch.empty(8, 4))
    assert len(seen) == 1
    assert seen[0] > 500
    assert gc.get_threshold() == (500, 7, 3)


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 5, 5)], ids=["off", "rarer still"])
def test_a_collector_that_is_off_or_rarer_stays_so(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_command_that_plans_collects_more_rarely_still(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def planned(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        raise InputError("enough")

    monkeypatch.setattr("autosplit.cli_plan._planned", planned)
    gc.set_threshold(500, 7, 3)
    result = CliRunner().invoke(app, ["plan", "torch.nn:Identity"])
    assert (seen, result.exit_code) == ([COMMAND_OBJECTS], 2)
    assert gc.get_threshold() == (500, 7, 3)


def test_an_error_brings_the_callers_own_back() -> None:
    gc.set_threshold(500, 7, 3)
    with pytest.raises(ZeroDivisionError), rare_collections():
        1 // 0  # noqa: B018
    assert gc.get_threshold() == (500, 7, 3)


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(("look_back", "found"), [(True, True), (False, False)])
def test_a_block_without_a_look_back_leaves_what_it_made_as_old(look_back: bool, found: bool) -> None:
    gc.set_threshold(100, 1000, 1000)
    gc.collect()
    with rare_collections(look_back=look_back):
        gone = weakref.ref(_Cycle())
        kept = [[] for _ in range(1000)]
    kept += [[] for _ in range(200)]
    assert (gone() is None) == found
    gc.collect()
    assert gone() is None
    assert len(kept) == 1200


def test_a_plans_answer_is_written_before_the_collector_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("autosplit.cli_plan._planned", lambda *args, **kwargs: "plan")
    monkeypatch.setattr("autosplit.cli_plan.answered", lambda *args, **kwargs: seen.append(gc.get_threshold()[0]) or 0)
    gc.set_threshold(500, 7, 3)
    assert CliRunner().invoke(app, ["plan", "torch.nn:Identity"]).exit_code == 0
    assert seen == [COMMAND_OBJECTS]
    assert gc.get_threshold() == (500, 7, 3)


def test_a_command_that_ends_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosplit.cli.main", lambda: None)
    handler, frozen = signal.getsignal(signal.SIGINT), gc.get_freeze_count()
    try:
        entry.main()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGINT, handler)
