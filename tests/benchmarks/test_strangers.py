"""The comparison of strangers' models: what is equal is called so, and what differs is seen."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from benchmarks.strangers import __main__ as models
from benchmarks.strangers import compare, traps
from benchmarks.strangers.compare import Setup, Subject, run_subject
from benchmarks.strangers.hosts import Residual, vectors
from benchmarks.strangers.run import line, summary, table

NAMED = {subject.name: subject for subject in [*models.SUBJECTS, *traps.SUBJECTS]}


@pytest.mark.parametrize("name", ["Adversarial in towers", "DomainAdaptation", "flip", "cumsum"])
def test_an_equal_subject(name):
    result = run_subject(NAMED[name], Setup())
    assert result.outcome == "equal", line(result)


class Plain(nn.Sequential):
    def __init__(self, **state):
        super().__init__(nn.Linear(6, 8), Residual(), nn.Linear(8, 3))
        self.__dict__.update(state)


def test_a_model_that_pipelines():
    result = run_subject(Subject("plain", "none", Plain, vectors), Setup())
    assert (result.answer, result.outcome, result.chunks) == ("pipelines", "equal", 3)
    assert "all" in table([result])
    assert summary([result]) == {"cases": 1, "equal": 1, "pipelines": 1}


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


def test_there_are_enough():
    kinds = [subject.kind for subject in models.SUBJECTS]
    assert min(map(kinds.count, kinds)) >= 8
    assert len(kinds) >= 100
    assert len(traps.SUBJECTS) >= 60
