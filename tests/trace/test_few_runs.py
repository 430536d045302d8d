"""How often a model's Python runs for a recording, and what these runs tell apart."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from autosplit import autosplit
from autosplit.errors import TraceError
from autosplit.options import Sample
from autosplit.profile.node_costs.fake import fake_mode
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.compared_runs import FixedDraws
from autosplit.trace.ladder import trace
from autosplit.trace.recording import gather
from autosplit.trace.recording.random_watch import RandomWatch
from autosplit.trace.shapes.shape_rules import ShapeRules, new_tensor
from tests.models.three_layers import WIDTH, Model
from tests.runtime.watching import default_dtype


class Tied(nn.Module):
    """The table is the head; with ``unused`` a third layer holds it that nobody calls."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight
        if unused:
            self.more = nn.Embedding(11, 4)
            self.more.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).tanh())


class UsedOnce(Tied):
    """Holds a parameter twice and uses it once."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).tanh()


class Rests(nn.Module):
    """Multiplies by the rest of the number of rows."""

    def __init__(self, modulus: int) -> None:
        super().__init__()
        self.layer, self.modulus = nn.Linear(4, 4), modulus

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + x.shape[0] % self.modulus)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows at which the model's Python ran."""
    found: list[int] = []
    plain = gather.run_python

    def run(*args: Any, rows: int, **kwargs: Any) -> Any:
        found.append(rows)
        return plain(*args, rows=rows, **kwargs)

    monkeypatch.setattr(gather, "run_python", run)
    return found


def test_a_leaf_whose_parameter_is_used_once_is_a_leaf(runs: list[int]) -> None:
    found = trace(UsedOnce(), Sample(torch.randint(0, 11, (16, 3))))
    assert runs == [16, 16, 1, 3]
    assert found.gathered.scope.entered == frozenset()
    assert next(node.op for node, _ in found.graph.compute_nodes()) == "call_module"


@pytest.mark.parametrize("rows", [7, 16])
def test_a_model_without_values_runs_on_two_rows_where_another_is_compared_there(rows: int, runs: list[int]) -> None:
    model = Model(lambda own, x: own.c(own.a(x))).to("meta")
    found = trace(model, Sample(torch.zeros(rows, WIDTH, dtype=torch.float64, device="meta")))
    assert runs == [rows, 1, 2]
    assert found.graph.min_rows == 1


STATES: dict[str, Callable[[Model], Any]] = {
    "plain": lambda model: None,
    "an observer": lambda model: model.a.register_forward_hook(lambda module, args, out: None),
    "an iterator": lambda model: setattr(model, "numbers", itertools.count()),
    "a log": lambda model: setattr(model, "log", []),
}


def logs(own: Any, x: Tensor) -> Tensor:
    if hasattr(own, "log"):
        own.log.append(x.shape[-1])
    return own.c(own.b(own.a(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", STATES)
def test_a_recording_walks_through_the_models_state_once(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, walks = Model(logs).to(device), list[int]()
    STATES[name](model)
    walk = Holders.__init__

    def count(holders: Holders, models: Any = (), *args: Any, **kwargs: Any) -> None:
        models = [*models]
        walks.extend(each is model for each in models)
        walk(holders, models, *args, **kwargs)

    monkeypatch.setattr(Holders, "__init__", count)
    trace(model, Sample(torch.zeros(8, WIDTH, dtype=torch.float64, device=device)))
    assert sum(walks) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("modulus", "rows"), [(m, rows) for rows in (6, 7, 10, 16, 64) for m in range(2, 10) if m <= rows]
)
def test_python_that_takes_a_rest_of_the_rows_is_refused(modulus: int, rows: int, device: str) -> None:
    with pytest.raises(TraceError, match="rows"):
        trace(Rests(modulus).to(device), Sample(torch.randn(rows, 4, device=device)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_python_that_does_other_things_on_two_rows_is_refused_without_values(rows: int) -> None:
    model = Model(lambda own, x: own.c(own.a(x) if x.shape[0] == 2 else own.b(x))).to("meta")
    with pytest.raises(TraceError, match="does other things at"):
        trace(model, Sample(torch.zeros(rows, WIDTH, dtype=torch.float64, device="meta")))


def test_the_collector_of_cycles_is_as_before() -> None:
    with pytest.raises(TraceError):
        trace(Rests(2), Sample(torch.randn(8, 4)))
    assert gc.isenabled()
    gc.disable()
    try:
        trace(UsedOnce(), Sample(torch.randint(0, 11, (4, 3))))
        assert not gc.isenabled()
    finally:
        gc.enable()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "normal": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "in place": lambda x: x * torch.empty_like(x).uniform_(1, 3) + torch.empty_like(x).normal_(1, 2),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.2)),
    "integers": lambda x: x + torch.randint_like(x, 2, 9),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "stochastic depth": lambda x: x * (0.8 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor() / 0.8,
    "choices": lambda x: x.gather(-1, x.softmax(-1).flatten(0, 1).multinomial(2).unflatten(0, x.shape[:2])),
    "lstm": lambda x: LSTM(x)[0],
}
LSTM = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True).double()


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_what_the_whole_draws(name: str) -> None:
    draw = DRAWS[name]
    whole = torch.randn(7, 4, 6, dtype=torch.float64, requires_grad=True)
    parts = whole.detach().clone().requires_grad_()
    with FixedDraws() as mode:
        expected = draw(whole)
        actual = torch.cat([draw(part) for part in parts.split([3, 2, 2])])
        expected.cos().sum().backward()
        actual.cos().sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert mode.unknown == set()


def test_what_it_cannot_replace_is_named() -> None:
    with FixedDraws() as mode:
        torch.distributions.Gamma(torch.tensor(1.0), torch.tensor(1.0)).sample()
    assert mode.unknown == {"_standard_gamma"}


ROWS = 8
COUNTERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "an addition": lambda own, taken: own.count.add_(torch.bincount(taken, minlength=WIDTH)),
    "a method": lambda own, taken: own.count.add_(taken.bincount(minlength=WIDTH)),
    "weights": lambda own, taken: own.count.add_(torch.bincount(taken, taken + 0.5, minlength=WIDTH)),
    "an average": lambda own, taken: own.count.copy_(0.9 * own.count + 0.1 * torch.bincount(taken, None, WIDTH)),
}


def counting(count: Callable[[Any, Tensor], Any]) -> Model:
    """A layer that counts which of its columns is the largest."""

    def body(own: Any, x: Tensor) -> Tensor:
        h = own.a(x)
        with torch.no_grad():
            count(own, h.argmax(1))
        return own.c(torch.tanh(own.b(h)))

    model = Model(body)
    model.register_buffer("count", torch.zeros(WIDTH).double())
    return model


@pytest.mark.parametrize("name", COUNTERS)
def test_counts_beside_a_layer_leave_it_in_microbatches(name: str) -> None:
    plain, pipe = counting(COUNTERS[name]), autosplit(counting(COUNTERS[name]), devices=["cpu"] * 2, chunks=4)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH).double()
        torch.testing.assert_close(pipe(x), plain(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    assert pipe.plan is not None
    assert pipe.plan.class_flops["micro"] == 1.0


def test_counts_beyond_the_recorded_number_are_refused_by_name() -> None:
    model = Model(lambda own, x, n: own.c(x) * torch.bincount(n, minlength=3).sum())
    pipe, x, n = autosplit(model, devices=["cpu"] * 2, chunks=4), torch.randn(ROWS, WIDTH).double(), torch.arange(ROWS)
    torch.testing.assert_close(pipe(x, n % 3), model(x, n % 3), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"bincount has 8 counts where minlength=3 was recorded"):
        pipe(x, n)
    longer = autosplit(model, devices=["cpu"] * 2, chunks=4)
    torch.testing.assert_close(longer(x, n), model(x, n), rtol=1e-12, atol=1e-12)


ON_META = torch.empty(4, 6, device="meta")
OTHERS = (ON_META, ON_META.double(), ON_META.half(), ON_META.int(), ON_META.t(), ON_META[0], ON_META[:1].expand(4, 6))
ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: (x + 1, x + 1.5, x + True, x * 2),
    "another": lambda x: (
        x + torch.ones(x.shape[-1], device="meta"),
        x + torch.ones((), device="meta", dtype=torch.float64),
    ),
    "pointwise": lambda x: (x.float().exp(), x.float().rsqrt(), F.silu(x.float()), x.neg()),
    "reductions": lambda x: (x.sum(0), x.sum(0, keepdim=True), x.sum(-1), x.float().mean(-1), x.double().var(0)),
    "two results": lambda x: (*x.max(0), *x.max(-1), *x.sort()),
    "a norm": lambda x: F.layer_norm(x.float(), (x.shape[-1],)),
    "joined": lambda x: (torch.cat([x, x]), torch.cat([x, x, x], -1), torch.stack([x, x])),
    "itself": lambda x: (x.type_as(x), x.contiguous(), x.to(x.dtype), F.dropout(x.float(), 0.5, training=False)),
    "copies": lambda x: (x.clone(), x.clone(memory_format=torch.contiguous_format), x.to(torch.float64)),
    "new ones": lambda x: (torch.ones(3, device="meta"), torch.zeros_like(x), x.new_empty(2), torch.arange(3.0)),
    "in place": lambda x: (y := x.clone(), y.add_(1), y.t()),
    "complex": lambda x: torch.view_as_real(torch.complex(x.float(), x.float()).conj() * 2),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_operations_alike_give_alike_results_without_values(name: str, inference: bool) -> None:
    """Whether an operation is asked the first time or again: dtypes, strides, and what shares memory with what."""

    def told() -> list[Any]:
        results = [(x, *tree_leaves(ALIKE[name](x))) for x in OTHERS]
        shared = [
            [first.untyped_storage()._cdata == y.untyped_storage()._cdata for y in rest] for first, *rest in results
        ]
        return [[(t.shape, t.stride(), t.dtype, t.device) for t in every] for every in results] + shared

    with torch.inference_mode(inference), RandomWatch():
        first, again = told(), told()
        with default_dtype(torch.float64):
            doubled = told()
    with torch.inference_mode(inference):
        assert first == again == told()
        with default_dtype(torch.float64):
            assert doubled == told()


GROUPED_MM, HISTC = torch.ops.aten._grouped_mm.default, torch.ops.aten.histc.default


def told(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what an operation gives by the rule, and check that meta and fake tensors follow it."""
    new = new_tensor(func, args, kwargs)
    assert new is not None
    meta = ShapeRules().run(func, *tree_map_only(torch.Tensor, lambda own: own.to("meta"), (args, kwargs)))
    mode = fake_mode()
    with mode:
        fake = Ledger(kernels="cpu").run(func, *tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs)))
    for made in (meta, fake):
        assert (tuple(made.shape), made.dtype) == new
        assert made.is_contiguous()
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("one", "other", "end"),
    [((8, 16), (2, 16, 32), 8), ((2, 8, 16), (16, 32), 32), ((8, 16), (16, 32), 16), ((2, 8, 16), (2, 16, 32), None)],
)
def test_grouped_products(one: tuple[int, ...], other: tuple[int, ...], end: int | None, dtype: torch.dtype) -> None:
    """They are those of the CPU's kernel."""
    left, right = torch.zeros(one, dtype=dtype), torch.zeros(other, dtype=dtype)
    kwargs = {} if end is None else {"offs": torch.tensor([4, end], dtype=torch.int32)}
    made = torch._grouped_mm(left, right, **kwargs)
    assert told(GROUPED_MM, [left, right], kwargs) == (tuple(made.shape), made.dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_histograms_of_integers(dtype: torch.dtype) -> None:
    assert told(HISTC, [torch.zeros(8, dtype=dtype)], {"bins": 4, "min": 0, "max": 3}) == ((4,), dtype)
