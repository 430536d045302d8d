"""What users hand to ``autosplit plan`` and get wrong: the answer names the place in their own code, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autosplit.cli import app as cli

TWO = ("--devices", "2xL4-24GB")
NETS = """
import json

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)


class Misspelt(Net):
    def forward(self, x):
        return self.last(self.frist(x))


class Reads(Net):
    def forward(self, x):
        return self.last(self.first(x)) * json.loads("nothing")


class Experts(Net):
    def forward(self, x):
        rows = (self.first(x).sum(-1) > 0).nonzero()[:, 0]
        return x.index_add(0, rows, self.last(x[rows]))


class Plain(nn.Module):
    def forward(self, x):
        return x.relu() * 2


class OneRow(Net):
    def forward(self, x):
        return self.last(self.first(x).relu() if len(x) > 1 else self.first(x))
"""

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "users_nets.py").write_text(NETS)
    return lambda name, *arguments: CliRunner().invoke(
        cli.app, ["plan", f"{tmp_path / 'users_nets.py'}:{name}", *TWO, *arguments]
    )


def line_of(text: str) -> int:
    return NETS[: NETS.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("name", "line", "kind", "shape"),
    [
        ("Misspelt", "self.frist", "AttributeError", "[4,8]"),
        ("OneRow", "len(x) > 1", "RuntimeError", "[4,7]"),
        ("Reads", "json.loads", "JSONDecodeError", "[4,8]"),
    ],
)
def test_an_error_of_the_models_own_names_its_line(run: Run, name: str, line: str, kind: str, shape: str) -> None:
    result = run(name, "--input", f"x=float32{shape}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"users_nets.py:{line_of(line)}, in forward; --debug shows the traceback)" in result.stderr
    assert f"({kind} at /" in result.stderr
    assert "Traceback" not in result.stderr


def test_rows_that_values_choose_are_refused_with_line_and_way_out(run: Run) -> None:
    result = run("Experts", "--input", "x=float32[4,8]")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"users_nets.py:{line_of('.nonzero()')})" in result.stderr
    assert "compute it for all rows and choose by torch.where, or mask" in result.stderr
