from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models import CostModel, DeviceSpec, Efficiency, Measured, OpWork, Roofline, device, names
from cost_models.calibration import Calibrated, Stamp
from cost_models.work import KINDS

FLOPS = 10**12
ALL_KINDS = (*KINDS, "conv.backward", "elementwise.special", "never heard of")


def works(dtypes: tuple[str, ...] = ("fp32", "int", "tf32", "fp64")) -> st.SearchStrategy[OpWork]:
    return st.builds(
        OpWork,
        kind=st.sampled_from(ALL_KINDS),
        flops=st.integers(0, 10**15),
        bytes=st.integers(0, 10**12),
        dtype=st.sampled_from(dtypes),
        launches=st.integers(0, 100),
    )


spec = functools.cache(device)
"""The specs are frozen: each file is read once for all examples."""


def calibrated(found: DeviceSpec, samples: list[tuple[OpWork, float]]) -> Calibrated:
    return Calibrated.fit(samples, device=found, stamp=Stamp(device=found.name, date="2026-01-01"), issue_s=1e-6)


@st.composite
def models(draw: st.DrawFn) -> tuple[CostModel, OpWork]:
    """Draw any cost model of the package, on any device: the conformance suite below runs on all of them."""
    found = spec(draw(st.sampled_from(names())))
    work = draw(works(found.dtypes))
    samples = draw(st.lists(st.tuples(works(found.dtypes), st.floats(1e-6, 1e3)), max_size=12))
    alike = [
        (sample.model_copy(update={"kind": work.kind, "dtype": work.dtype}), seconds) for sample, seconds in samples
    ]
    model = draw(
        st.sampled_from(
            [Roofline(found), Measured({}, Roofline(found)), calibrated(found, samples), calibrated(found, alike)]
        )
    )
    return model, work


@given(models())
def test_a_time_is_finite_and_not_negative(drawn):
    model, work = drawn
    assert 0 <= model.seconds(work) < float("inf")


@given(models(), st.sampled_from(("flops", "bytes", "launches")), st.integers(1, 10**12))
def test_more_work_never_takes_less_time(drawn, field, extra):
    model, work = drawn
    more = work.model_copy(update={field: getattr(work, field) + extra})
    assert model.seconds(more) >= model.seconds(work)


WHOLE = Efficiency(arithmetic={}, other_arithmetic=1.0, memory={}, other_memory=1.0)


def test_arithmetic_limit():
    gpu = device("A100-SXM4-80GB")
    work = OpWork(kind="matmul", flops=FLOPS, bytes=1, dtype="bf16", launches=0)
    half = Efficiency(arithmetic={}, other_arithmetic=0.5)
    assert Roofline(gpu, WHOLE).seconds(work) == pytest.approx(FLOPS / 312e12)
    assert Roofline(gpu, half).seconds(work) == pytest.approx(2 * FLOPS / 312e12)


def test_memory_limit():
    gpu = device("A100-SXM4-80GB")
    work = OpWork(kind="elementwise", flops=1, bytes=2_039_000_000, dtype="fp32", launches=0)
    slow = Efficiency(memory={"elementwise": 0.25})
    assert Roofline(gpu, WHOLE).seconds(work) == pytest.approx(1e-3)
    assert Roofline(gpu, slow).seconds(work) == pytest.approx(4e-3)


def test_classes_have_their_own_efficiency():
    model = Roofline(device("H100-SXM5-80GB"), Efficiency(arithmetic={"attention": 0.25}, other_arithmetic=0.5))
    matmul = OpWork(kind="matmul", flops=FLOPS, bytes=0, dtype="bf16", launches=0)
    attention = matmul.model_copy(update={"kind": "attention"})
    assert model.seconds(attention) == pytest.approx(2 * model.seconds(matmul))


def test_a_roofline_takes_the_class_where_the_kind_is_refined():
    model = Roofline(device("H100-SXM5-80GB"))
    work = OpWork(kind="conv", flops=FLOPS, bytes=10**6, dtype="bf16")
    assert model.seconds(work.model_copy(update={"kind": "conv.backward"})) == model.seconds(work)
    other = work.model_copy(update={"kind": "other"})
    assert model.seconds(work.model_copy(update={"kind": "never heard of"})) == model.seconds(other)


def test_unknown_arithmetic_is_refused():
    with pytest.raises(ValidationError, match="'fp64', 'fp32', 'tf32', 'bf16'"):
        OpWork(kind="matmul", flops=0, bytes=0, dtype="float32")


WORK = OpWork(kind="matmul", flops=FLOPS, bytes=10**6, dtype="fp32")


def test_a_measured_time_wins():
    roofline = Roofline(device("cpu-lane"))
    model = Measured({WORK: 0.125}, roofline)
    same = OpWork(kind="matmul", flops=FLOPS, bytes=10**6, dtype="fp32")
    other = WORK.model_copy(update={"bytes": 10**6 + 1})
    assert model.seconds(same) == 0.125
    assert model.seconds(other) == roofline.seconds(other)
