"""Why a plan is as it is, said from the plan alone."""

from __future__ import annotations

from typing import Any

import pytest

from autosplit.planning.explain.reasons import reasons, saved_bytes, without_recompute
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative, StagePlan, Unit
from autosplit.planning.timeline import host_step, predicted
from autosplit.units import format_seconds
from tests.report.plans import GIB, make_plan, make_stage


def simulated(plan: Plan) -> Plan:
    """Return the plan with the step that its stages come to."""
    return plan.model_copy(update={"step_s": predicted(plan).step_s})


def stage_with(index: int, *, activation_gib: float = 3.0, capacity_gib: int = 80, **fields: Any) -> StagePlan:
    stage = make_stage(index, capacity_bytes=capacity_gib * GIB, **fields)
    parts = stage.memory
    static = parts.parameter_bytes + parts.gradient_bytes + parts.optimizer_bytes
    peak = static + int(activation_gib * GIB) + parts.transient_bytes
    memory = parts.model_copy(update={"activation_bytes": int(activation_gib * GIB), "peak_bytes": peak})
    return stage.model_copy(update={"memory": memory})


def unit(name: str, stage: int, *, kept_gib: float = 5.0) -> Unit:
    return Unit(
        name=name,
        stage=stage,
        forward_s=0.01,
        backward_s=0.02,
        weight_s=0.01,
        static_bytes=GIB,
        kept_bytes=int(kept_gib * GIB),
        transient_bytes=0,
        sent_bytes=2**20,
    )


def recomputing_plan() -> Plan:
    """Stage 0 does its forward again: 30 ms backward for 20 ms; it holds two microbatches, stage 1 one."""
    stages = (
        stage_with(0, recompute="block", forward_s=0.01, backward_s=0.03, activation_gib=1.0),
        stage_with(1, forward_s=0.01, backward_s=0.02, activation_gib=5.0),
    )
    return simulated(make_plan(stages=stages, units=(unit("h.0", 0), unit("h.1", 1))))


def test_recompute_says_what_it_costs_and_saves() -> None:
    plan = recomputing_plan()
    longer = predicted(plan).step_s / predicted(without_recompute(plan)).step_s - 1
    first = plan.stages[0].memory
    held = plan.schedule_for(4)
    assert max(sum(a.kind == "F" for a in held.lanes[0][:k]) for k in range(3)) == 2
    static = first.parameter_bytes + first.gradient_bytes + first.optimizer_bytes
    assert saved_bytes(plan) == [static + 2 * 5 * GIB - first.peak_bytes]
    assert reasons(plan) == (
        f"stage 0 recomputes (block), which costs {longer:.0%} of the step and saves 8.80 GiB on the fullest device",
    )


def test_a_plan_that_fits_by_uneven_stages_says_what_an_even_cut_would_take() -> None:
    """Stage 0 has a third of the work; evenly cut, two units each, it would hold twice as much."""
    stages = (
        stage_with(0, activation_gib=75.0, forward_s=0.01, backward_s=0.02),
        stage_with(1, activation_gib=20.0, forward_s=0.03, backward_s=0.06),
    )
    units = (unit("h.0", 0, kept_gib=37), *(unit(f"h.{index}", 1, kept_gib=20) for index in (1, 2, 3)))
    plan = simulated(make_plan(stages=stages, units=units))
    even = make_plan(stages=tuple(make_stage(i, forward_s=0.02, backward_s=0.04) for i in range(2)))
    even_s = predicted(even.model_copy(update={"weight_s": 0.0})).step_s
    assert reasons(plan)[0] == (
        "2 stages of uneven work are what makes it fit: evenly cut the step would take about "
        f"{format_seconds(even_s)}, {1 - even_s / plan.step_s:.0%} less, and need about 116 GiB on the fullest device"
    )
    roomy = (stage_with(0, activation_gib=5.0, forward_s=0.01, backward_s=0.02), stages[1])
    assert not any("uneven" in text for text in reasons(simulated(make_plan(stages=roomy, units=units))))


def issuing_plan(issue_s: float, **fields: Any) -> Plan:
    stages = tuple(
        make_stage(i, forward_s=0.001, backward_s=0.002, forward_issue_s=issue_s, backward_issue_s=2 * issue_s)
        for i in range(2)
    )
    return simulated(make_plan(stages=stages, **fields))


def test_the_host_binds_where_it_issues_for_longer_than_the_devices_work() -> None:
    plan = issuing_plan(0.002)
    found = host_step(plan)
    assert found is not None
    assert found.host_s == pytest.approx(4 * 2 * 3 * 0.002)
    assert plan.step_s == pytest.approx(0.015)
    assert found.step_s >= found.host_s
    [text] = reasons(plan)
    assert text.startswith("host-bound: one host thread issues kernels for 48.0 ms per step, the devices need 15.0 ms:")


def test_a_process_issues_its_own_devices_kernels_and_is_named_where_that_binds() -> None:
    assert reasons(issuing_plan(0.0006, processes=True, issue_threads=2)) == ()
    assert reasons(issuing_plan(0.0006))[0].startswith("host-bound")
    plan = issuing_plan(0.002, processes=True, issue_threads=2)
    found = host_step(plan)
    assert found is not None
    assert found.host_s == pytest.approx(4 * 3 * 0.002)
    [text] = reasons(plan)
    assert text.startswith(
        "launch-bound: each process issues its device's own kernels for 24.0 ms per step, the devices"
    )
    assert f"expect {format_seconds(found.step_s)}; fewer" in text


def test_what_a_step_has_beside_its_timeline_counts_with_the_host_too() -> None:
    plan = issuing_plan(0.002)
    found = host_step(plan)
    assert found is not None
    assert f"expect {format_seconds(found.step_s)}; fewer" in reasons(plan)[0]
    longer = plan.model_copy(update={"step_s": plan.step_s + 0.1})
    assert f"expect {format_seconds(found.step_s + 0.1)}; fewer" in reasons(longer)[0]


def test_the_nearest_other_plans_are_compared() -> None:
    own = {"chunks": 4, "schedule": "1f1b", "virtual_stages": 1, "recompute": ("never",)}
    plan = make_plan(stages=tuple(make_stage(index) for index in range(2)))

    def other(step: float, peak_gib: int, **fields: Any) -> Alternative:
        values = {**own, "verdict": "fits", "replayed": True, **fields}
        return Alternative(step_s=step * plan.step_s, peak_bytes=peak_gib * GIB, **values)

    frontier = (
        other(0.8, 9, chunks=16, verdict="no"),
        other(0.9, 8, schedule="interleaved", virtual_stages=2, verdict="borderline"),
        other(1.0, 5),
        other(1.25, 3, chunks=8, recompute=("block",)),
        other(1.5, 2, chunks=8, recompute=("always",)),
    )
    assert reasons(plan.model_copy(update={"frontier": frontier})) == (
        "with schedule interleaved x 2 stages per device: 10% faster, needs 8.00 GiB on the fullest device and may not "
        "fit",
        "with 8 microbatches and recompute block on every stage: 25% slower, needs 3.00 GiB on the fullest device, "
        "2.00 GiB less",
    )
    again = tuple(make_stage(index, recompute="block") for index in range(2))
    without = (other(0.9, 8, verdict="no"), other(1.0, 5, recompute=("block",)))
    assert (
        reasons(make_plan(stages=again, frontier=without))[-1]
        == "without recompute: 10% faster, needs 8.00 GiB on the fullest device and does not fit"
    )
    several = other(0.9, 8, recompute=("except_last", "never", "block"), replayed=False)
    assert reasons(plan.model_copy(update={"frontier": (several, other(1.0, 5))})) == (
        "with recompute except_last on 1 stage and block on 1 stage: 10% faster, needs 8.00 GiB on the fullest device, "
        "which fits by formula alone",
    )
