"""The arithmetic of the benchmarks: who is read when, and what becomes of the readings."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import pairs
from benchmarks.pairs import Reading, Spread


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(0.002, 0.001, 0.0035).scaled(1e3).text() == "2.0 [1.0, 3.5]"


def test_a_reading_is_the_mean_of_its_calls_on_three_clocks(monkeypatch):
    now = {"wall": 100.0, "process": 50.0, "thread": 10.0}
    clocks = {
        "perf_counter": lambda: now["wall"],
        "process_time": lambda: now["process"],
        "thread_time": lambda: now["thread"],
    }
    monkeypatch.setattr(pairs, "time", SimpleNamespace(**clocks))

    def work() -> None:
        now.update(wall=now["wall"] + 4.0, process=now["process"] + 2.0, thread=now["thread"] + 1.0)

    assert pairs.read(work, calls=3) == Reading(wall_s=4.0, process_s=2.0, thread_s=1.0)


def test_every_reading_stands_beside_one_of_its_reference():
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    references = {name: lambda name=name: calls.append(f"{name}'") for name in "ab"}
    found = pairs.paired(contenders, references, repeats=2, calls=1, warmups=1)
    assert calls[:4] == ["a", "b", "a'", "b'"]
    assert calls[4:] == ["a'", "a", "b'", "b", "b", "b'", "a", "a'"]
    assert all(len(pair.ours) == len(pair.reference) == 2 for pair in found.values())


def test_figures_are_written_as_plain_json(tmp_path):
    path = tmp_path / "figures.json"
    figures = [{"name": "a", "wall_s": Spread(0.123456789, 0.1, 0.2), "parts": [1, 2.0, None]}]
    checks = [pairs.at_most("a", 10.0, 9.0)]
    given = {"benchmark": "b", "settings": {"repeats": 3}, "machine": {"cores": 2}, "checks": checks}
    pairs.write(path, figures=figures, **given)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == ["benchmark", "machine", "settings", "checks", "figures"]
    assert content["figures"] == [
        {"name": "a", "wall_s": {"median": 0.12346, "low": 0.1, "high": 0.2}, "parts": [1, 2.0, None]}
    ]
    assert content["checks"] == [{"name": "a", "asked": "<= 10", "measured": 9.0, "ok": True}]
    assert content["machine"]["cores"] == 2
    with pytest.raises(ValueError, match="not JSON compliant"):
        pairs.write(path, figures=[{"wall_s": float("nan")}], **given)
