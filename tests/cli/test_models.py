"""MODEL and ``--kwargs``: how factories are called, and what is said of those that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from autosplit.cli.inputs import parse_kwargs
from autosplit.cli.models import load_model
from tests.cli.conftest import NETS, command


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_factory_gets_its_arguments() -> None:
    made = load_model(f"{NETS}:make_wide", kwargs=parse_kwargs('{"width": 3}'))
    assert isinstance(made, nn.Linear)
    assert made.in_features == 3
    assert load_model(f"{NETS}:make_wide", kwargs={"width": 3}, blank=True).weight.is_meta


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import os\nimport no_such_thing\n",
            "No module named 'no_such_thing' (ModuleNotFoundError at {}:2, in <module>; --debug shows the traceback)",
        ),
        ("def make(:\n", "invalid syntax (mine.py, line 1) (SyntaxError; --debug"),
        (
            "import sys\nsys.exit('usage')\n",
            "usage (SystemExit at {}:2, in <module>; --debug shows the traceback); ",
        ),
        ("def make():\n  import json\n  json.loads('x')\n", "(JSONDecodeError at {}:3, in make; --debug"),
    ],
)
@pytest.mark.parametrize("form", ["mine.py:make", "mine:make"])
def test_a_file_that_fails_says_its_own_error_and_line(code: str, message: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    sys.modules.pop("mine", None)
    result = command("plan")(form, "--input", "x=float32[4]")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.format(tmp_path / "mine.py") in result.stderr
