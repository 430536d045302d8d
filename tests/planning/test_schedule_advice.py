"""What plans say about plain execution: only what their own numbers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosplit.options import Options
from autosplit.partition.problem import Problem, Work
from autosplit.partition.solve import solve
from autosplit.planning.plan import notes as module
from autosplit.planning.plan.notes import advice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def problem(weight_s: float = 1.0, **fields: object) -> Problem:
    works = tuple(Work(str(index), 1.0, 2.0, weight_s=weight_s) for index in range(4))
    return Problem(works, (), order=tuple((i, i + 1) for i in range(3)), microbatches=4, **fields)


def said(own: Problem, options: Options, *, stages: int = 2, measured: bool = True) -> str:
    partition = solve(own, stages=stages, objective="step_time")
    return "\n".join(advice(own, partition, options, measured=measured))


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 2)


def test_plain_execution_is_named_where_the_plan_stays_below_it() -> None:
    """Four microbatches on two equal stages: 24 / 30 * 2 = 1.6 times one thread."""
    options = Options((CPU,) * 2, 4)
    assert "the plan is predicted to be 1.60 times as fast as one thread" in said(problem(), options)
    assert "plain" not in said(replace(problem(), microbatches=16), options)  # 2 * 16 / 17 = 1.88
    assert "plain" not in said(problem(), options, measured=False)
    assert "plain" not in said(problem(), Options((CUDA,) * 2, 4))
    assert "plain" not in said(problem(), Options((CPU,), 4), stages=1)
    assert "plain" not in said(replace(problem(), schedule="forward"), options)


def test_lanes_that_share_cores_are_told() -> None:
    assert "4 lanes share 2 cores of this machine" in said(problem(), Options((CPU,) * 4, 4), stages=4)
