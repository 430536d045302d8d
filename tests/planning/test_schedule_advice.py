"""What plans say about zero bubble and about plain execution: only what their own numbers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosplit.options import Options
from autosplit.partition.checker import check
from autosplit.partition.problem import Device, Problem, Work
from autosplit.partition.solve import solve
from autosplit.planning.explain import advice as module
from autosplit.planning.explain.advice import advice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def problem(weight_s: float = 1.0, **fields: object) -> Problem:
    works = tuple(Work(str(index), 1.0, 2.0, weight_s=weight_s, transient_bytes=8) for index in range(4))
    return Problem(works, (), order=tuple((i, i + 1) for i in range(3)), microbatches=4, **fields)


def said(own: Problem, options: Options, *, stages: int = 2, measured: bool = True) -> str:
    partition = solve(own, stages=stages, objective="step_time")
    return "\n".join(advice(own, partition, options, measured=measured))


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 2)


def test_zero_bubble_is_named_with_what_it_would_gain_and_auto_stays_as_it_is() -> None:
    own = problem()
    partition = solve(own, stages=2, objective="step_time")
    gain = partition.costs.step_s / check(replace(own, schedule="zb_h1"), partition.assignment).step_s
    assert gain == pytest.approx(30 / 26)  # (M + P - 1)(F + B), and M (F + B) + (P - 1)(F + I - W)
    assert f"is predicted to be {gain:.2f} times" in said(own, Options((CUDA,) * 2, 4, schedule="auto"))
    assert "zb_h1" not in said(own, Options((CUDA,) * 2, 4, schedule="1f1b"))
    assert "zb_h1" not in said(problem(weight_s=0.0), Options((CUDA,) * 2, 4, schedule="auto"))


def test_zero_bubble_is_not_named_where_it_does_not_fit() -> None:
    tight = problem(devices=(Device(capacity_bytes=8),) * 2)
    options = Options((CUDA,) * 2, 4, schedule="auto")
    assert "zb_h1" in said(tight, options)
    partition = solve(tight, objective="step_time")
    least = replace(tight, devices=(Device(capacity_bytes=7),) * 2)
    assert not list(advice(least, partition, options, measured=True))


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
