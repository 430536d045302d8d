"""Stages measured alone, put together: on devices of their own, on one, under other schedules and links."""

from __future__ import annotations

import itertools

import pytest

from autosplit.planning.timeline import StagesAlone
from autosplit.schedule.catalog import build


def alone(
    *,
    seconds: dict | None = None,
    issue_s: dict | None = None,
    sent: tuple = (),
    host: frozenset[int] = frozenset(),
    schedule: str = "1f1b",
) -> StagesAlone:
    times = seconds or {"F": (1.0, 1.0), "B": (2.0, 2.0)}
    own = build(schedule, stages=2, microbatches=4)
    return StagesAlone(own, times, issue_s or {}, sent, 0.5, (None, None), host)


def test_equal_stages_reach_the_bound_of_the_bubble():
    found = alone()
    assert found.serial_s == 4 * 6.0
    assert found.cell_s == (3.0, 3.0)
    step = found.step()
    assert step.step_s == 5 * 3.0  # M + S - 1 cells
    assert found.serial_s / step.step_s == pytest.approx(4 * 2 / 5)


def test_one_host_issues_for_all_lanes_unless_each_has_its_own():
    slow = alone(issue_s={"F": (1.0, 1.0), "B": (2.0, 2.0)})
    assert slow.step(issued=False).step_s == 15.0
    assert slow.step().step_s >= slow.serial_s  # issuing takes as long as all of it
    assert slow.step().host_s == slow.serial_s
    assert slow.step(issued=False).host_s == 0.0
    assert slow.on_one_device().step_s >= slow.serial_s


def test_a_stage_of_the_host_holds_up_what_is_issued_behind_it():
    seconds = {"F": (4.0, 1.0), "B": (4.0, 1.0)}
    none = {"F": (0.0, 0.0), "B": (0.0, 0.0)}
    apart = alone(seconds=seconds, issue_s=none).step()
    on_host = alone(seconds=seconds, issue_s=none, host=frozenset({0})).step()
    assert apart.step_s <= on_host.step_s < alone(seconds=seconds).serial_s
    first = [span for span in on_host.spans if span.action.stage == 0]
    assert all(later.start_s >= earlier.end_s for earlier, later in itertools.pairwise(first))
    device = {span.action: span for span in on_host.spans}
    order = [span.action for span in on_host.spans]
    for place, action in enumerate(order):
        before = [device[own].end_s for own in order[:place] if own.stage == 0]
        assert device[action].start_s >= max(before, default=0.0)


def test_another_schedule_must_have_as_many_stages_and_the_same_kinds():
    found = alone()
    assert found.step(build("gpipe", stages=2, microbatches=8)).step_s == 9 * 3.0
    with pytest.raises(ValueError, match="2 stages were measured, schedule 'gpipe' has 3"):
        found.step(build("gpipe", stages=3, microbatches=8))
    with pytest.raises(ValueError, match="give input_gradient_s and weight_gradient_s"):
        found.step(build("zb_h1", stages=2, microbatches=4))
