from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models import DeviceSpec, LinkSpec, Source

GUESS = Source(status="prior", text="made up for a test")


def make_link(**changes: Any) -> LinkSpec:
    sources = {"bandwidth_bytes_per_s": GUESS, "latency_s": GUESS}
    return LinkSpec(**{"name": "wire", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-3, "sources": sources} | changes)


def make_device(**changes: Any) -> DeviceSpec:
    figures = (
        "memory_bytes",
        "reserve_bytes",
        "memory_bandwidth_bytes_per_s",
        "peak_flops_per_s",
        "launch_s",
        "issue_s",
    )
    fields = {
        "name": "toy",
        "memory_bytes": 2**30,
        "reserve_bytes": 2**28,
        "memory_bandwidth_bytes_per_s": 1e9,
        "peak_flops_per_s": {"fp32": 1e12, "bf16": 4e12},
        "launch_s": 1e-6,
        "issue_s": 5e-6,
        "host_link": make_link(),
        "sources": dict.fromkeys(figures, GUESS),
    }
    return DeviceSpec(**fields | changes)


DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int")
RATES = st.floats(1e6, 1e19)


@st.composite
def links(draw: st.DrawFn) -> LinkSpec:
    return make_link(
        name=draw(st.sampled_from(("wire", "lane", "a × b"))),
        bandwidth_bytes_per_s=draw(st.floats(1e6, 1e16)),
        latency_s=draw(st.floats(0, 1)),
    )


@st.composite
def devices(draw: st.DrawFn) -> DeviceSpec:
    """Any device that the specs allow, each figure with its source."""
    rates = draw(st.dictionaries(st.sampled_from(DTYPES), RATES)) | {"fp32": draw(RATES)}
    rest = [dtype for dtype in DTYPES if dtype not in rates]
    emulated = draw(st.dictionaries(st.sampled_from(rest), RATES)) if rest else {}
    memory = draw(st.none() | st.integers(2**20, 2**60))
    peer = draw(st.none() | links())
    known = {
        "peer_group": draw(st.none() | st.integers(2, 72)) if peer else None,
        "compute_capability": draw(st.none() | st.sampled_from(("9.0", "gfx942"))),
        "multiprocessors": draw(st.none() | st.integers(1, 400)),
    }
    given = {name: value for name, value in known.items() if value is not None}
    sources = make_device().sources | dict.fromkeys(given, GUESS)
    sources |= {"emulated_flops_per_s": GUESS} if emulated else {}
    sources = {name: source for name, source in sources.items() if name != "memory_bytes" or memory is not None}
    return make_device(
        memory_bytes=memory,
        reserve_bytes=draw(st.integers(0, (memory or 2**40) - 1)),
        peak_flops_per_s=rates,
        emulated_flops_per_s=emulated,
        launch_s=draw(st.floats(0, 1)),
        peer_link=peer,
        sources=sources,
        **given,
    )


@given(devices())
def test_json_round_trip(device):
    assert DeviceSpec.model_validate_json(device.model_dump_json()) == device


@given(devices(), st.sampled_from(DTYPES))
def test_a_peak_is_a_rate_or_an_error_that_names_the_device_and_what_it_has(device, dtype):
    if dtype in device.dtypes:
        assert device.peak(dtype) >= 1e6 / 64
        return
    with pytest.raises(ValueError, match=f"^toy has no {dtype} arithmetic; it has ") as caught:
        device.peak(dtype)
    named = {*device.peak_flops_per_s, *device.emulated_flops_per_s}
    assert all(known in str(caught.value).partition("it has")[2].partition(";")[0] for known in named)
    assert "emulated_flops_per_s" in str(caught.value)


def test_every_figure_needs_a_source():
    sources = {name: GUESS for name in make_device().sources if name != "memory_bandwidth_bytes_per_s"}
    with pytest.raises(ValidationError, match="no source for memory_bandwidth_bytes_per_s; add it to sources"):
        make_device(sources=sources)
    with pytest.raises(ValidationError, match="no source for latency_s"):
        make_link(sources={"bandwidth_bytes_per_s": GUESS})


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 0},
        {"memory_bytes": 80},
        {"memory_bandwidth_bytes_per_s": 0.0},
        {"memory_bandwidth_bytes_per_s": 3350},
        {"memory_bandwidth_bytes_per_s": float("inf")},
        {"launch_s": -1e-6},
        {"launch_s": 4.5},
        {"issue_s": -1e-6},
        {"reserve_bytes": -1},
        {"peer_group": 1},
        {"multiprocessors": 0},
        {"peak_flops_per_s": {"fp32": 19.5}},
        {"peak_flops_per_s": {"fp32": 0.0}},
        {"peak_flops_per_s": {"fp32": 1e12, "float32": 1e12}},
        {"tflops": 3},
    ],
)
def test_impossible_figures_are_refused(changes):
    with pytest.raises(ValidationError, match="validation error"):
        make_device(**changes)


def test_integers_tf32_and_fp64_without_a_figure_have_a_rate():
    device = make_device()
    assert device.dtypes == ("fp64", "fp32", "tf32", "bf16", "int")
    assert device.peak("bf16") == 4e12
    assert device.peak("int") == device.peak("tf32") == device.peak("fp32") == 1e12
    assert device.peak("fp64") == 1e12 / 64
    assert make_device(peak_flops_per_s={"fp32": 1e12, "fp64": 5e11, "int": 2e12}).peak("int") == 2e12


def test_an_emulated_arithmetic_has_the_rate_that_is_stated():
    sources = make_device().sources | {"emulated_flops_per_s.fp16": GUESS}
    device = make_device(emulated_flops_per_s={"fp16": 5e11}, sources=sources)
    assert device.peak("fp16") == 5e11
    assert "fp16" in device.dtypes
    with pytest.raises(ValueError, match="it has fp32, bf16, and emulates fp16;"):
        device.peak("fp8")
    with pytest.raises(ValidationError, match="no source for emulated_flops_per_s"):
        make_device(emulated_flops_per_s={"fp16": 5e11})
    with pytest.raises(ValidationError, match="bf16 stands under peak_flops_per_s and under emulated_flops_per_s"):
        make_device(
            emulated_flops_per_s={"bf16": 5e11}, sources=make_device().sources | {"emulated_flops_per_s": GUESS}
        )
