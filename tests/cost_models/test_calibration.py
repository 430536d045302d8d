from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OpWork, Roofline, device
from cost_models.calibration import Calibrated, Stamp, robust_costs

LANE = device("cpu-lane")
STAMP = Stamp(device="cpu-lane", date="2026-01-01", versions={"torch": "2.13.0"})
LAUNCH_S, FLOP_S, BYTE_S = 8e-6, 1 / 70e9, 1 / 9e9


def matmul(size: int, *, dtype: str = "fp32", kind: str = "matmul") -> OpWork:
    return OpWork(kind=kind, flops=2 * size**3, bytes=12 * size**2, dtype=dtype)


def true_s(work: OpWork) -> float:
    return LAUNCH_S + work.flops * FLOP_S + work.bytes * BYTE_S


def fitted(samples: list[tuple[OpWork, float]], **named: float) -> Calibrated:
    return Calibrated.fit(samples, device=LANE, stamp=STAMP, **named)


SIZES = (16, 40, 96, 200, 320, 512, 700, 1200)


def test_a_fit_finds_the_costs_that_made_the_times():
    model = fitted([(matmul(size), true_s(matmul(size))) for size in SIZES])
    [curve] = model.curves.values()
    assert (curve.launch_s, curve.flop_s) == pytest.approx((LAUNCH_S, FLOP_S), rel=1e-4)
    assert curve.byte_s == pytest.approx((BYTE_S,), rel=1e-4)
    assert curve.median_error < 1e-6
    assert model.seconds(matmul(2000)) == pytest.approx(true_s(matmul(2000)), rel=1e-4)


def test_outliers_hardly_move_it():
    noise = random.Random(1)
    samples = [(matmul(size), true_s(matmul(size)) * noise.uniform(0.97, 1.03)) for size in SIZES * 4]
    clean = fitted(samples)
    samples[5] = (samples[5][0], samples[5][1] * 20)
    samples[17] = (samples[17][0], samples[17][1] * 20)
    for size in (64, 400, 1000):
        assert fitted(samples).seconds(matmul(size)) == pytest.approx(clean.seconds(matmul(size)), rel=0.06)


def test_bytes_cost_more_beyond_the_caches():
    def slow_past_8_mib(size: int) -> float:
        return 1e-5 + size / 20e9 + max(0, size - 2**23) / 2e9

    sizes = [2**power for power in range(12, 28)]
    works = {size: OpWork(kind="elementwise", flops=0, bytes=size, dtype="fp32") for size in sizes}
    model = fitted([(work, slow_past_8_mib(size)) for size, work in works.items()])
    for size, work in works.items():
        assert model.seconds(work) == pytest.approx(slow_past_8_mib(size), rel=1e-3)


@given(st.tuples(*[st.sampled_from((0.0, 1e-6, 2e-5, 3e-3)) for _ in range(3)]).filter(any), st.integers(0, 99))
def test_costs_that_explain_all_times_are_found(costs, seed):
    draw = random.Random(seed)
    rows = [(1.0, draw.uniform(1, 100), draw.uniform(1, 100) ** 2) for _ in range(12)]
    times = [sum(cost * amount for cost, amount in zip(costs, row, strict=True)) for row in rows]
    found = robust_costs(rows, times)
    explained = [sum(cost * amount for cost, amount in zip(found, row, strict=True)) for row in rows]
    assert explained == pytest.approx(times, rel=1e-3)


def test_a_refined_kind_has_a_curve_of_its_own_and_counts_for_its_class():
    samples = [(matmul(size), true_s(matmul(size))) for size in SIZES]
    samples += [(matmul(size, kind="matmul.batched"), 2 * true_s(matmul(size))) for size in SIZES]
    model = fitted(samples)
    assert set(model.curves) == {("matmul", "fp32"), ("matmul.batched", "fp32")}
    assert model.seconds(matmul(320, kind="matmul.batched")) == pytest.approx(2 * true_s(matmul(320)), rel=1e-3)
    assert model.seconds(matmul(320, kind="matmul.unheard")) == model.seconds(matmul(320))


def test_what_was_not_measured_is_the_roofline_s():
    model = fitted([(matmul(size), true_s(matmul(size))) for size in SIZES], issue_s=1e-3)
    for work in (matmul(64, kind="conv"), matmul(64, dtype="fp64"), matmul(64, dtype="bf16")):
        assert model.seconds(work) == pytest.approx(Roofline(LANE).seconds(work) + 1e-3)
    view = OpWork(kind="other", flops=0, bytes=0, dtype="fp32", launches=0)
    assert model.seconds(view) == 0


def test_work_that_only_moves_bytes_takes_the_curve_of_fp32():
    copies = [OpWork(kind="copy", flops=0, bytes=2**power, dtype="fp32") for power in range(10, 24)]
    model = fitted([(work, 1e-5 + work.bytes / 5e9) for work in copies])
    whole = OpWork(kind="copy.fill", flops=0, bytes=2**20, dtype="int")
    assert model.seconds(whole) == pytest.approx(1e-5 + 2**20 / 5e9, rel=1e-3)


def test_a_file_gives_the_same_times_back(tmp_path):
    model = fitted([(matmul(size), true_s(matmul(size))) for size in SIZES], issue_s=2e-6)
    path = tmp_path / "made" / "lane.json"
    model.save(path)
    found = Calibrated.load(path)
    assert found == model
    assert found.stamp == STAMP
    assert [entry.name for entry in path.parent.iterdir()] == ["lane.json"]
    for work in (matmul(333), matmul(333, kind="conv")):
        assert found.seconds(work) == model.seconds(work)
