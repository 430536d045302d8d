"""``--input``: its text form, the values that it makes, and how they meet the forward's signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from autosplit.cli.caret import pointed
from autosplit.cli.inputs import DTYPES, ConfigInputs, Constant, InputSpec, ModelSpec, TensorForm
from autosplit.cli.models import build_sample, random_tensor
from autosplit.cli.places import Place, Step, nested
from autosplit.errors import InputError

INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]


class Net(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return x


class AnyKeyword(nn.Module):
    def forward(self, **values: torch.Tensor) -> torch.Tensor:
        return values["anything"]


class Options(nn.Module):
    def forward(self, x: torch.Tensor, return_dict: bool = True, **kwargs: Any) -> Any:
        return x


class Nested(nn.Module):
    def forward(self, batch: Any, pair: Any = None, *, flag: bool = True) -> Any:
        return batch


def parse(*texts: str) -> list[InputSpec]:
    return [InputSpec.parse(text) for text in texts]


def form(text: str) -> TensorForm:
    value = InputSpec.parse(text).value
    assert isinstance(value, TensorForm)
    return value


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}|[0-9]", fullmatch=True)
TEXTS = st.text(alphabet=' x.0[]="世', max_size=5)


@st.composite
def forms(draw: st.DrawFn) -> TensorForm:
    dtype = draw(st.sampled_from(DTYPES))
    limit = draw(st.one_of(st.none(), st.integers(1, 127))) if dtype in INTEGERS else None
    return TensorForm(dtype, tuple(draw(st.lists(st.integers(0, 5), max_size=4))), limit)


steps = st.one_of(
    st.builds(Step, st.just("dict"), st.one_of(NAMES, TEXTS)),
    st.builds(Step, st.sampled_from(["list", "tuple"]), st.integers(0, 10**18)),
)
places = st.builds(Place, NAMES, st.lists(steps, max_size=4).map(tuple))
constants = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False), TEXTS
)
specs = st.builds(InputSpec, places, st.one_of(forms(), st.builds(Constant, constants)))


@given(spec=specs)
def test_the_text_form_round_trips(spec: InputSpec) -> None:
    again = InputSpec.parse(str(spec))
    assert (again, str(again)) == (spec, str(spec))


@given(spec=forms())
def test_values_have_the_shape_and_dtype_and_stay_below_the_limit(spec: TensorForm) -> None:
    value = random_tensor(spec, generator=torch.Generator().manual_seed(0))
    assert value.shape == spec.shape
    assert value.dtype == getattr(torch, spec.dtype)
    if spec.dtype in INTEGERS and value.numel():
        assert value.min() >= 0
        assert value.max() < (spec.limit or 2)


def test_integers_reach_their_range() -> None:
    generator = torch.Generator().manual_seed(0)
    assert set(random_tensor(form("i=int64[200]<4"), generator=generator).tolist()) == {0, 1, 2, 3}
    assert set(random_tensor(form("i=int64[200]"), generator=generator).tolist()) == {0, 1}
    assert set(random_tensor(form("i=bool[200]"), generator=generator).tolist()) == {False, True}


def test_a_limit_may_use_the_whole_range() -> None:
    value = random_tensor(form("i=uint8[5000]<256"), generator=torch.Generator().manual_seed(0))
    assert value.max() == 255


def test_spaces_and_scalars_are_read() -> None:
    assert InputSpec.parse(" x=float32[8, 16] ") == InputSpec.tensor("x", "float32", (8, 16))
    assert InputSpec.parse("x=float32[]") == InputSpec.tensor("x", "float32", ())


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
        ("x.=int8[1]", 2, "a key or a position is missing behind the dot, such as .mask or .0"),
        ("x.00=int8[1]", 2, "a key or a position is missing behind the dot"),
        ("x..y=int8[1]", 2, "a key or a position is missing behind the dot"),
        ("x.0y=int8[1]", 3, "= is missing"),
        ("x[=int8[1]", 2, "a position or a key in quotes is missing, such as [0] or ['mask']"),
        ("x[y]=int8[1]", 2, "a position or a key in quotes is missing"),
        ("x[-1]=int8[1]", 2, "a position or a key in quotes is missing"),
        ("x[0=int8[1]", 3, "] is missing behind a position or a key"),
        ("x['y=int8[1]", 12, "the closing quote is missing"),
        ("x['y'=int8[1]", 5, "] is missing behind a position or a key"),
        (f"{'x' + '.y' * 33}=int8[1]", 65, "no place lies deeper than 32 steps"),
        ("x='relu", 7, "the closing quote is missing"),
        ("x='relu' 1", 9, "nothing more may follow"),
        ("x=relu", 2, "'relu' is no dtype here; valid: float32, float64"),
        ("x=-", 2, "this is no number, such as 2, -0.5 or 1e-5"),
        ("x=1.2.3", 2, "this is no number"),
        ("x=0x10", 2, "this is no number"),
        ("x=8,3", 3, "nothing more may follow"),
        ("x=1e999", 2, "no number is as large"),
        ("x=false[8]", 7, "nothing more may follow"),
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
    shown = f"...{text[at - 60 :]}" if at > 60 else text
    assert (line, caret) == (f"  {shown}", f"  {' ' * (min(at, 63))}^")
    assert way_out.startswith("write NAME=dtype[shape], for example x=float32[8,3,32,32]")


@given(text=st.text(alphabet=" x=0[],<float32int64\x1b\n世.'\"-+true", max_size=20))
@example(text="x=" + "9" * 5000)
@example(text="9" * 5000 + "=true")
@example(text="x" + "[0]" * 5000)
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


def test_any_name_goes_where_the_forward_takes_any_keyword(capsys: pytest.CaptureFixture[str]) -> None:
    sample = build_sample(parse("anything=float32[4]"), model=AnyKeyword(), seed=0)
    assert sample is not None
    assert list(sample.kwargs) == ["anything"]
    assert capsys.readouterr().err == ""


def test_a_name_that_is_nearly_one_of_the_forwards_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    build_sample(parse("x=float32[4]", "retrun_dict=false", "other=1"), model=Options(), seed=0)
    said = "--input retrun_dict: Options.forward names no such input and takes it as any other; it names return_dict"
    assert capsys.readouterr().err == f"warning: {said}\n"
    build_sample(parse("x=float32[4]", "retrun_dict=1", "return_dict=1"), model=Options(), seed=0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["y=float32[4]"],
            r"--input y: Net\.forward has no input of that name; it has x, mask, scale \(or give a position, "
            r"0=\.\.\., or inside of one that is a dict, x\.y=\.\.\.\)",
        ),
        (["x=float32[4]", "x=float32[5]"], r"--input x is given twice; give every input once"),
        (["1=float32[4]"], r"--input positions are \[1\]; number them from 0 without gaps"),
        (["mask=bool[4]"], r"Net\.forward.* cannot be called with these inputs: missing a required argument: 'x'"),
        (["0=float32[4]", "x=float32[4]"], r"cannot be called with these inputs: multiple values for argument 'x'"),
    ],
)
def test_inputs_that_the_forward_does_not_take(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_sample(parse(*texts), model=Net(), seed=0)


def test_places_make_dicts_lists_and_tuples() -> None:
    texts = ("batch.x=float32[4,2]", "batch['a b'].0=bool[4]", "pair[1]=int64[4]", "pair[0].n=2", "flag=false")
    sample = build_sample(parse(*texts), model=Nested(), seed=0)
    assert sample is not None
    batch, pair = sample.kwargs["batch"], sample.kwargs["pair"]
    assert (list(batch), batch["x"].shape, type(batch["a b"]), len(batch["a b"])) == (["x", "a b"], (4, 2), tuple, 1)
    assert (type(pair), pair[0], pair[1].dtype) == (list, {"n": 2}, torch.int64)
    assert sample.kwargs["flag"] is False
    assert list(sample.kwargs) == ["batch", "pair", "flag"]


def test_a_positional_input_may_be_nested() -> None:
    sample = build_sample(parse("1[0]=float32[4]", "0.x=float32[4]"), model=Nested(), seed=0)
    assert sample is not None
    assert [type(value) for value in sample.args] == [dict, list]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("None", None), ("null", None), ("-3", -3), ("+007", 7), (".5", 0.5),
        ("1.", 1.0), ("1e-5", 1e-5), ("'relu'", "relu"), ('"it\'s"', "it's"), ("''", ""),
    ],
)  # fmt: skip
def test_constants(text: str, value: Any) -> None:
    found = InputSpec.parse(f"x={text}").value
    assert isinstance(found, Constant)
    assert (type(found.value), found.value) == (type(value), value)


@pytest.mark.parametrize(
    ("texts", "reason", "line", "at"),
    [
        (["b.x", "b[0]"], "b[0]: b is a dict by b.x, and here a list; write one of them", "b[0]", 1),
        (["b.x.0", "b.x[1]"], "b.x[1]: b.x is a tuple by b.x.0, and here a list; write one of them", "b.x[1]", 3),
        (["b", "b.x"], "b.x: b is given whole already; give that, or what is inside of it", "b.x", 1),
        (["b.x.y", "b.x"], "b.x.y: b.x is given whole too; give that, or what is inside of it", "b.x.y", 3),
        (["b[0]", "b[2]", "b[3]"], "b[2]: the positions in b are 0, 2, 3; number them from 0 without gaps", "b[2]", 1),
        (["b.x.1"], "b.x.1: the positions in b.x are 1; number them from 0 without gaps", "b.x.1", 3),
    ],
)
def test_places_that_do_not_go_together(texts: list[str], reason: str, line: str, at: int) -> None:
    with pytest.raises(InputError) as caught:
        nested([(spec.place, spec.value) for spec in parse(*(f"{text}=int8[4]" for text in texts))])
    assert str(caught.value).splitlines() == [f"--input {reason}", f"  {line}", f"  {' ' * at}^"]


def test_a_place_is_given_once_before_the_model_is_made() -> None:
    with pytest.raises(InputError, match=r"^--input b\.x is given twice; give every input once$"):
        ModelSpec.parse("no:f", inputs=["b.x=true", "b['x']=int8[4]"], kwargs=None, sizes=ConfigInputs(), seed=0)


few_steps = st.one_of(
    st.builds(Step, st.just("dict"), st.sampled_from("ab")),
    st.builds(Step, st.sampled_from(["list", "tuple"]), st.integers(0, 1)),
)
few_places = st.builds(Place, st.sampled_from("a01"), st.lists(few_steps, max_size=2).map(tuple))


def go_together(found: list[Place]) -> bool:
    """Tell the same by comparing all with all."""
    inside: dict[tuple[Any, ...], set[Step]] = {}
    for place in found:
        for depth, step in enumerate(place.steps):
            inside.setdefault((place.name, *place.steps[:depth]), set()).add(step)
    full = {(place.name, *place.steps) for place in found}
    positions = [{place.name for place in found if place.name != "a"}]
    positions += [{str(step.key) for step in own} for own in inside.values() if "dict" not in {s.kind for s in own}]
    return (
        len(full) == len(found)
        and not full & inside.keys()
        and all(len({step.kind for step in own}) == 1 for own in inside.values())
        and all("1" not in own or "0" in own for own in positions)
    )


@settings(max_examples=500)
@given(found=st.lists(few_places, min_size=1, max_size=4))
def test_any_places_go_together_or_are_refused(found: list[Place]) -> None:
    given_here = [(place, place) for place in found]
    if not go_together(found):
        with pytest.raises(InputError, match=r"^--input "):
            nested(given_here)
        return
    tree = nested(given_here)
    for place in found:
        value: Any = tree[place.name]
        for step in place.steps:
            assert type(value).__name__ == step.kind
            value = value[step.key]
        assert value is place
