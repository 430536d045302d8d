"""Layers that share a weight are entered at once, as if the uses of the weight had been seen first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample
from autosplit.trace.gather import gather
from autosplit.trace.inputs import flatten

WIDTH = 8


class Tied(nn.Module):
    """An embedding and a head with one weight; the head is used or not, or its weight is used once more."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.embed, self.head = use, nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.other(self.embed(x))
        if self.use == "head":
            return self.head(hidden)
        if self.use == "weight":
            return hidden @ self.embed.weight.t()
        return self.other(hidden) if self.use == "twice" else hidden


@pytest.mark.parametrize("use", ["head", "weight", "nothing", "twice"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_layers_are_entered_as_if_their_uses_had_been_seen_first(
    use: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device(device):
        model = Tied(use)
    flat = flatten(model, Sample(torch.zeros(5, 3, dtype=torch.int64, device=device)))
    found = gather(model, flat)
    monkeypatch.setattr("autosplit.trace.gather.tied_layers", lambda *_: {})
    expected = gather(model, flat)
    assert repr(found.recording.calls) == repr(expected.recording.calls)
    assert found.scope == expected.scope
    assert bool(found.scope.entered) == (use != "nothing")
