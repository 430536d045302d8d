"""The calibration's cases, clocks and files; times themselves are not asserted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import cost_models
from autosplit.devices import Timed
from autosplit.profile import calibrate as calibrating
from autosplit.profile.calibrate import TimedSample, Timing, calibrate, issue_s, time_cases
from autosplit.profile.calibration_cases import Case, Program
from autosplit.profile.node_costs.ledger import Ledger, Operation
from autosplit.profile.node_costs.work import work_of
from cost_models.calibration import Calibrated
from cost_models.work import OpWork


def small(name: str = "small", *, low: bool = False) -> Case:
    layer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    return Case(name, lambda: (lambda: layer(x), [x, *layer.parameters()]), low=low)


@pytest.fixture
def ticking(monkeypatch):
    """A clock on which every look costs a second."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))


def test_a_kernel_is_timed_between_two_looks_at_the_clock(ticking):
    [timing] = time_cases([small()])
    assert {sample.seconds for sample in timing.samples} == {1.0}
    kinds = [sample.work.kind for sample in timing.samples]
    assert kinds.count("elementwise.special") == 1
    assert {"matmul", "reduction", "copy.fill"} <= set(kinds)
    assert len({sample.work for sample in timing.samples}) == len(timing.samples), "equal work is one sample"


def test_the_samples_are_the_account_of_the_same_run(ticking):
    case = small()
    [timing] = time_cases([case])
    assert [sample.work for sample in timing.samples] == list(dict.fromkeys(map(work_of, operations_of(case))))


def test_the_machine_is_left_as_it_was(ticking):
    x = torch.randn(4, requires_grad=True)
    case = Case("drawing", lambda: (lambda: x * torch.rand(4), [x]))
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        time_cases([case])
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(before)


def test_what_an_operation_costs_besides_its_kernel_comes_from_short_kernels():
    def timing(longest_s: float, extra_s: float) -> Timing:
        work = OpWork(kind="copy", flops=0, bytes=1, dtype="fp32")
        return Timing("any", (TimedSample(work, longest_s),), longest_s, extra_s)

    assert issue_s([timing(1e-5, 3e-6), timing(2e-5, 5e-6), timing(3e-5, 4e-6), timing(1.0, 9.0)]) == 4e-6
    assert issue_s([timing(1e-5, -3e-6)]) == 0
    assert issue_s([]) == 0


def test_on_a_device_the_host_s_time_is_measured_beside_the_kernels(monkeypatch):
    """A card on which every run takes 1 ms, and the host 20 us to issue it."""

    class Card:
        warms = True

        def timed(self, run):
            return Timed(run(), 1e-3, 0, 2e-5)

        def held_bytes(self) -> int:
            return 0

        def release(self) -> None:
            pass

    monkeypatch.setattr(calibrating, "clock_of", lambda place, threads: Card())
    timings = time_cases([small(str(width)) for width in range(6)])
    found = calibrating.fitted(timings, device=cost_models.device("H200-SXM-141GB")).fallback.device
    assert found.issue_s == pytest.approx(2e-5 / len(operations_of(small())))
    assert found.source("issue_s").status == "measured"
    assert "median over 6 cases" in found.source("issue_s").text
    assert cost_models.device("H200-SXM-141GB").source("issue_s").status == "prior"
    lane = cost_models.device("cpu-lane")
    monkeypatch.undo()
    timings = time_cases([small(str(width)) for width in range(6)])
    assert calibrating.fitted(timings, device=lane).fallback.device == lane


def operations_of(case: Case) -> list[Operation]:
    program, leaves = case.build()
    with Ledger() as ledger:
        result = program()
        torch.autograd.grad(result, leaves, torch.ones_like(result))
    return ledger.operations


def test_a_calibration_is_stamped_and_read_back(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrating, "cases", lambda gpu: iter([small(str(width)) for width in range(6)]))
    found = calibrate()
    assert found.stamp.device == "cpu-lane"
    assert found.stamp.threads == 1
    assert found.stamp.versions["torch"] == torch.__version__
    found.save(tmp_path / "lane.json")
    assert Calibrated.load(tmp_path / "lane.json") == found


@pytest.mark.cuda
def test_a_cuda_device_is_timed_by_its_own_clock():
    def built() -> tuple[Program, Sequence[torch.Tensor]]:
        layer, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
        return lambda: layer(x), [x, *layer.parameters()]

    [timing] = time_cases([Case("linear", built)], device=torch.device("cuda"))
    assert any(sample.work.kind == "matmul" for sample in timing.samples)
    assert all(sample.seconds > 0 for sample in timing.samples)
