"""The planning benchmark: when a pair is near and quick enough, and one small pair through search and sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autosplit.options import Sample
from benchmarks import planning
from benchmarks.planning import Pair, Row, measured


def row(**fields: object) -> Row:
    plain = Row(
        name="n",
        devices=2,
        limit_bytes=None,
        configurations=4,
        sweep_s=1.0,
        search_s=1.0,
        above=0.0,
        sweep_cpu_s=10.0,
        search_cpu_s=0.5,
        chosen="",
        best="",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def test_a_row_is_near_and_quick_enough_or_not() -> None:
    assert row().ok
    assert row(sweep_s=None, search_s=None, above=None).ok
    assert not row(above=0.03).ok
    assert not row(search_cpu_s=2.0).ok
    assert not row(search_s=None, above=None).ok
    assert not row(sweep_s=None).ok
    assert row(sweep_s=None, search_s=1.0, above=None).ok


def test_a_small_pair_goes_through_search_and_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CHUNKS", (4,))
    monkeypatch.setattr(planning, "SCHEDULES", (("1f1b", 1),))

    def build() -> tuple[nn.Module, Sample]:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), Sample(torch.empty(64, 64))

    found = measured(Pair("small", build, "2xL4-24GB"))
    assert (found.configurations, found.devices) == (4, 2)
    assert found.above == pytest.approx(0.0, abs=planning.ABOVE)
    assert found.chosen == found.best
