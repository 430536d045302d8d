"""Of checks that are made aside each one counts, whatever else there was."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from autosplit.aside import checked, later, second_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")


def _holds() -> None:
    pass


def _fails() -> None:
    raise ValueError("not the model")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize("checks", [(_holds, _fails), (_fails, _holds)], ids=["the last", "the first"])
def test_one_check_of_two_that_fails_is_enough(checks: tuple[Callable[[], None], ...]) -> None:
    steps: list[str] = []

    def work() -> str:
        steps.append("begun")
        for check in checks:
            later(check)
        return "a wrong plan"

    with second_core(), pytest.raises(ValueError, match="not the model"):
        checked(work)
    assert steps == ["begun", "begun"]


def test_an_error_behind_a_check_that_fails_is_that_of_the_work_without_it() -> None:
    def work() -> None:
        later(_fails)
        raise KeyError("what came of it")

    with second_core(), pytest.raises(ValueError, match="not the model"):
        checked(work)
