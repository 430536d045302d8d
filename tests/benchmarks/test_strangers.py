"""The comparison of strangers' models: what is equal is called so, and what differs is seen."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from benchmarks.strangers import __main__ as models
from benchmarks.strangers import compare, traps
from benchmarks.strangers.compare import Setup, Subject, run_subject
from benchmarks.strangers.hosts import Residual, vectors
from benchmarks.strangers.programs import Program
from benchmarks.strangers.run import line

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
