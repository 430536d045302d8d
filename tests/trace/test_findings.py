"""Findings of the value probe travel: an equal recording in another process is not probed again."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample
from autosplit.errors import TraceError
from autosplit.trace import ladder
from autosplit.trace.graph import Length
from autosplit.trace.ladder import trace, widen
from tests.trace.test_made_up import classes, full, on_meta
from tests.trace.test_row_mixing import APART, MIXING, ROWS, WIDTH, between


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be probed, and no recording be compared with its model."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TraceError("asked again")

    for name in ("run_probe", "run_probe_made_up", "check_recording"):
        monkeypatch.setattr(ladder, name, refuse)


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["later rows", "two flips"])
def test_findings_of_another_process_are_taken(name: str, place: str, request: pytest.FixtureRequest) -> None:
    model, sample = between((MIXING | APART)[name]), Sample(torch.randn(ROWS, WIDTH).double())
    first = trace(model, sample)
    request.getfixturevalue("unasked")
    with pytest.raises(TraceError, match="asked again"):
        trace(model, sample)
    findings = pickle.loads(pickle.dumps(first.findings))
    again = trace(on_meta(model) if place == "meta" else model, sample, made_up=True, findings=findings)
    assert (classes(again), again.findings, full(again) == set()) == (classes(first), findings, name in APART)


def test_made_up_values_find_the_same_at_another_length() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("table", torch.randn(40, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.table[: x.shape[1]] + x.flip(0)

    model = Positions()
    first, second = Sample(torch.randn(5, 8, 4)), Sample(torch.randn(5, 12, 4))
    options = {"lengths": (Length("dim0", ((0, 1),)),), "before": [(5, 8, 4)]}
    expected = widen(model, trace(model, first), second, **options)
    twin = on_meta(model)
    made_up = widen(twin, trace(twin, first, made_up=True), second, **options)
    assert expected is not None
    assert made_up is not None
    assert classes(made_up) == classes(expected)
    assert full(made_up)
    assert str(made_up.domain) == str(expected.domain)
