"""The planning benchmark: when a pair is near and quick enough, and one small pair through search and sweep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.options import Sample
from benchmarks import planning
from benchmarks.planning import Pair, measured


def test_a_small_pair_goes_through_search_and_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CHUNKS", (4,))
    monkeypatch.setattr(planning, "SCHEDULES", (("1f1b", 1),))

    def build() -> tuple[nn.Module, Sample]:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), Sample(torch.empty(64, 64))

    found = measured(Pair("small", build, "2xL4-24GB"))
    assert (found.configurations, found.devices) == (4, 2)
    assert found.above == pytest.approx(0.0, abs=planning.ABOVE)
    assert found.chosen == found.best
