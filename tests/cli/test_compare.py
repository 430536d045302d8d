"""``autosplit compare``: machines side by side, in a table, as JSON, and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from autosplit.cli import app as cli
from autosplit.cli.compare import parse_tokens
from autosplit.errors import InputError
from cost_models.prices import list_prices
from tests.cli.conftest import error_of

NET = """
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(50, 64), *(nn.Linear(64, 64) for _ in range(4)))
"""
LEAN = ("--schedule", "1f1b", "--recompute", "never")
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    given = (f"{tmp_path / 'net.py'}:make", "--input", "0=int64[8,16]<50", *LEAN)
    return lambda *arguments: CliRunner().invoke(cli.app, ["compare", *given, *arguments])


def test_the_fewest_of_a_kind_and_machines_of_a_number(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "machines.html"
    asked = ("--devices", "4090,2xH100", "--tokens", "2B", "--budget", "50")
    result = run(*asked, "--memory-limit", "500KiB", "--price", "4090=0.5/h", "--html", str(page))
    assert result.exit_code == 0, result.output
    first, second = (line.split() for line in result.stdout.splitlines()[3:5])
    assert {first[0].split("x")[1], second[0].split("x")[1]} == {"RTX4090-24GB", "H100-SXM5-80GB"}
    assert "2xH100-SXM5-80GB" in result.stdout
    assert "$0.50 per device and hour, as given" in result.stdout
    assert f"H100-SXM5-80GB {list_prices()['H100-SXM5-80GB']}" in result.stdout
    answers = result.stdout.partition("\nAnswers\n")[2]
    assert [line.split()[0] for line in answers.splitlines() if line.startswith("  ") and line[2] != " "] == [
        "fewest",
        "fastest",
        "cheapest",
        "budget",
    ]
    text = page.read_text(encoding="utf-8")
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert len(picture.findall("circle")) == 2
    assert "budget $50.0" in "".join(picture.itertext())


def test_the_json_has_what_each_costs(run: Run) -> None:
    found = json.loads(run("--devices", "L4", "--tokens", "1e6", "--json").stdout)
    [machine] = found["machines"]
    assert machine["machine"] == "1xL4-24GB"
    assert machine["verdict"] == "fits"
    assert machine["hours"] == pytest.approx(1e6 / machine["tokens_per_s"] / 3600)
    assert machine["usd"] == pytest.approx(machine["hours"] * machine["usd_per_hour"])
    assert machine["usd_per_billion_tokens"] == pytest.approx(1000 * machine["usd"])
    assert found["fewest"] == "1xL4-24GB"


def test_nothing_fits_and_bad_words(run: Run) -> None:
    none = run("--devices", "1xL4", "--memory-limit", "10KiB")
    assert none.exit_code == 1, none.output
    assert "Answers" not in none.stdout
    dear = run("--devices", "1xL4", "--tokens", "2B", "--budget", "0.01")
    assert dear.exit_code == 1
    assert "none is within it, the cheapest takes $" in " ".join(dear.stdout.split())
    for words, said in (
        (("--devices", "H1000"), "the nearest: H100"),
        (("--tokens", "many"), "write 2B, 500M or 1e9"),
        (("--price", "2.10/h"), "write H100=2.10/h"),
        (("--plan", "none.json"), "leave --plan out"),
    ):
        assert said in error_of(run(*words))


def test_numbers_of_tokens() -> None:
    assert [parse_tokens(text) for text in ("2B", "1.5 M", "3e9", "700")] == [2e9, 1.5e6, 3e9, 700]
    with pytest.raises(InputError, match="is no number of tokens"):
        parse_tokens("0")
