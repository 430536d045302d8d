"""Tests: a quick run and a full run take what fits, every value of a parameter turns up, and the costs' names exist."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).parents[2]
TEST = "tests/test_some.py::test_some"


class Case:
    """A case of a test, as pytest has it."""

    def __init__(self, parameters: str, *marks: str) -> None:
        self.nodeid, self.marks = f"{TEST}[{parameters}]", set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def dealt(monkeypatch: pytest.MonkeyPatch, cost: float, *marks: str) -> dict[str, list[str]]:
    """Deal out 12 cases, and return the parameters of those that each kind of run takes."""
    monkeypatch.setattr(tiers, "costs", lambda: {TEST: cost})
    cases = [Case(f"{first}-{second}", *marks) for first, second in product("abc", "wxyz")]
    tiers.deal(cases)
    left = {"quick": "slow", "full": "campaign"}
    return {
        run: [case.nodeid[len(TEST) + 1 : -1] for case in cases if mark not in case.marks] for run, mark in left.items()
    }


def test_a_run_takes_as_many_cases_as_fit(monkeypatch):
    found = dealt(monkeypatch, tiers.QUICK_S / 2)
    assert (len(found["quick"]), len(found["full"])) == (2, 10)
    found = dealt(monkeypatch, tiers.FULL_S / 4)
    assert (len(found["quick"]), len(found["full"])) == (1, 5)
    assert {value for case in found["full"] for value in case.split("-")} == set("abcwxyz")
    assert set(found["quick"]) <= set(found["full"])
    assert found == dealt(monkeypatch, tiers.FULL_S / 4)


def test_what_is_dear_is_in_a_quick_run_only_where_it_is_marked(monkeypatch):
    found = dealt(monkeypatch, 50.0)
    assert (len(found["quick"]), len(found["full"])) == (0, 1)
    assert len(dealt(monkeypatch, 50.0, "quick")["quick"]) == 1


def test_marks_of_cases_stay(monkeypatch):
    assert dealt(monkeypatch, 0.01, "slow")["quick"] == []
    assert dealt(monkeypatch, 0.01, "campaign") == {"quick": [], "full": []}


def test_costs_are_of_tests_that_are_there():
    for name in tiers.costs():
        path, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / path).read_text(encoding="utf-8"), name
