"""Commands run in the process of the tests, so they put the folders of users' models on its path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autosplit.cli.app import app

NETS = str(Path(__file__).with_name("nets.py"))


def command(*first: str) -> Callable[..., Any]:
    """Return what calls the command line in this process, with these arguments before its own."""
    return lambda *arguments: CliRunner().invoke(app, [*first, *map(str, arguments)])


def error_of(result: Any) -> str:
    """Return what a failed run said: nothing on stdout, no traceback, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
