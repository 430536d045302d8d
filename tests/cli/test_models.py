"""MODEL and ``--kwargs``: how factories are called, and what is said of those that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from autosplit.cli.inputs import ConfigInputs, ModelSpec, parse_kwargs
from autosplit.cli.models import load_model
from autosplit.errors import InputError

NETS = str(Path(__file__).parent / "nets.py")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def test_a_factory_gets_its_arguments() -> None:
    made = load_model(f"{NETS}:make_wide", kwargs=parse_kwargs('{"width": 3}'))
    assert isinstance(made, nn.Linear)
    assert made.in_features == 3
    assert load_model(f"{NETS}:make_wide", kwargs={"width": 3}, blank=True).weight.is_meta


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "make_wide",
            {},
            r"make_wide\(width: .*\) -> .* cannot be called: missing a required argument: 'width'; give ",
        ),
        ("make_wide", {}, r"""give them as --kwargs '\{"width": "\.\.\."\}'$"""),
        ("make_wide", {"width": 3, "depth": 2}, r"got an unexpected keyword argument 'depth'; mend --kwargs$"),
        (
            "make_unnamed",
            {"width": 3},
            r"--kwargs gives arguments by name, and width takes none; name a factory that does$",
        ),
        ("make_mlp", {"width": 3}, r"got an unexpected keyword argument 'width'; mend --kwargs$"),
        (
            "make_wide",
            {"width": "a"},
            r'failed when called with --kwargs \{"width": "a"\}: nets.py, line \d+: TypeError',
        ),
        ("INSTANCE", {"width": 3}, r"INSTANCE is a Mlp already and takes no --kwargs; name a factory"),
    ],
)
def test_arguments_that_a_factory_does_not_take(name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(f"{NETS}:{name}", kwargs=kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"width": 3', r"""--kwargs cannot be read: Expecting ',' delimiter\n  \{"width": 3\n {13}\^\nwrite a JSON"""),
        ("[1]", r"--kwargs '\[1\]' is no object with names"),
        ("width=3", r"Expecting value\n  width=3\n  \^"),
        ('{"a": ' * 100_000, r"nested too deep"),
        ("", r"Expecting value\n  \n  \^"),
    ],
)
def test_bad_kwargs(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_kwargs(text)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\nimport no_such_thing\n", "mine.py, line 2: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def make(:\n", "mine.py, line 1: SyntaxError: invalid syntax\n  def make(:\n           ^"),
        ("import sys\nsys.exit('usage: mine FILE')\n", "mine.py, line 2: SystemExit: usage: mine FILE; what a script"),
        (
            "raise ValueError('\\n'.join(map(str, range(99))))\n",
            "line 1: ValueError: 0\n1\n2\n3 ... (--debug shows all)",
        ),
        (
            "import json\njson.loads('x')\n",
            "mine.py, line 2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
@pytest.mark.parametrize("form", ["mine.py:make", "mine:make"])
def test_a_file_that_fails_says_its_own_error_in_short(code: str, message: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    sys.modules.pop("mine", None)
    with pytest.raises(InputError) as caught:
        load_model(form)
    assert f"MODEL: importing {form.partition(':')[0]!r} failed: " in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_package_that_is_not_there_is_no_failed_import() -> None:
    with pytest.raises(InputError, match=r"there is no module 'no_such_package', neither in the working folder"):
        load_model("no_such_package.nets:make")


def test_sizes_of_a_configs_inputs_are_for_configs() -> None:
    with pytest.raises(InputError, match=r"--batch is for the inputs that an hf: config describes; nets.py:f is none"):
        ModelSpec.parse("nets.py:f", inputs=None, kwargs=None, sizes=ConfigInputs(batch=2), seed=0)
    with pytest.raises(InputError, match=r"--sequence is for .*; --input gives the sizes"):
        ModelSpec.parse("hf:x.json", inputs=["x=int64[2]<3"], kwargs=None, sizes=ConfigInputs(sequence=8), seed=0)
