"""A model of which a part has values, or all of it, is recorded as one on meta, and is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit import Sample
from autosplit.trace.borrowed.blank import without_values
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.models.decoders import VOCABULARY
from tests.trace.test_made_up import classes, on_meta, tokens


class Part(nn.Module):
    """Ties, buffers, statistics, an LSTM with its list of weights, a table that is an attribute as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.lstm, self.norm = nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)
        self.register_buffer("angles", torch.arange(9.0), persistent=False)
        self.alias = [self.words.weight]
        self.calls = 0

    def forward(self, words: Tensor) -> Tensor:
        value = F.embedding(words, self.alias[0]) + self.angles[: words.shape[1], None]
        value = self.norm(self.lstm(value)[0].transpose(1, 2)).transpose(1, 2)
        return self.head(value) + value.new_zeros(9, 1)


def held(model: nn.Module) -> list[Any]:
    """Return the objects that a model's modules hold, in order."""
    modules = [vars(module) for module in model.modules()]
    found = [value for own in modules for value in own.values()]
    return found + [part for value in found for part in (value.values() if isinstance(value, dict) else ())]


@pytest.mark.parametrize("part", ["words", "lstm", "norm", "angles", "all"])
def test_a_model_with_some_values_is_recorded_as_one_without(part: str) -> None:
    model = Part()
    expected = trace(on_meta(model), Sample(tokens()), made_up=True)
    if part != "all":
        model = on_meta(model)
        if part == "angles":
            model.angles = torch.arange(9.0)
        else:
            getattr(model, part).to_empty(device="cpu")
            model.head.weight = model.alias[0] = model.words.weight
    before, weights = held(model), list(model.lstm._flat_weights)
    with without_values(model):
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers(), *model.lstm._flat_weights, *model.alias))
        found = trace(model, Sample(tokens()), made_up=True)
    assert classes(found) == classes(expected)
    assert found.graph.graph.python_code("root").src == expected.graph.graph.python_code("root").src
    assert found.graph.tied == expected.graph.tied
    assert all(a is b for a, b in zip(held(model), before, strict=True))
    assert all(a is b for a, b in zip(model.lstm._flat_weights, weights, strict=True))
    assert found.graph.root.get_buffer("angles") is model.angles


def test_a_graph_that_was_recorded_without_values_runs_on_those_that_come() -> None:
    model = Part().eval()
    twin = on_meta(model)
    found = trace(twin, Sample(tokens()), made_up=True)
    twin.to_empty(device="cpu")
    twin.head.weight = twin.alias[0] = twin.words.weight
    twin.load_state_dict(model.state_dict())
    twin.angles.copy_(model.angles)
    for rows in (6, 2):
        assert torch.equal(
            fx.Interpreter(found.graph.root, graph=found.graph.graph).run(rows, tokens(rows))[0], model(tokens(rows))
        )


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_structure_alone_tells_what_attention_mixes(batch_first: bool) -> None:
    """A part that is picked out of a call's results is not indexed: on meta all runs per microbatch, as with values."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    sample = torch.randn(8, 6, 16)
    found = [
        classes(trace(own, Sample(value), batch_dims=0 if batch_first else 1))
        for own, value in ((model, sample), (on_meta(model), sample.to("meta")))
    ]
    assert found[0] == found[1]
    assert set(found[1].values()) == {NodeClass.MICRO}
