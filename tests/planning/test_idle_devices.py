"""A plan says which devices stand idle, for how much of the step, and why."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import plan


def notes(*widths: int, devices: Any = "4xL4-24GB", rows: int = 32, chunks: int = 8, **choices: Any) -> str:
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    asked: dict[str, Any] = {"schedule": "1f1b", "recompute": "never", "optimizer": "sgd"} | choices
    found = plan(model, devices, chunks, sample=torch.zeros(rows, widths[0]), loss_fn=torch.sum, **asked)
    for stage in found.stages:
        idle = 1 - len(found.microbatch_rows) * (stage.forward_s + stage.backward_s) / found.step_s
        if (said := [note for note in found.notes if note.startswith(f"device {stage.lane} (")]) and "idle" in said[0]:
            assert int(said[0].partition("idle ")[2].partition("%")[0]) == pytest.approx(100 * idle, abs=3)
    return "\n".join(found.notes)


def test_too_few_microbatches() -> None:
    said = notes(*[64] * 9, rows=2)
    assert "2 microbatches at work on 4 devices: these are idle 68% of the step; of 16 such microbatches" in said
    assert "at work on" not in notes(*[64] * 9)


def test_too_few_parts() -> None:
    with pytest.warns(UserWarning, match="only 2 separable parts"):
        said = notes(64, 64, 64)
    assert "4 devices were given, but the model has only 2 separable parts: using 2 stages" in said


def test_one_large_part() -> None:
    said = notes(64, 4096, 4096, 64, 64, devices="3xL4-24GB")
    assert "'1#0' alone is " in said
    assert "% of what the busiest, device " in said


def test_no_room_and_a_slow_device() -> None:
    full = notes(*[512] * 9, devices="2xL4-24GB", memory_limit=["3MiB", None], reserve=None)
    assert "is idle " in full
    assert "it is full, " in full
    assert " of 3.00 MiB" in full
    slow = notes(4096, 4096, 4096, 64, devices="H100-PCIe-80GB+T4-16GB", rows=4096)
    assert "(T4-16GB) is idle" in slow
    assert "times as long as the fastest for the same work" in slow
