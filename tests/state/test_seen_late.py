"""State that is there only when the forward has run: modules that it imports first, slots that it fills first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit import autosplit
from tests.models.three_layers import WIDTH, Model, numbers

X = numbers(6, WIDTH, gradient=False)


class Unfilled:
    """Has nothing in its slots yet."""

    __slots__ = ("calls",)
    calls: int


UNFILLED = Unfilled()


def fills_a_slot(model: Any, x: Tensor) -> Tensor:
    UNFILLED.calls = getattr(UNFILLED, "calls", 0) + 1
    return model.c(torch.relu(model.a(x)))


def test_slots_that_a_forward_fills_are_as_before_a_plan() -> None:
    pipe = autosplit(Model(fills_a_slot), devices=["cpu"] * 2, chunks=2, sample=X)
    assert not hasattr(UNFILLED, "calls")
    for number in (1, 2, 3):
        pipe(X)
        assert UNFILLED.calls == number
    del UNFILLED.calls


def test_variables_of_a_module_that_a_forward_imports_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures have them from the call on that finds the module there."""
    (tmp_path / "imported_by_a_forward.py").write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def body(model: Any, x: Tensor) -> Tensor:
        import imported_by_a_forward  # type: ignore[import-not-found]

        return model.c(torch.relu(model.a(x))) * imported_by_a_forward.SCALE

    model = Model(body)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2)
    for scale in (1.0, 3.0, 1.0, 5.0):
        if "imported_by_a_forward" in sys.modules:
            monkeypatch.setattr("imported_by_a_forward.SCALE", scale)
        torch.testing.assert_close(pipe(X), model(X), rtol=1e-12, atol=1e-12)
    monkeypatch.delitem(sys.modules, "imported_by_a_forward")
