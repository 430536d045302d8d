"""A model of which a part has values, or all of it, is recorded as one on meta, and is as before."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit import Sample
from autosplit.errors import TraceError
from autosplit.trace import ladder
from autosplit.trace.borrowed.blank import without_values
from autosplit.trace.graph import Length, NodeClass
from autosplit.trace.ladder import trace, widen
from tests.models.decoders import VOCABULARY
from tests.trace.placed_models import MODELS, MOVES, PLACES
from tests.trace.test_made_up import classes, full, on_meta, tokens
from tests.trace.test_row_mixing import APART, MIXING, ROWS, WIDTH, between


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


def test_a_recording_with_values_becomes_one_for_all_lengths_without_them() -> None:
    """What it makes on its own (an arange, ones of a fixed size) is where the model was: ranks hold parts by then."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            seen = x.new_ones((), dtype=torch.bool) & mask & (torch.arange(x.shape[1], device=x.device) < 7)
            return self.inner(x) * seen[..., None]

    model = Masked()
    first, second = ((torch.randn(5, size, 4), torch.rand(5, size) < 0.5) for size in (8, 12))
    base = trace(model, Sample(*first))
    with without_values(model):
        lengths = (Length("dim0", ((0, 1), (1, 1))),)
        wide = widen(model, base, Sample(*second), lengths=lengths, before=[tuple(t.shape) for t in first])
    assert wide is not None
    found = fx.Interpreter(wide.graph.root, graph=wide.graph.graph).run(5, 12, *second)
    assert torch.equal(found[0], model(*second))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what a process found that has a device of its own; see :mod:`tests.trace.card`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trace.card"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


class Typed(nn.Module):
    """Gives its result the dtype of its values, as the norms of Gemma do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)

    def forward(self, words: Tensor) -> Tensor:
        values = self.words(words)
        return (values.float() * 2.0).type_as(values)


def test_a_cast_to_the_type_of_another_value_is_of_each_row_on_meta() -> None:
    graph = trace(Typed().to("meta"), Sample(torch.zeros(4, 6, dtype=torch.long, device="meta"))).graph
    assert {info.node_class for _, info in graph.compute_nodes()} == {NodeClass.MICRO}


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_batch_may_lie_anywhere(found: dict[str, Any], name: str, places: str) -> None:
    assert found[f"{name}, {places}"] == found[f"{name}, cpu, cpu"]


@pytest.mark.slow
def test_a_stage_on_the_cpu_makes_its_tensors_there(found: dict[str, Any]) -> None:
    assert found["a stage on the CPU names the card"] is False


@pytest.mark.slow
def test_a_batch_elsewhere_does_not_keep_the_graph_from_being_held_against_the_model(found: dict[str, Any]) -> None:
    assert "does not reproduce the model" in found["hides, cpu, cpu"]
    assert found["hides, card, cpu"] == found["hides, cpu, cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["first on the card", "all on the card"])
def test_value_reads_are_asked_again_wherever_the_model_was_moved(found: dict[str, Any], place: str) -> None:
    assert found[f"held, {place}"] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("place", MOVES)
def test_a_recording_becomes_one_for_all_lengths_wherever_the_model_was_moved(
    found: dict[str, Any], place: str
) -> None:
    assert found[f"widened, {place}"] is True
