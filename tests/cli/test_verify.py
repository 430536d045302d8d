"""``autosplit verify``: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import math

import pytest

from autosplit import verification
from autosplit.verification import Item, Verification
from tests.cli.conftest import NETS, command

OPTIONS = ("--devices", "cpu,cpu", "--chunks", "4")
X = ("--input", "x=float32[8,16]")
run = command("verify", *OPTIONS)


def test_an_equal_pipe() -> None:
    result = run(f"{NETS}:make_mlp", *X)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The pipe is the model.\n")
    assert "gradient" in result.stdout
    assert "a factory that talks\n" in result.stderr


def test_json_is_the_comparison_and_nothing_else() -> None:
    result = run(f"{NETS}:make_mlp", *X, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["equal"] is True
    assert found["notes"] == []
    assert {item["run"] for item in found["items"]} == {"train", "eval"}
    assert all(item["equal"] and item["difference"] <= item["tolerance"] for item in found["items"])


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_pipe_that_is_not_equal_ends_with_one(monkeypatch: pytest.MonkeyPatch, form: tuple[str]) -> None:
    items = (Item("train", "output", "0", 0.5, 1e-5), Item("train", "buffer", "n", math.inf, 0.0, "missing"))
    monkeypatch.setattr(verification, "verify", lambda *args: Verification(items))
    result = run(f"{NETS}:make_mlp", *X, *form)
    assert result.exit_code == 1, result.output
    if form:
        found = json.loads(result.stdout)
        assert [item["difference"] for item in found["items"]] == [0.5, None]
        assert found["equal"] is False
    else:
        assert result.stdout.startswith("The pipe is NOT the model.\n")
        assert "- train: buffer n: missing" in result.stdout
