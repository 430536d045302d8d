"""PipeDream's planner and ours on its own profiles: the small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import pipedream


@pytest.fixture(scope="module")
def rows() -> list[pipedream.Row]:
    return pipedream.rows(["alexnet", "vgg16"])


def test_its_costs_come_out_again_and_ours_are_no_slower(rows: list[pipedream.Row]) -> None:
    checks = pipedream.checks_of(rows)
    assert len(checks) == 2 * len(rows) + sum(row.printed_s is not None for row in rows)
    assert [check for check in checks if not check.ok] == []


def test_the_papers_formula_gives_the_papers_stages(rows: list[pipedream.Row]) -> None:
    published = {row.profile: row for row in rows if row.source.startswith("runtime") and row.devices == 16}
    assert {name: row.theirs for name, row in published.items()} == {"alexnet": (15, 1), "vgg16": (15, 1)}
    for row in published.values():
        assert row.ours["paper"] == row.theirs
        assert row.ours_s["paper"] == pytest.approx(row.theirs_s["paper"], rel=1e-12)


def test_a_slower_plan_fails(rows: list[pipedream.Row]) -> None:
    slower = replace(rows[0], ours_s={**rows[0].ours_s, "code": 1.1 * rows[0].theirs_s["code"]})
    assert [check.ok for check in pipedream.checks_of([slower])].count(False) == 1
