"""A plan for a model of which a node could not be measured for lack of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit, verify
from autosplit.options import Sample
from autosplit.profile import measured


def test_the_plan_is_made_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    once = measured._Timing._once

    def short(self: Any, node: Any, *, private: bool) -> Any:
        if node.target == "4":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return once(self, node, private=private)

    monkeypatch.setattr(measured._Timing, "_once", short)
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), torch.randn(8, 16)
    with pytest.warns(UserWarning, match="4#0: memory ran out on cpu while it was measured"):
        pipe = autosplit(model, ["cpu", "cpu"], 8, sample=x)
    assert pipe.plan.measured
    assert [len(stage.nodes) for stage in pipe.plan.stages] == [3, 3], "the modelled times are in the measured scale"
    [note] = [note for note in pipe.plan.notes if "modelled" in note]
    assert note.startswith("times of 2 operations are modelled (first: 4#0: memory ran out on cpu")
    assert verify(model, pipe, Sample(x))
