"""The value probe of a model on meta, on values that are made up node by node."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import Sample
from autosplit.errors import TraceError
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.trace import ladder
from autosplit.trace.borrowed.blank import blank, without_values
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.inputs.objects import mapped
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.rows import probe
from autosplit.trace.rows.findings import Findings
from autosplit.trace.rows.made_up import MadeUp
from tests.models import named
from tests.models.decoders import VOCABULARY, Decoder
from tests.models.three_layers import Model
from tests.pairwise import in_turn, mostly_slow
from tests.trace.test_row_mixing import APART, MIXING, ROWS, WIDTH, between


def on_meta(value: Any) -> Any:
    """Return a model or a sample of the same structure on meta."""
    if isinstance(value, Sample):
        args, kwargs = mapped(lambda x: blank(x) if isinstance(x, Tensor) else x, (value.args, value.kwargs))
        return Sample(*args, **kwargs)
    twin = copy.deepcopy(value)
    with without_values(twin):
        return copy.deepcopy(twin)


def classes(found: Trace) -> dict[str, NodeClass]:
    infos = [node.meta[INFO] for node in found.graph.graph.nodes if INFO in node.meta]
    return {info.name: info.node_class for info in infos}


def full(found: Trace) -> set[str]:
    return {name for name, kind in classes(found).items() if kind is NodeClass.FULL}


def assert_alike(model: nn.Module, sample: Sample, *, real: bool = False, **options: Any) -> Trace:
    """Assert that a model on meta is recorded as with values, by a sample on meta, and a real one; return that."""
    expected = trace(model, sample, **options)
    twin = on_meta(model)
    for given in (sample, on_meta(sample)) if real else (on_meta(sample),):
        found = trace(twin, given, made_up=True, **options)
        assert found.findings.probed
        assert classes(found) == classes(expected)
        assert found.graph.min_rows == expected.graph.min_rows
        assert found.graph.graph.python_code("root").src == expected.graph.graph.python_code("root").src
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    return expected


def tokens(rows: int = 6, length: int = 9, words: int = VOCABULARY) -> Tensor:
    return torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Convolutions and batch norms as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, stride=2)
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)
        )
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.norm(self.block(x) + self.down(x)).relu().mean((2, 3)))


def encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)


class Recurrent(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 8, layers, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.lstm(self.words(words))[0][:, -1]


MASK = (torch.arange(9) < torch.tensor([9, 5, 9, 2, 7, 9])[:, None]).long()
MODELS: dict[str, tuple[Callable[[], nn.Module], Sample, dict[str, Any]]] = {
    "decoder with its loss": (Decoder, Sample(tokens(), tokens()), {}),
    "mixture": (lambda: Decoder(experts="qwen3_moe"), Sample(tokens(), tokens()), {}),
    "mixture with padding": (lambda: Decoder(experts="mixtral"), Sample(tokens(), tokens(), MASK), {}),
    "encoder": (
        lambda: encoder(batch_first=True),
        Sample(torch.randn(6, 9, 16), src_key_padding_mask=MASK == 0),
        {},
    ),
    "time-major encoder": (lambda: encoder(batch_first=False), Sample(torch.randn(9, 6, 16)), {"batch_dims": 1}),
    "encoder over the batch": (lambda: encoder(batch_first=False), Sample(torch.randn(6, 9, 16)), {}),
    "residual convolutions": (Residual, Sample(torch.randn(5, 3, 8, 8)), {}),
    "norms of the whole batch": (Residual, Sample(torch.randn(5, 3, 8, 8)), {"whole_norms": True}),
    "recurrent": (lambda: Recurrent(1), Sample(tokens()), {}),
    "stacked recurrent": (lambda: Recurrent(2), Sample(tokens()), {}),
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, "mixture", "encoder over the batch", "residual convolutions"))
def test_models_are_recorded_as_with_values(name: str) -> None:
    make, sample, options = MODELS[name]
    torch.manual_seed(0)
    expected = assert_alike(make(), sample, real="mixture" not in name, **options)
    whole = {"mixture", "mixture with padding", "encoder over the batch", "norms of the whole batch"}
    assert bool(len(full(expected)) > 1) is (name in whole)


FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}),
    "LlamaForCausalLM": ("LlamaConfig", {"num_key_value_heads": 1}),
    "BertForMaskedLM": ("BertConfig", {}),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {"num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True},
    ),
}


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "LlamaForCausalLM"))
def test_models_of_transformers_are_recorded_as_with_values(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, more = FAMILIES[name]
    made = getattr(transformers, config)(vocab_size=VOCABULARY, **(more if "n_embd" in more else sizes | more))
    expected = assert_alike(getattr(transformers, name)(made), Sample(input_ids=tokens(), labels=tokens()))
    assert bool(len(full(expected)) > 1) is (name == "MixtralForCausalLM")


@in_turn(share=(0, 4), name=list(named.CASES))
def test_unusual_structures_are_recorded_as_with_values(name: str) -> None:
    case = named.CASES[name]
    batch = case.batch(6)
    assert_alike(case.build(), Sample(*batch.args, **batch.kwargs))


UNSEEN = (
    "triu along the batch",
    "tril in place",
    "an index from a table",
    "clamped places",
    "masked_scatter",
    "index_add",
    "scatter",
)
"""What mixes rows, and does not by its structure alone."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_mixes_rows_is_seen_without_values(name: str) -> None:
    model, sample = between(MIXING[name]), Sample(torch.randn(ROWS, WIDTH).double())
    assert full(assert_alike(model, sample))
    assert not full(trace(on_meta(model), on_meta(sample)))


@pytest.mark.parametrize("name", ["faint mean", "a table by places", "where", "later rows", "a choice of rows", *APART])
def test_rows_are_told_apart_as_with_values(name: str) -> None:
    expected = assert_alike(between((MIXING | APART)[name]), Sample(torch.randn(ROWS, WIDTH).double()))
    assert bool(full(expected)) is (name in MIXING)


# -- what may be made up -------------------------------------------------------------------------------------------
class Choosy(nn.Module):
    """Takes words, types of which there are two, a mask by numbers, lengths, and a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(7, 8), nn.Embedding(2, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("places", torch.arange(9)[None], persistent=False)
        self.positions = nn.Embedding(9, 8)

    def forward(self, words: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        value = self.words(words) + self.types(types) + self.positions(self.places[:, : words.shape[1]])
        scores = value @ value.mT + (1.0 - mask[:, None].to(value.dtype)) * torch.finfo(value.dtype).min
        return self.linear(scores.softmax(-1) @ value).roll(1, 0)


def test_indices_and_masks_are_valid_ones() -> None:
    sample = Sample(tokens(words=7), types=tokens(words=2), mask=MASK)
    assert full(assert_alike(Choosy(), sample, real=True))


class Lengths(nn.Module):
    """Attends to the first one or two entries of a row; a row of another length has none, and gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.arange(value.shape[1]) >= lengths.where(lengths < 3, 0)[:, None, None]
        scores = (value @ value.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        last = self.linear(scores @ value)
        return last + 1e-3 * torch.ops.aten._safe_softmax.default(last, 0)


def test_values_that_give_nan_are_made_up_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(torch.randn(6, 5, 8), torch.tensor([1, 2, 2, 1, 1, 2]))
    assert full(assert_alike(Lengths(), sample))
    ways, ask = [], probe.run_probe

    def asked(*args: Any, values: MadeUp, **kwargs: Any) -> Findings:
        seen = ask(*args, values=values, **kwargs)
        ways.append((values.fill.integers, values.hides))
        return seen

    monkeypatch.setattr(probe, "run_probe", asked)
    trace(on_meta(Lengths()), on_meta(sample), made_up=True)
    assert ways == [((0, 6), True), ((0, 1), True), ((1, 2), False)]


@pytest.mark.parametrize("read", ["item", "branch"])
def test_reads_of_values_are_refused(read: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        value = m.a(x)
        return m.b(value * value.sum().item() if read == "item" else value if value.sum() > 0 else -value)

    model, sample = on_meta(Model(forward)), Sample(torch.randn(ROWS, WIDTH).double())
    errors = []
    for options in ({}, {"made_up": True}):
        with pytest.raises(TraceError, match="reads a tensor's value, and a model on the meta device has none") as info:
            trace(model, sample, **options)
        errors.append(str(info.value))
    assert errors[0] == errors[1]


def test_what_real_inputs_decide_is_read_from_them() -> None:
    model = on_meta(Model(lambda m, x, mask: m.a(x) if mask.all() else m.b(x)))
    x = torch.randn(ROWS, WIDTH).double()
    for mask in (torch.ones(ROWS).bool(), torch.arange(ROWS) > 2):
        found = trace(model, Sample(x, mask), made_up=True)
        assert ("a#0" in classes(found)) is bool(mask.all())
        assert found.guard is not None
        assert found.guard.holds([x, mask], ROWS)


# -- one module at a time ------------------------------------------------------------------------------------------
class Flat(nn.Module):
    """Weights that are used by themselves, and by way of what is computed of them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = (F.linear(x, weight) if number % 2 else x @ (weight.T * 0.5)).tanh()
        return x


@pytest.mark.parametrize(("kind", "most"), [("layers", 1.3), ("weights", 5.1)])
def test_one_module_has_values_at_a_time(kind: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, ask = Ledger(listing=False), ladder.run_probe_made_up

    def asked(*args: Any, **kwargs: Any) -> Findings:
        with ledger:
            return ask(*args, **kwargs)

    monkeypatch.setattr(ladder, "run_probe_made_up", asked)
    layers, width = 12, 1024
    one = 4 * width * width
    with torch.device("meta"):
        model = Flat(layers, width)
        if kind == "layers":
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        sample = Sample(torch.empty(8, width))
    assert trace(model, sample, made_up=True).findings.probed
    assert one < ledger.peak_bytes < most * one  # half a weight is a value of its own in each of three runs
    assert ledger.live_bytes < one / 100


def test_nothing_stays_of_an_error() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.linalg.cholesky(self.layer(x).unflatten(1, (1, 1, -1))[..., :1] * 0 - 1))

    model = on_meta(Failing())
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(TraceError):
        trace(model, Sample(torch.randn(ROWS, WIDTH)), made_up=True)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before


@pytest.mark.parametrize("words", [9, 2], ids=["first", "second"])
def test_a_probe_leaves_no_values_for_the_garbage_collector(words: int) -> None:
    """The first way to make integers up gives words that a table of two lacks, so the second one is taken."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, 4))
        sample = Sample(torch.zeros(8, 5, dtype=torch.long))
    trace(model, sample, made_up=True)
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in gc.get_objects() if type(each) is Tensor}
        found = trace(model, sample, made_up=True)
        new = [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in before]
        assert found.findings.probed
        assert not [tuple(each.shape) for each in new if not each.is_meta]
    finally:
        gc.enable()


class Same(torch.autograd.Function):
    """Gives the first of some tensors back; raises where another one has other values."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        if type(values[0]) is Tensor and not all(torch.equal(value, values[0]) for value in values):
            raise ValueError("other values")
        return values[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, torch.zeros_like(gradient), torch.zeros_like(gradient)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tensor_has_equal_values_wherever_it_is_used(tied: bool) -> None:
    model = Model(lambda m, x: Same.apply(m.a(x), m.b(x), F.linear(x, m.a.weight, m.a.bias)))
    if tied:
        model.b.weight, model.b.bias = model.a.weight, model.a.bias
        assert trace(on_meta(model), Sample(torch.randn(ROWS, WIDTH).double()), made_up=True).findings.probed
    else:
        with pytest.raises(TraceError, match="ValueError: other values"):
            trace(on_meta(model), Sample(torch.randn(ROWS, WIDTH).double()), made_up=True)
