"""The zoo and the strangers' models: runs, comparisons and tables."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.strangers import __main__ as models
from benchmarks.strangers import compare, traps
from benchmarks.strangers.compare import Setup, Subject, run_subject
from benchmarks.strangers.hosts import Residual, vectors
from benchmarks.strangers.programs import Program
from benchmarks.strangers.run import line
from benchmarks.zoo import table

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


NAMED = {subject.name: subject for subject in [*models.SUBJECTS, *traps.SUBJECTS]}


@pytest.mark.parametrize("name", ["DomainAdaptation", "flip"])
def test_an_equal_subject(name):
    result = run_subject(NAMED[name], Setup())
    assert result.outcome == "equal", line(result)


class Plain(nn.Sequential):
    def __init__(self, **state):
        super().__init__(nn.Linear(6, 8), Residual(), nn.Linear(8, 3))
        self.__dict__.update(state)


@pytest.mark.slow
def test_differences_are_seen():
    count = iter(range(2))
    result = run_subject(Subject("attribute", "none", lambda: Plain(built=next(count)), vectors), Setup())
    assert result.outcome == "wrong"
    assert result.off == "after the split: modules.the model.built: 0 in the plain model, 1 in the pipe"


def test_raw_errors_and_refusals_are_told_apart(monkeypatch):
    subject = dataclasses.replace(NAMED["cumsum"], options={"memory_limit": "1B"})
    assert run_subject(subject, Setup()).outcome == "refused"
    monkeypatch.setattr(compare, "split", lambda *_: 1 / 0)
    assert run_subject(subject, Setup()).outcome == "raw error"


def test_a_program_is_python_and_runs():
    program = Program.random(1)
    assert program.source() == Program.random(1).source()
    assert run_subject(program.subject(), program.setup()).outcome == "equal"
