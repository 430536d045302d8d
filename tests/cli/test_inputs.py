"""``--input``, ``--kwargs`` and ``--batch-dims``: their text forms, their values, and how a forward takes them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autosplit.cli.inputs import (
    DTYPES,
    InputSpec,
    TensorForm,
    parse_batch_dims,
)
from autosplit.cli.models import build_sample, random_tensor
from autosplit.errors import InputError

INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]


class Net(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return x


class Nested(nn.Module):
    def forward(self, batch: Any, pair: Any = None, *, flag: bool = True) -> Any:
        return batch


def parse(*texts: str) -> list[InputSpec]:
    return [InputSpec.parse(text) for text in texts]


@st.composite
def forms(draw: st.DrawFn) -> TensorForm:
    dtype = draw(st.sampled_from(DTYPES))
    limit = draw(st.one_of(st.none(), st.integers(1, 127))) if dtype in INTEGERS else None
    return TensorForm(dtype, tuple(draw(st.lists(st.integers(0, 5), max_size=4))), limit)


texts = st.text(alphabet=' x.0[]="世', max_size=5)
places = st.from_regex(r"[a-z][a-z0-9_]{0,4}(\.[a-z]{1,3}|\.[0-9]|\[[0-9]\]|\['[a-z ]{1,3}'\]){0,3}", fullmatch=True)
constants = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False), texts
)


@given(spec=st.builds(InputSpec, places, st.one_of(forms(), constants)))
def test_the_text_form_round_trips(spec: InputSpec) -> None:
    assert InputSpec.parse(str(spec)) == spec


@given(spec=forms())
def test_values_have_the_shape_and_dtype_and_stay_below_the_limit(spec: TensorForm) -> None:
    value = random_tensor(spec, generator=torch.Generator().manual_seed(0))
    assert value.shape == spec.shape
    assert value.dtype == getattr(torch, spec.dtype)
    if spec.dtype in INTEGERS and value.numel():
        assert value.min() >= 0
        assert value.max() < (spec.limit or 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("None", None), ("null", None), ("-3", -3), (".5", 0.5), ("1.", 1.0),
        ("1e-5", 1e-5), ("'relu'", "relu"), ('"it\'s"', "it's"), ("''", ""),
    ],
)  # fmt: skip
def test_constants(text: str, value: Any) -> None:
    found = InputSpec.parse(f"x={text}").value
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "does not begin with a place and ="),
        ("=float32[8]", "does not begin with a place and ="),
        ("x y=float32[1]", "does not begin with a place and ="),
        ("x.=int8[1]", "does not begin with a place and ="),
        ("x[y]=int8[1]", "does not begin with a place and ="),
        ("x=", "'' is neither dtype[shape] nor a constant"),
        ("x=float32", "'float32' is neither dtype[shape] nor a constant"),
        ("x=float32[8]]", "'float32[8]]' is neither"),
        ("x=[1, 2]", "'[1, 2]' is neither"),
        ("x=float32[8,]", "[8,] is no list of sizes"),
        ("x=float32[8 3]", "[8 3] is no list of sizes"),
        ("x=float[8]", "'float' is no dtype here; valid: float32, float64"),
        ("x=int64[8]<0", "the limit of int64 is between 1 and 9223372036854775807"),
        ("x=int8[8]<300", "the limit of int8 is between 1 and 128"),
        ("x=float32[8]<5", "<5 is no limit for it: float32 takes none"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_way_out(text: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        InputSpec.parse(text)
    assert str(caught.value).startswith(f"--input {text!r} ")
    assert reason in str(caught.value)
    assert "write NAME=dtype[shape], for example x=float32[8,3,32,32]" in str(caught.value)


@given(text=st.text(alphabet=" x=0[],<float32int64\x1b\n世.'\"-+true", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        spec = InputSpec.parse(text)
        assert InputSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("given_here", "message"),
    [
        (["y=float32[4]"], r"Net\.forward\(x: .*\) -> .* cannot be called with these inputs: missing .* 'x'"),
        (["x=float32[4]", "y=float32[4]"], r"got an unexpected keyword argument 'y'; give one --input for each"),
        (["x=float32[4]", "x=float32[5]"], r"--input x is given twice, or whole and in parts; give every input once"),
        (["1=float32[4]"], r"--input positions are \[1\]; number them from 0 without gaps"),
        (["0=float32[4]", "x=float32[4]"], r"cannot be called with these inputs: multiple values for argument 'x'"),
    ],
)
def test_inputs_that_the_forward_does_not_take(given_here: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_sample(parse(*given_here), model=Net(), seed=0)


def test_places_make_dicts_lists_and_tuples() -> None:
    given_here = ("batch.x=float32[4,2]", "batch['a b'].0=bool[4]", "pair[1]=int64[4]", "pair[0].n=2", "flag=false")
    sample = build_sample(parse(*given_here), model=Nested(), seed=0)
    batch, pair = sample.kwargs["batch"], sample.kwargs["pair"]
    assert (list(batch), batch["x"].shape, type(batch["a b"]), len(batch["a b"])) == (["x", "a b"], (4, 2), tuple, 1)
    assert (type(pair), pair[0], pair[1].dtype) == (list, {"n": 2}, torch.int64)
    assert sample.kwargs["flag"] is False
    assert list(sample.kwargs) == ["batch", "pair", "flag"]
    sample = build_sample(parse("1[0]=float32[4]", "0.x=float32[4]"), model=Nested(), seed=0)
    assert [type(value) for value in sample.args] == [dict, list]


def test_batch_dims_are_json() -> None:
    assert [parse_batch_dims(text) for text in (None, "1", "[0, null]", '{"x": 1}')] == [None, 1, (0, None), {"x": 1}]
    with pytest.raises(InputError, match=r"--batch-dims 'x=1' is no JSON: .*; write a number, a JSON list such as"):
        parse_batch_dims("x=1")
