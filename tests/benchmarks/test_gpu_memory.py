"""The memory and roofline parts of the GPU benchmark: budgets that fall, checks by hand, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autosplit import InfeasibleError
from autosplit.profile.calibrate import Timing
from benchmarks import memory_cuda
from benchmarks.gpu import budgets, memory, roofline
from benchmarks.gpu.budgets import falling, rises
from benchmarks.gpu.memory import Cell
from benchmarks.gpu.part import Setting
from benchmarks.memory_step import Way
from benchmarks.memory_subject import recorded

MIB = 1 << 20
CPU, CARD = Setting(torch.device("cpu"), small=True), Setting(torch.device("cuda", 0))


def test_the_peak_falls_with_the_budget():
    found = falling(memory.tiny, torch.randn(64, 8), machine="1xcpu-lane", steps=10)
    limits, peaks = [b.limit_bytes for b in found], [b.peak_bytes for b in found]
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == 10
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_what_no_budget_shrinks_is_said():
    with pytest.raises(InfeasibleError, match="no plan takes less than half of what the fastest has above its states"):
        falling(lambda: nn.Linear(8, 8), torch.randn(1, 8), machine="1xcpu-lane")


def test_rises_are_counted():
    assert (rises([5, 4, 4, 6, 1, 2]), rises([3]), rises([3, 3])) == (2, 0, 0)


def test_measured_peaks_that_never_fall_do_not_hold():
    assert [check.ok for check in memory.fallen([5, 5, 5])] == [True, False]
    assert [check.ok for check in memory.fallen([5, 4, 6])] == [False, True]
    assert [check.ok for check in memory.fallen([5, 5, 3])] == [True, True]


def cell(predicted: int, *, reserved: int = 100) -> Cell:
    return Cell("vit", "fp32", "never", predicted, 100, reserved, 100)


def test_the_checks_are_medians_and_worst_cases_over_all_cells():
    own = [cell(100), cell(101), cell(104, reserved=93)]
    found = {check.name.partition(": ")[2] or check.name: check for check in memory.checks(own, CARD)[:2]}
    assert found["median error"].measured == pytest.approx(0.01)
    assert found["worst error"].measured == pytest.approx(0.04)
    *_, reserved = memory.checks(own, CARD)
    assert (reserved.measured, reserved.ok) == (pytest.approx(0.07), True)
    assert len(memory.checks(own, CPU)) == 2
    assert "reserved_error" in memory.figure(own[0], CARD)
    assert "reserved_error" not in memory.figure(own[0], CPU)


def test_the_workspaces_of_cublas_are_predicted_where_there_are_products():
    subject, way = recorded(memory.small_family(), "fp32"), Way("fp32", "never", 2)
    plain, kept, older = (
        memory_cuda.predicted_cuda(subject, way, optimizer="adam", **options)
        for options in ({}, {"workspaces": True}, {"workspaces": True, "capability": (8, 0)})
    )
    assert kept[0] - plain[0] == 64 * MIB
    assert kept[1] - plain[1] == 64 * MIB
    assert older[0] - plain[0] == 2 * (8 * MIB + 128 * 1024)
    assert not memory_cuda._has_products(nn.Conv2d(3, 3, 3))


def test_a_family_is_predicted_by_the_others_alone():
    def timing(name: str) -> Timing:
        return Timing(name, (), 0.0, 0.0)

    timings = {"a": [timing("a")], "b": [timing("b")], "c": [timing("c")]}
    assert [found.name for found in roofline.others(timings, "b")] == ["a", "c"]


def test_a_family_is_timed_without_what_its_loss_does_not_depend_on():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    family = replace(
        memory.small_family(),
        make=Half,
        batch=lambda rows: (torch.randn(rows, 4),),
        target=lambda rows: torch.randint(0, 4, (rows,)),
    )
    program, leaves = roofline.case_of(family).build()
    assert [tuple(leaf.shape) for leaf in leaves] == [(4, 4), (4,)]
    assert program().dim() == 0


def test_on_a_card_the_second_step_is_counted_above_what_it_began_with(monkeypatch):
    """In one microbatch a step has no lanes to count: the allocator's own peak is read."""
    log: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    pipe = nn.Linear(1, 1)
    pipe(torch.ones(1, 1)).sum().backward()
    assert budgets._grown_on_card(lambda: log.append("step"), pipe, torch.device("cuda")) == 60
    assert log == ["step", "synchronize", "reset_peak_memory_stats", "step", "synchronize"]
    assert pipe.weight.grad is None
