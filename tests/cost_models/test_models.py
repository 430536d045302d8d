from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models import KINDS, CostModel, Efficiency, Measured, OpWork, Roofline, device, names

FLOPS = 10**12
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int")
DEVICES = {name: device(name) for name in names()}


def works(dtypes: tuple[str, ...] = DTYPES) -> st.SearchStrategy[OpWork]:
    return st.builds(
        OpWork,
        kind=st.sampled_from((*KINDS, "conv.backward", "never heard of")),
        flops=st.integers(0, 10**15),
        bytes=st.integers(0, 10**12),
        dtype=st.sampled_from(dtypes),
        launches=st.integers(0, 100),
    )


@dataclass(frozen=True)
class Question:
    """A cost model, and work in an arithmetic that its device has."""

    model: CostModel
    work: OpWork


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Every cost model of the package, over every device: the conformance suite below runs on all of them."""
    spec = DEVICES[draw(st.sampled_from(names()))]
    model = draw(st.sampled_from((Roofline(spec), Measured({}, Roofline(spec)))))
    return Question(model, draw(works(spec.dtypes)))


@given(questions())
def test_a_time_is_finite_and_not_negative(asked):
    assert 0 <= asked.model.seconds(asked.work) < float("inf")


@given(questions(), st.sampled_from(("flops", "bytes", "launches")), st.integers(1, 10**12))
def test_more_work_never_takes_less_time(asked, field, extra):
    more = asked.work.model_copy(update={field: getattr(asked.work, field) + extra})
    assert asked.model.seconds(more) >= asked.model.seconds(asked.work)


@given(questions())
def test_a_split_costs_no_less_than_the_whole(asked):
    model, work = asked.model, asked.work
    half = work.model_copy(update={"flops": (work.flops + 1) // 2, "bytes": (work.bytes + 1) // 2})
    assert 2 * model.seconds(half) >= model.seconds(work) * (1 - 1e-12)


def test_arithmetic_limit():
    gpu = device("A100-SXM4-80GB")
    work = OpWork(kind="matmul", flops=FLOPS, bytes=1, dtype="bf16", launches=0)
    assert Roofline(gpu, Efficiency(arithmetic={"matmul": 1.0})).seconds(work) == pytest.approx(FLOPS / 312e12)
    assert Roofline(gpu, Efficiency(arithmetic={"matmul": 0.5})).seconds(work) == pytest.approx(2 * FLOPS / 312e12)
    assert Roofline(gpu, Efficiency(arithmetic={}, other_arithmetic=0.5)).seconds(work) == pytest.approx(
        2 * FLOPS / 312e12
    )


def test_an_arithmetic_that_the_device_lacks_is_refused_where_it_computes():
    p40 = Roofline(device("P40-24GB"))
    matmul = OpWork(kind="matmul", flops=FLOPS, bytes=10**6, dtype="bf16")
    with pytest.raises(ValueError, match="P40-24GB has no bf16 arithmetic; it has fp32, fp64, and emulates fp16;"):
        p40.seconds(matmul)
    copy = OpWork(kind="copy", flops=0, bytes=10**6, dtype="bf16")
    assert p40.seconds(copy) == p40.seconds(copy.model_copy(update={"dtype": "fp32"}))
    add = OpWork(kind="elementwise", flops=FLOPS, bytes=0, dtype="bf16")
    assert p40.seconds(add) == p40.seconds(add.model_copy(update={"dtype": "fp32"}))


def test_elementwise_work_runs_on_the_fp32_units():
    gpu, full = device("H100-SXM5-80GB"), Efficiency(arithmetic={}, other_arithmetic=1.0)
    add = OpWork(kind="elementwise", flops=FLOPS, bytes=0, dtype="bf16", launches=0)
    assert Roofline(gpu, full).seconds(add) == pytest.approx(FLOPS / 67e12)
    assert Roofline(gpu, full).seconds(add.model_copy(update={"kind": "matmul"})) == pytest.approx(FLOPS / 989e12)
    assert Roofline(gpu, full).seconds(add.model_copy(update={"dtype": "int"})) == pytest.approx(FLOPS / 67e12)


def test_memory_limit():
    gpu = device("A100-SXM4-80GB")
    work = OpWork(kind="elementwise", flops=1, bytes=2_039_000_000, dtype="fp32", launches=0)
    assert Roofline(gpu, Efficiency(memory={"elementwise": 1.0})).seconds(work) == pytest.approx(1e-3)


def test_launches_come_on_top():
    gpu = device("A100-SXM4-80GB")
    view = OpWork(kind="view", flops=0, bytes=0, dtype="fp32", launches=0)
    assert Roofline(gpu).seconds(view) == 0
    assert Roofline(gpu).seconds(view.model_copy(update={"launches": 3})) == pytest.approx(3 * gpu.launch_s)


def test_kinds_have_their_own_efficiency():
    model = Roofline(device("H100-SXM5-80GB"), Efficiency(arithmetic={"attention": 0.25}, other_arithmetic=0.5))
    matmul = OpWork(kind="matmul", flops=FLOPS, bytes=0, dtype="bf16", launches=0)
    attention = matmul.model_copy(update={"kind": "attention"})
    assert model.seconds(attention) == pytest.approx(2 * model.seconds(matmul))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_an_efficiency_is_a_share(share):
    with pytest.raises(ValueError, match=r"shares above 0 and at most 1, got \{'arithmetic of attention'"):
        Efficiency(arithmetic={"attention": share})
    with pytest.raises(ValueError, match=r"got \{'memory of copy'"):
        Efficiency(memory={"copy": share})
    with pytest.raises(ValueError, match=r"got \{'other_memory'"):
        Efficiency(other_memory=share)


@pytest.mark.parametrize("field", ["flops", "bytes", "launches"])
def test_work_is_not_negative(field):
    with pytest.raises(ValidationError, match=field):
        OpWork(**{"kind": "matmul", "flops": 0, "bytes": 0, "dtype": "fp32", field: -1})


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


@given(st.dictionaries(works(), st.floats(1e-9, 1e3), max_size=5))
def test_measured_json_round_trip(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("table") / "measured.json"
    fallback = Roofline(device("cpu-lane"))
    Measured(table, fallback).save(path)
    assert Measured.load(path, fallback=fallback) == Measured(table, fallback)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_measured_time_is_positive(seconds):
    with pytest.raises(ValueError, match="a measured time is finite and above zero"):
        Measured({WORK: seconds}, Roofline(device("cpu-lane")))


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text('[{"work": {"kind": "matmul"}, "seconds": 1}]')
    with pytest.raises(ValueError, match="flops"):
        Measured.load(path, fallback=Roofline(device("cpu-lane")))
