from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cost_models import DeviceSpec, LinkSpec, Source

GUESS = Source(status="prior", text="made up for a test")


def make_link(**changes: Any) -> LinkSpec:
    sources = {"bandwidth_bytes_per_s": GUESS, "latency_s": GUESS}
    return LinkSpec(**{"name": "wire", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-3, "sources": sources} | changes)


def make_device(**changes: Any) -> DeviceSpec:
    figures = ("memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s", "launch_s")
    fields = {
        "name": "toy",
        "memory_bytes": 2**30,
        "memory_bandwidth_bytes_per_s": 1e9,
        "peak_flops_per_s": {"fp32": 1e12, "bf16": 4e12},
        "launch_s": 1e-6,
        "host_link": make_link(),
        "sources": dict.fromkeys(figures, GUESS),
    }
    return DeviceSpec(**fields | changes)


def test_json_round_trip():
    device = make_device(peer_link=make_link(name="peer"), notes="a × b")
    assert DeviceSpec.model_validate_json(device.model_dump_json()) == device


def test_specs_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        make_device().launch_s = 0.0


def test_every_figure_needs_a_source():
    sources = {"memory_bytes": GUESS, "peak_flops_per_s": GUESS, "launch_s": GUESS}
    with pytest.raises(ValidationError, match="no source for memory_bandwidth_bytes_per_s; add it to sources"):
        make_device(sources=sources)
    with pytest.raises(ValidationError, match="no source for latency_s"):
        make_link(sources={"bandwidth_bytes_per_s": GUESS})


def test_a_source_must_belong_to_a_figure():
    sources = make_device().sources | {"memory_bites": GUESS}
    with pytest.raises(ValidationError, match="sources for memory_bites, but there is no such figure; figures:"):
        make_device(sources=sources)
    with pytest.raises(ValidationError, match=r"sources for peak_flops_per_s\.tf32, but there is no such figure"):
        make_device(sources=make_device().sources | {"peak_flops_per_s.tf32": GUESS})


def test_one_entry_of_a_figure_may_have_its_own_source():
    measured = Source(status="measured", text="a matmul")
    device = make_device(sources=make_device().sources | {"peak_flops_per_s.bf16": measured})
    assert device.source("peak_flops_per_s.bf16") == measured
    assert device.source("peak_flops_per_s.fp32") == GUESS


def test_sources_by_entry_must_cover_every_entry():
    sources = {figure: GUESS for figure in make_device().sources if figure != "peak_flops_per_s"}
    with pytest.raises(ValidationError, match=r"no source for peak_flops_per_s\.bf16; add"):
        make_device(sources=sources | {"peak_flops_per_s.fp32": GUESS})


def test_unknown_memory_needs_no_source():
    sources = {figure: GUESS for figure in make_device().sources if figure != "memory_bytes"}
    assert make_device(memory_bytes=None, sources=sources).memory_bytes is None


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 0},
        {"memory_bandwidth_bytes_per_s": 0.0},
        {"memory_bandwidth_bytes_per_s": float("inf")},
        {"launch_s": -1e-6},
        {"peak_flops_per_s": {"fp32": 0.0}},
        {"peak_flops_per_s": {"fp32": 1e12, "float32": 1e12}},
        {"tflops": 3},
    ],
)
def test_impossible_figures_are_refused(changes):
    with pytest.raises(ValidationError, match="validation error"):
        make_device(**changes)


def test_fp32_is_required_because_others_fall_back_to_it():
    assert make_device().peak("bf16") == 4e12
    assert make_device().peak("fp64") == make_device().peak("fp32") == 1e12
    with pytest.raises(ValidationError, match="peak_flops_per_s has no fp32"):
        make_device(peak_flops_per_s={"bf16": 1e12})


def test_transfer_is_latency_and_bytes_over_bandwidth():
    assert make_link().transfer_s(0) == 1e-3
    assert make_link().transfer_s(500_000_000) == pytest.approx(0.501)
