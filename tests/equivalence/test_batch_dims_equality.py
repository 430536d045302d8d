"""The batch is the first dimension or what `batch_dims` says; one that is assumed wrongly costs time, never numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import InputError, autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, numbers
from tests.pairwise import mostly_slow

LIGHT = 0.2
pytestmark = pytest.mark.filterwarnings("ignore:2 devices were given")


def pipe_of(plain: nn.Module, **options: Any) -> Any:
    return autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, **options)


def check(plain: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Compare a pipe with the plain model, and return it."""
    pipe = pipe_of(plain, **options)
    batch = Batch(inputs)
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    return pipe


def dims_of(pipe: Any) -> tuple[int | None, ...]:
    recorded = next(reversed(pipe._core.recordings.kept.values()))[0]
    return tuple(info.batch_dim for info in recorded.traced.inputs)


class Recurrent(nn.Module):
    """An LSTM whose states are inputs and outputs."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 5, 2, batch_first=batch_first)
        self.last = nn.Linear(5, WIDTH)
        self.double()

    def forward(self, value: Tensor, states: tuple[Tensor, Tensor]) -> Any:
        output, states = self.lstm(torch.tanh(self.first(value)), states)
        return self.last(output), states


class States(nn.Module):
    """The same with the two states as inputs of their own."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.inner = Recurrent(batch_first=batch_first)

    def forward(self, value: Tensor, hidden: Tensor, cell: Tensor) -> Any:
        return self.inner(value, (hidden, cell))


@pytest.mark.parametrize("batch_first", mostly_slow([True, False], False))
def test_states_of_an_lstm_have_the_batch_in_their_second_dimension(batch_first: bool) -> None:
    shape = (7, 4, WIDTH) if batch_first else (4, 7, WIDTH)
    dims = (0 if batch_first else 1, 1, 1)
    model = States(batch_first=batch_first).double()
    pipe = check(model, numbers(*shape), numbers(2, 7, 5), numbers(2, 7, 5, seed=1), batch_dims=dims)
    assert dims_of(pipe) == dims
    assert pipe.plan.class_flops["full"] == 0.0
    other = (9, 4, WIDTH) if batch_first else (4, 9, WIDTH)
    plain = pipe.unsplit()
    batch = Batch((numbers(*other), numbers(2, 9, 5), numbers(2, 9, 5, seed=1)))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()


def test_a_time_major_encoder_is_cut_along_its_rows() -> None:
    plain = encoder()
    pipe = check(plain, numbers(5, 7, WIDTH), batch_dims=1)
    assert dims_of(pipe) == (1,)
    assert pipe.plan.class_flops["full"] == 0.0
    for length, rows in ((4, 7), (5, 9)):
        batch = Batch((numbers(length, rows, WIDTH),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
        assert dims_of(pipe) == (1,)


class TimeMajor(nn.Module):
    """An LSTM over the first dimension, a Transformer whose two inputs differ in it, or two states beside the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        match kind:
            case "encoder":
                self.body: nn.Module = encoder()
            case "transformer":
                self.body = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0)
            case _:
                self.body = nn.LSTM(WIDTH, WIDTH, 2, batch_first=kind == "states")
        self.last = nn.Linear(WIDTH, 5)
        self.double()

    def forward(self, value: Tensor, *others: Tensor) -> Tensor:
        output = self.body(value, others) if self.kind == "states" else self.body(value, *others)
        return self.last(output if isinstance(output, Tensor) else output[0])


OTHERS: dict[str, tuple[Tensor, ...]] = {
    "encoder": (),
    "lstm": (),
    "transformer": (numbers(4, 7, WIDTH),),
    "states": (numbers(2, 5, WIDTH), numbers(2, 5, WIDTH, seed=1)),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_batch_that_is_not_first_is_the_plain_model_and_a_warning_without_batch_dims(kind: str) -> None:
    with pytest.warns(UserWarning, match="has collapsed: .*batch_dims="):
        check(TimeMajor(kind), numbers(5, 7, WIDTH), *OTHERS[kind])


def test_a_target_of_other_rows_names_batch_dims() -> None:
    pipe = pipe_of(TimeMajor("lstm"))
    with (
        pytest.warns(UserWarning, match="has collapsed"),
        pytest.raises(InputError, match=r"the target has shape \[7, 5\], the batch 4 rows.* batch_dims="),
    ):
        pipe.train_step(
            numbers(4, 7, WIDTH), target=numbers(7, 5), loss_fn=lambda output, t: (output[-1] - t).square().mean()
        )


SQUARE = numbers(WIDTH, WIDTH)
TABLES: dict[str, tuple[Any, tuple[Tensor, ...], tuple[int | None, ...]]] = {
    "a bias": (lambda m, x, w: m.b(torch.tanh(m.a(x) + w)), (SQUARE, numbers(WIDTH, seed=1)), (0, None)),
    "a bias of 8": (lambda m, x, w: m.b(torch.tanh(m.a(x)[:, :1] + w)[:, :6]), (numbers(8, 6), numbers(8)), (0, None)),
    "a scale per row": (lambda m, x, w: m.b(m.a(x) * w[:, None]), (SQUARE, numbers(WIDTH, seed=1)), (0, 0)),
    "a table": (
        lambda m, x, w: m.b(F.embedding(x, w)),
        (torch.arange(8).flip(0).reshape(8, 1) % 7, numbers(8, WIDTH)),
        (0, None),
    ),
    "a mask over positions": (
        lambda m, x, k: m.b(F.scaled_dot_product_attention(m.a(x), x, m.c(x), attn_mask=k)),
        (numbers(4, 4, WIDTH), torch.ones(4, 4, dtype=torch.bool).tril()),
        (0, None),
    ),
    "a mask per row": (
        lambda m, x, k: m.b(F.scaled_dot_product_attention(m.a(x), x, m.c(x), attn_mask=k[:, None])),
        (numbers(4, 4, WIDTH), torch.ones(4, 4, dtype=torch.bool).tril()),
        (0, 0),
    ),
    "class weights": (
        lambda m, x, t, w: F.cross_entropy(m.b(torch.tanh(m.a(x))), t, weight=w),
        (SQUARE, torch.arange(WIDTH) % 5, torch.rand(WIDTH, dtype=torch.float64)),
        (0, 0, None),
    ),
    "a vector that is only averaged": (
        lambda m, x, w: m.b(torch.tanh(m.a(x)) * w.mean()),
        (numbers(8, WIDTH), numbers(8, seed=1)),
        (0, None),
    ),
    "weights of a layer": (
        lambda m, x, w: m.b(torch.tanh(m.a(x)) @ w.T),
        (SQUARE, numbers(WIDTH, WIDTH, seed=1)),
        (0, None),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_has_the_size_of_the_batch_is_cut_only_where_it_has_rows(name: str) -> None:
    body, inputs, dims = TABLES[name]
    pipe = check(Model(body), *inputs, batch_dims=dims)
    assert dims_of(pipe) == dims
    assert pipe.plan.class_flops["full"] < LIGHT
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check(Model(body), *inputs)
    said = [str(each.message) for each in seen if "has collapsed" in str(each.message)]
    assert all("batch_dims=" in each for each in said)
    assert bool(said) == (None in dims)


OTHER_SIZES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "scores between two sets": (lambda m, x, y: torch.tanh(m.a(x)) @ m.b(y).T, (numbers(8, WIDTH), numbers(4, WIDTH))),
    "a table added to tokens": (lambda m, x, w: m.b(torch.tanh(m.a(x + w))), (numbers(8, 4, WIDTH), numbers(4, WIDTH))),
    "a row for all": (lambda m, w, x: m.b(torch.tanh(m.a(x + w))), (numbers(1, WIDTH), numbers(4, WIDTH))),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_the_first_input_has_the_batch_and_what_has_another_size_is_whole(name: str) -> None:
    body, inputs = OTHER_SIZES[name]
    pipe = check(Model(body), *inputs)
    assert dims_of(pipe) == tuple(0 if len(value) == max(map(len, inputs)) else None for value in inputs)
    assert pipe.plan.class_flops["full"] == 0.0


BAD_DIMS: dict[str, tuple[Any, str]] = {
    "a name that is no input": ({"nothing": 0}, r"batch_dims names nothing; the inputs are value, states"),
    "too many entries": ((0, 1, 1), "batch_dims has 3 entries for 2 positional inputs"),
    "no such dimension": ((0, (1, 3)), r"batch_dims says 3 for input 'states_1' of shape \[2, 7, 5\]"),
    "other sizes": ((1, 1), "batch_dims= names dimensions of different sizes"),
    "another type": ("0", "give an int, a tuple"),
}


@pytest.mark.parametrize("name", BAD_DIMS)
def test_batch_dims_that_do_not_fit(name: str) -> None:
    told, message = BAD_DIMS[name]
    with pytest.raises(InputError, match=message):
        pipe_of(Recurrent(batch_first=True), batch_dims=told)(numbers(7, 4, WIDTH), (numbers(2, 7, 5),) * 2)


OUTPUTS: dict[str, Any] = {
    "rows x rows": lambda m, x: m.a(x) @ m.b(x).T,
    "a constant size": lambda m, x: m.b(m.a(x))[:3],
    "one row less": lambda m, x: m.b(m.a(x))[1:],
    "an input": lambda m, x: (x, m.a(x)),
    "an input twice, and a number": lambda m, x: {"x": x, "again": x, "value": m.a(x), "count": 3, "none": None},
    "rows in the second dimension": lambda m, x: m.a(x).T,
    "two values per row": lambda m, x: m.a(x).reshape(-1, 3),
    "rows behind a constant": lambda m, x: torch.stack([m.a(x), m.b(x)]).flatten(0, 1),
    "a parameter": lambda m, x: (m.a.weight, m.b(x)),
    "a value per batch and one per row": lambda m, x: (m.a(x).sum(), m.b(x).sum(1), m.c.weight.sum()),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("rows", [WIDTH, 7])
def test_an_output_is_put_together_as_the_plain_models(name: str, rows: int) -> None:
    check(Model(OUTPUTS[name]), numbers(rows, WIDTH))
