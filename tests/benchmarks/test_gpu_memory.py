"""The memory part of the GPU benchmark: checks by hand, and the workspaces of cuBLAS."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import memory_cuda
from benchmarks.gpu import memory
from benchmarks.gpu.memory import Cell
from benchmarks.gpu.part import Setting
from benchmarks.memory_step import Way
from benchmarks.memory_subject import recorded

MIB = 1 << 20
CPU, CARD = Setting(torch.device("cpu"), small=True), Setting(torch.device("cuda", 0))


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
