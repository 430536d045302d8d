"""``--input``: its text form, the values that it makes, and how they meet the forward's signature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autosplit.cli_inputs import DTYPES, InputSpec, pointed
from autosplit.cli_models import build_sample, random_tensor
from autosplit.errors import InputError

INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]


class Net(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return x


class AnyKeyword(nn.Module):
    def forward(self, **values: torch.Tensor) -> torch.Tensor:
        return values["anything"]


def parse(*texts: str) -> list[InputSpec]:
    return [InputSpec.parse(text) for text in texts]


@st.composite
def specs(draw: st.DrawFn) -> InputSpec:
    dtype = draw(st.sampled_from(DTYPES))
    limit = draw(st.one_of(st.none(), st.integers(1, 127))) if dtype in INTEGERS else None
    name = draw(st.from_regex(r"[a-z_][a-z0-9_]{0,8}|[0-9]", fullmatch=True))
    return InputSpec(name, dtype, tuple(draw(st.lists(st.integers(0, 5), max_size=4))), limit)


@given(spec=specs())
def test_the_text_form_round_trips(spec: InputSpec) -> None:
    assert InputSpec.parse(str(spec)) == spec


@given(spec=specs())
def test_values_have_the_shape_and_dtype_and_stay_below_the_limit(spec: InputSpec) -> None:
    value = random_tensor(spec, generator=torch.Generator().manual_seed(0))
    assert value.shape == spec.shape
    assert value.dtype == getattr(torch, spec.dtype)
    if spec.dtype in INTEGERS and value.numel():
        assert value.min() >= 0
        assert value.max() < (spec.limit or 2)


def test_integers_reach_their_range() -> None:
    generator = torch.Generator().manual_seed(0)
    assert set(random_tensor(InputSpec.parse("i=int64[200]<4"), generator=generator).tolist()) == {0, 1, 2, 3}
    assert set(random_tensor(InputSpec.parse("i=int64[200]"), generator=generator).tolist()) == {0, 1}
    assert set(random_tensor(InputSpec.parse("i=bool[200]"), generator=generator).tolist()) == {False, True}


def test_a_limit_may_use_the_whole_range() -> None:
    value = random_tensor(InputSpec.parse("i=uint8[5000]<256"), generator=torch.Generator().manual_seed(0))
    assert value.max() == 255


def test_spaces_and_scalars_are_read() -> None:
    assert InputSpec.parse(" x=float32[8, 16] ") == InputSpec("x", "float32", (8, 16))
    assert InputSpec.parse("x=float32[]") == InputSpec("x", "float32", ())


@pytest.mark.parametrize(
    ("text", "at", "reason"),
    [
        ("x", 1, "= is missing after the name"),
        ("", 0, "a name or a position is missing"),
        ("=float32[8]", 0, "a name or a position is missing"),
        ("x=", 2, "a dtype is missing"),
        ("x=float32", 9, "[ is missing"),
        ("x=float32[8", 11, ", or ] is missing"),
        ("x=float32[8,]", 12, "a size is missing"),
        ("x=float32[8,,3]", 12, "a size is missing"),
        ("x=float32[8,-1]", 12, "a size is missing"),
        ("x=float32[8 3]", 12, ", or ] is missing"),
        ("x=float32[a]", 10, "a size is missing"),
        ("x=float32[8,99999999999999999999]", 12, "no tensor is as large"),
        ("x=float32[8]]", 12, "nothing more may follow"),
        ("x y=float32[1]", 1, "= is missing"),
        ("x=int64[4]<", 11, "a limit is missing"),
        ("00=int64[4]", 0, "a name or a position is missing"),
        ("x=float[8]", 2, "'float' is no dtype here; valid: float32, float64"),
        ("x=int64[8]<0", 10, "the limit of int64 is between 1 and 9223372036854775807"),
        ("x=int8[8]<300", 9, "the limit of int8 is between 1 and 128"),
        ("x=float32[8]<5", 12, "<5 is for integers, float32 takes no limit"),
        ("x=bool[8]<1", 9, "<1 is for integers, bool takes no limit"),
    ],
)
def test_a_caret_stands_under_the_place(text: str, at: int, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        InputSpec.parse(text)
    first, line, caret, way_out = str(caught.value).splitlines()
    assert first.startswith(f"--input cannot be read: {reason}")
    assert (line, caret) == (f"  {text}", f"  {' ' * at}^")
    assert way_out.startswith("write NAME=dtype[shape], for example x=float32[8,3,32,32]")


@given(text=st.text(alphabet=" x=0[],<float32int64\x1b\n世", max_size=20))
def test_any_text_is_read_or_pointed_at(text: str) -> None:
    try:
        said = str(InputSpec.parse(text))
    except InputError as error:
        lines = str(error).split("\n")
        said = f"0=int8[{len(lines)}]" if lines[2].lstrip(" ") == "^" and "".join(lines).isprintable() else str(error)
    assert str(InputSpec.parse(said)) == said


def test_the_caret_is_right_of_wide_characters_and_in_long_lines() -> None:
    assert pointed("世界=x", 2, "why") == "why\n  世界=x\n      ^"
    assert pointed("a\n" + "x" * 100 + "!", 102, "why").splitlines()[1:] == [f"  ...{'x' * 60}!", f"  {' ' * 63}^"]


def test_names_become_keywords_and_positions_positional() -> None:
    sample = build_sample(parse("mask=bool[4]", "0=float32[4,2]"), model=Net(), seed=0)
    assert sample is not None
    assert [value.shape for value in sample.args] == [(4, 2)]
    assert {name: value.dtype for name, value in sample.kwargs.items()} == {"mask": torch.bool}


def test_no_inputs_are_no_sample() -> None:
    assert build_sample([], model=Net(), seed=0) is None


def test_the_seed_decides_the_values() -> None:
    first, again, other = (build_sample(parse("x=float32[4]"), model=Net(), seed=seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.kwargs["x"], again.kwargs["x"])
    assert not torch.equal(first.kwargs["x"], other.kwargs["x"])


def test_building_inputs_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_sample(parse("x=float32[4]"), model=Net(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_any_name_goes_where_the_forward_takes_any_keyword() -> None:
    sample = build_sample(parse("anything=float32[4]"), model=AnyKeyword(), seed=0)
    assert sample is not None
    assert list(sample.kwargs) == ["anything"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["y=float32[4]"], r"--input y: Net\.forward has no input of that name; it has x, mask, scale \(or give a pos"),
        (["x=float32[4]", "x=float32[5]"], r"--input x is given 2 times; give every input once"),
        (["1=float32[4]"], r"--input positions are \[1\]; number them from 0 without gaps"),
        (["mask=bool[4]"], r"Net\.forward.* cannot be called with these inputs: missing a required argument: 'x'"),
        (["0=float32[4]", "x=float32[4]"], r"cannot be called with these inputs: multiple values for argument 'x'"),
    ],
)
def test_inputs_that_the_forward_does_not_take(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_sample(parse(*texts), model=Net(), seed=0)
