"""The zoo's runner and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.zoo import measure, table
from tests.equivalence.equality import Run

ROOT = Path(__file__).resolve().parents[2]

CASES_THAT_END_BADLY = """
import json, os
from benchmarks.zoo.case import Case
from benchmarks.zoo.runner import Limits, run_all

def ends():
    os._exit(3)

def loops():
    while True:
        pass

def eats():
    return bytearray(64 * 2**30)

def raises():
    raise KeyError("no such layer")

def run(*builds, seconds):
    cases = [Case(build.__name__, "traps", build, None) for build in builds]
    return {r["name"]: r for r in run_all(cases, jobs=2, limits=Limits(seconds=seconds, bytes=2**30))}

print(json.dumps(run(ends, eats, raises, seconds=120.0) | run(loops, seconds=3.0)))
"""


def run(*command: str) -> str:
    """Return what a Python process prints that runs from the repository's root."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def result(name: str = "model", **more: Any) -> dict[str, Any]:
    """Return the result of a model that is equal, but for ``more``."""
    checks = {"eval": {"tolerance": 1e-5, "difference": 1e-7, "at": "", "mismatch": []}}
    facts = {"rung": "recorded", "stages": 3, "microbatches": 3, "whole": False, "full_share": 0.0, "record_s": 0.5}
    exact = {"names_exact": True, "switch_exact": True, "nodes": 5, "largest_share": 0.2}
    return {"name": name, "group": "traps", "blocks": 8, "answer": True, "checks": checks, **facts, **exact} | more


@pytest.mark.slow
def test_two_models_run_and_a_second_run_goes_on_where_the_first_ended(tmp_path):
    file = tmp_path / "zoo.json"
    printed = run("-m", "benchmarks.zoo", "--only", "squeezebert", "--json", str(file))
    assert "equal" in printed
    printed = run("-m", "benchmarks.zoo", "--only", "gpt2", "--json", str(file), "--resume")
    found = {r["name"]: r for r in json.loads(file.read_text(encoding="utf-8"))["results"]}
    assert list(found) == ["squeezebert", "gpt2"]
    for one in found.values():
        assert one["answer"]
        assert all(check["difference"] <= check["tolerance"] == 1e-5 for check in one["checks"].values())
        assert one["names_exact"]
        assert one["switch_exact"]
        assert (one["stages"], one["microbatches"]) == (4, 3)
    assert set(found["gpt2"]["checks"]) == {"eval", "train", "rows", "length"}
    assert "100.0% (2 of 2)" in printed


@pytest.mark.slow
def test_a_case_that_dies_hangs_eats_or_raises_is_a_result_and_ends_no_other():
    found = json.loads(run("-c", CASES_THAT_END_BADLY))
    assert found["ends"]["error"]["text"] == "the process ended with code 3 and no result"
    assert found["loops"]["error"] == {"type": "Timeout", "text": "over 3 s", "where": []}
    assert found["eats"]["error"]["type"] == "MemoryError"
    assert found["raises"]["error"]["text"] == "'no such layer'"
    assert found["raises"]["broken"]


def a_run(output: torch.Tensor, gradient: torch.Tensor | None) -> Run:
    return Run({"/": output}, torch.zeros(()), {"weight": gradient}, {})


def test_runs_are_compared_by_the_largest_difference_and_by_kind():
    one, two = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.1])
    found = measure.compare(a_run(two, one), a_run(one, one))
    assert found["difference"] == pytest.approx(0.05, rel=1e-4)
    assert found["at"] == "output /"
    assert not found["mismatch"]
    assert measure.compare(a_run(one, None), a_run(one, one))["mismatch"] == [
        "gradient weight: None, plain has a tensor"
    ]
    assert "float64" in measure.compare(a_run(one.double(), one), a_run(one, one))["mismatch"][0]
    endless = torch.tensor([1.0, float("-inf")])
    assert measure.compare(a_run(endless, one), a_run(endless, one))["difference"] == 0.0
    assert measure.compare(a_run(endless, one), a_run(one, one))["mismatch"] == ["output /: other infinities"]
    nothing = torch.tensor([float("nan"), -2.0])
    assert measure.wrong(measure.compare(a_run(nothing, one), a_run(one, one)) | {"tolerance": 1e-5})


def test_a_miss_of_float32_alone_is_told_from_a_wrong_answer():
    missed = {"eval": {"tolerance": 1e-5, "difference": 1e-4, "at": "", "mismatch": []}}
    rounding = {"eval": missed["eval"] | {"only_float32": True, "float64": 1e-13}}
    assert table.verdict(result(checks=missed)) == "wrong"
    assert table.verdict(result(checks=rounding)) == "float32"
    assert table.verdict(result()) == "equal"
    error = {"type": "TraceError", "text": "no", "where": []}
    assert table.verdict(result(answer=False, checks={}, error=error)) == "refused"
    assert table.verdict(result(answer=False, checks={}, error=error | {"type": "Timeout"})) == "crashed"
    assert table.verdict(result(answer=False, checks={}, broken=True)) == "zoo"


def test_the_numbers_count_what_was_asked():
    missed = {"eval": {"tolerance": 1e-5, "difference": 0.5, "at": "", "mismatch": []}}
    found = [result("a"), result("b", whole=True, largest_share=0.3, record_s=2.0), result("c", checks=missed)]
    found.append({"name": "d", "group": "traps", "blocks": 0, "answer": False, "checks": {}, "error": {"type": "E"}})
    numbers = {what: (measured, met) for what, _, measured, met in table.numbers(found)}
    assert numbers["give an answer"] == ("75.0% (3 of 4)", False)
    assert numbers["equal the plain model"] == ("50.0% (2 of 4)", False)
    assert numbers["silently wrong"] == ("25.0% (1 of 4)", False)
    assert numbers["run whole (one stage or one chunk)"] == ("33.3% (1 of 3)", False)
    assert numbers["on the first rung"] == ("75.0% (3 of 4)", False)
    assert numbers["largest node, eight blocks and more"] == ("30.0% at most, 1 of 3 over", False)
    assert numbers["median seconds to record"] == ("0.50", True)
    text = table.lines(found)
    assert len(text.splitlines()) == 2 + len(found)
    assert "5e-01" in text
