"""What is known of a recording's problem from one size of microbatch holds for any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.options import Options
from autosplit.planning import sweep
from autosplit.planning.formulate import Formulation, formulate
from autosplit.planning.outline import Outline
from autosplit.profile.types import Profile
from autosplit.trace.graph import TracedGraph


class Net(nn.Module):
    """Has shared nodes, a tied weight and a node that mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        scale = self.table.weight.sum()
        found = self.middle(self.table(tokens)) * scale
        return nn.functional.linear(found, self.table.weight) - found.mean()


def test_problems_of_further_sizes_are_those_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outlines, sizes = list[Outline](), set[int]()

    def both(
        traced: TracedGraph, costs: Profile, options: Options, *, microbatches: int, outline: Outline
    ) -> Formulation:
        outlines.append(outline)
        sizes.add(microbatches)
        found = formulate(traced, costs, options, microbatches=microbatches, outline=outline)
        assert found == formulate(traced, costs, options, microbatches=microbatches)
        return found

    monkeypatch.setattr(sweep, "formulate", both)
    with torch.device("meta"):
        model = Net()
    autosplit.plan(model, "2xL4-24GB", sample=torch.empty((8, 6), dtype=torch.int64, device="meta"))
    assert len(sizes) > 1
    assert all(outline is outlines[0] for outline in outlines)
