"""Estimates from a plan's units: the cut that they rest on is the best there is, and they move the right way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.planning.plan import Plan
from autosplit.planning.records import Unit
from autosplit.planning.sketch import Estimate, Run, Setting, Sketch, _Weights
from tests.report.paper_plans import paper_plan
from tests.report.plans import make_plan, make_stage

MIB = 2**20


def units(loads: Sequence[tuple[int, int, int, int, int]]) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            name=f"u{index}",
            stage=0,
            forward_s=float(seconds),
            backward_s=float(2 * seconds),
            weight_s=float(seconds),
            static_bytes=static,
            kept_bytes=kept,
            transient_bytes=transient,
            sent_bytes=sent,
        )
        for index, (seconds, static, kept, transient, sent) in enumerate(loads)
    )


def sketch_of(loads: Sequence[tuple[int, int, int, int, int]]) -> Sketch:
    stage = make_stage(0, forward_s=1.0, backward_s=2.0)
    return Sketch(make_plan(stages=(stage,), devices=("cpu",), boundaries=(), units=units(loads), optimizer="sgd"))


def setting(devices: int, capacity: int | None, **fields: Any) -> Setting:
    values = {
        "devices": devices,
        "microbatches": 4,
        "rows": 2,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "recompute": "never",
        "capacity_bytes": capacity,
    }
    return Setting(**(values | fields))


def cuts(count: int, devices: int) -> list[list[Run]]:
    inner = combinations(range(1, count), devices - 1)
    return [[Run(a, b) for a, b in pairwise((0, *chosen, count))] for chosen in inner]


NUMBERS = st.tuples(*(st.integers(0, 9) for _ in range(5)))


@settings(max_examples=60)
@given(
    st.lists(NUMBERS, min_size=3, max_size=8),
    st.integers(1, 3),
    st.integers(20, 200),
    st.sampled_from(["never", "block", "always"]),
)
def test_the_cut_is_the_best_of_all_cuts(
    loads: list[tuple[int, int, int, int, int]], devices: int, capacity: int, recompute: str
) -> None:
    weights = _Weights(sketch_of(loads), setting(devices, capacity, recompute=recompute))
    weighed = [
        (
            max(sum(weights.loads[run.start : run.stop]) for run in cut),
            max(weights.peak(device, run) for device, run in enumerate(cut)),
        )
        for cut in cuts(len(loads), devices)
    ]
    fitting = [load for load, peak in weighed if peak <= capacity]
    found = weights.fastest(capacity)
    if fitting:
        assert found is not None
        assert max(sum(weights.loads[r.start : r.stop]) for r in found) == pytest.approx(min(fitting), rel=1e-6)
    elif found is not None:  # bytes are rounded to whole ones only in what is said of a cut
        assert max(weights.peak(device, run) for device, run in enumerate(found)) <= capacity + 1


def test_what_is_known_of_a_devices_runs_changes_no_filling() -> None:
    sketch, chance = sketch_of([(1 + place % 3, place % 4, 3, place % 2, 1) for place in range(12)]), random.Random(0)
    own = setting(4, None)
    weights, filled = _Weights(sketch, own), 0
    for _ in range(200):
        load_s, limit = chance.uniform(5, 60), chance.uniform(10, 90)
        found = weights._filled(load_s, limit)
        assert found == _Weights(sketch, own)._filled(load_s, limit)
        filled += found is not None
    assert 0 < filled < 200


def estimate(plan: Plan, **fields: Any) -> Estimate:
    sketch = Sketch(plan)
    found = sketch.estimate(replace(sketch.setting(), **fields))
    assert found is not None
    return found


def test_the_plan_s_own_setting_comes_out_as_the_plan() -> None:
    plan = paper_plan()
    found = estimate(plan)
    assert found.step_s == pytest.approx(plan.step_s, rel=0.02)
    assert found.peak_bytes == pytest.approx(max(stage.memory.peak_bytes for stage in plan.stages), rel=0.05)
    assert found.verdict == plan.verdict


def test_a_plan_s_own_figures_scale_its_estimates() -> None:
    plan = paper_plan()
    fuller = tuple(
        stage.model_copy(
            update={"memory": stage.memory.model_copy(update={"peak_bytes": stage.memory.peak_bytes * 9 // 8})}
        )
        for stage in plan.stages
    )
    longer = plan.model_copy(update={"stages": fuller, "step_s": plan.step_s + 1.0})
    assert Sketch(longer).peak_ratio > Sketch(plan).peak_ratio
    assert estimate(longer).peak_bytes > 1.05 * estimate(plan).peak_bytes
    assert estimate(longer).step_s == pytest.approx(estimate(plan).step_s + 1.0, rel=0.02)


def test_estimates_move_the_right_way() -> None:
    plan = paper_plan()
    own = estimate(plan)
    assert estimate(plan, recompute="block").peak_bytes < own.peak_bytes
    assert estimate(plan, recompute="block").step_s > own.step_s
    assert estimate(plan, devices=2, capacity_bytes=None).peak_bytes > own.peak_bytes
    assert estimate(plan, rows=1).peak_bytes < own.peak_bytes
    assert estimate(plan, rows=1).step_s < own.step_s
    assert estimate(plan, static=0.5).peak_bytes < own.peak_bytes
    assert estimate(plan, microbatches=16, rows=1).peak_bytes < own.peak_bytes
    assert estimate(plan, schedule="gpipe", capacity_bytes=None).peak_bytes > own.peak_bytes
    assert estimate(plan, schedule="interleaved", virtual_stages=2, devices=2, capacity_bytes=None).peak_bytes > 0


def test_what_cannot_fit_has_no_estimate_and_what_may_is_borderline() -> None:
    sketch = Sketch(paper_plan())
    own = sketch.setting()
    peak = estimate(paper_plan()).peak_bytes
    assert sketch.estimate(replace(own, capacity_bytes=peak // 4)) is None
    verdicts = []
    for share in (0.9, 0.95, 1.0, 1.05, 1.1):
        found = sketch.estimate(replace(own, devices=1, capacity_bytes=int(share * estimate_on_one(sketch))))
        verdicts.append(found and found.verdict)
    assert verdicts == [None, None, "borderline", "borderline", "fits"]


def estimate_on_one(sketch: Sketch) -> int:
    found = sketch.estimate(replace(sketch.setting(), devices=1, capacity_bytes=None))
    assert found is not None
    return found.peak_bytes


def test_very_many_units_are_taken_together_within_their_blocks() -> None:
    many = [
        unit.model_copy(update={"block": index // 100}) for index, unit in enumerate(units([(1, 1, 1, 1, 1)] * 600))
    ]
    sketch = Sketch(sketch_of([(1, 1, 1, 1, 1)]).plan.model_copy(update={"units": tuple(many)}))
    assert len(sketch.units) == 204
    assert sum(unit.kept_bytes for unit in sketch.units) == 600
    assert [unit.block for unit in sketch.units[:35]] == [0] * 34 + [1]
    assert all(unit.transient_bytes == 1 for unit in sketch.units)


def test_units_of_one_block_are_done_again_together() -> None:
    """Two units that keep 3 and 4 MiB with 1 MiB inside the first, 2 MiB before each: one block, or one each."""
    loads = [(1, 0, 3 * MIB, MIB, 2 * MIB), (1, 0, 4 * MIB, 0, 2 * MIB)]
    apart = sketch_of([(1, 0, 2 * MIB, 0, 2 * MIB), *loads])
    one = [unit.model_copy(update={"block": 7}) for unit in apart.units[1:]]
    together = Sketch(apart.plan.model_copy(update={"units": (apart.units[0], *one)}))
    apart.peak_ratio = together.peak_ratio = 1.0
    own = setting(1, None, recompute="block", microbatches=1)
    peaks = [found.peak_bytes for found in (apart.estimate(own), together.estimate(own)) if found is not None]
    assert peaks == [(2 + 2 + 4) * MIB, (2 + 7 + 1) * MIB]


def test_gradients_inside_a_unit_do_not_grow_with_the_rows() -> None:
    """8 MiB of state are a parameter, its gradient and two moments; 3 MiB inside are the gradient and 1 MiB more."""
    memory = make_stage(0).memory.model_copy(
        update={"parameter_bytes": 2 * MIB, "gradient_bytes": 2 * MIB, "optimizer_bytes": 4 * MIB}
    )
    stage = make_stage(0).model_copy(update={"memory": memory.model_copy(update={"peak_bytes": 11 * MIB})})
    only = units([(1, 8 * MIB, 0, 3 * MIB, 0)])
    sketch = Sketch(make_plan(stages=(stage,), devices=("cpu",), boundaries=(), units=only, optimizer="sgd"))
    peaks = [sketch.estimate(replace(sketch.setting(), rows=rows)) for rows in (2, 4, 8)]
    assert [own.peak_bytes // MIB for own in peaks if own is not None] == [11, 12, 14]


def test_there_are_no_estimates_for_more_stages_than_units_and_none_without_units() -> None:
    sketch = Sketch(paper_plan())
    assert sketch.estimate(replace(sketch.setting(), devices=len(sketch.units) + 1)) is None
    with pytest.raises(ValueError, match="plan again"):
        Sketch(make_plan())
