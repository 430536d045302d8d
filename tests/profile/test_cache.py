"""The cache of measured times: what it serves, what it refuses, and that no file is ever half a file."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.profile import measured
from autosplit.profile.cache import ProfileCache, ProfileKey, default_folder
from autosplit.profile.combine import profile
from autosplit.profile.times import MeasuredNode, MeasuredTimes
from tests.profile.graphs import traced
from tests.profile.test_identity import model

ROOT = Path(__file__).resolve().parents[2]
ROWS = 4
KEY = ProfileKey(
    modules=("a", "b"),
    recording="0" * 32,
    device="cpu: none",
    rows=ROWS,
    inputs=("float32[4, 8]",),
    threads=1,
    count_bytes=False,
    modes={"autocast": "off"},
    versions={"torch": "2.13.0"},
)


def node(seconds: float = 0.5) -> MeasuredNode:
    return MeasuredNode(seconds, 2 * seconds, (seconds, seconds), (seconds, 3 * seconds), 4)


def times(*names: str, seconds: float = 0.5) -> MeasuredTimes:
    return MeasuredTimes(dict.fromkeys(names, node(seconds)), "cpu")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the nodes that were run in order to be measured."""
    seen: list[str] = []
    once = measured._Timing._once

    def counted(self: Any, n: Any, *, private: bool) -> Any:
        seen.append(n.name)
        return once(self, n, private=private)

    monkeypatch.setattr(measured._Timing, "_once", counted)
    return seen


def test_the_second_profile_runs_no_node(runs: list[str], tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    arguments = {"inputs": [torch.randn(ROWS, 8)], "rows": ROWS, "batch_rows": ROWS}
    first = profile(traced(model(), torch.randn(2, 8)), cache=cache, **arguments)
    assert {"_0", "_1", "_2", "_3"} == set(runs)
    assert cache.hits == 0
    runs.clear()
    second = profile(traced(model(), torch.randn(2, 8)), cache=cache, **arguments)
    assert (runs, cache.hits) == ([], 1)
    assert second == first
    assert second.measured


def test_people_can_read_an_entry(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.store(KEY, times("a", "b#0/linear_0"))
    [path] = tmp_path.iterdir()
    assert path.name == KEY.file_name
    entry = json.loads(path.read_text(encoding="utf-8"))
    assert entry["version"] == 1
    assert entry["key"]["modules"] == ["a", "b"]
    assert entry["key"]["modes"] == {"autocast": "off"}
    [group] = entry["groups"]
    assert (group["nodes"], group["forward_s"]) == (["a", "b#0/linear_0"], 0.5)
    assert path.read_text(encoding="utf-8").count("\n") > 20


seconds = st.floats(0, 1e6, allow_nan=False)
peaks = st.none() | st.integers(0, 2**60)
nodes = st.builds(
    MeasuredNode,
    forward_s=seconds,
    backward_s=seconds,
    forward_range_s=st.tuples(seconds, seconds),
    backward_range_s=st.tuples(seconds, seconds),
    samples=st.integers(1, 1000),
    forward_peak_bytes=peaks,
    backward_peak_bytes=peaks,
)


@given(st.dictionaries(st.text(min_size=1, max_size=12), nodes), st.text(max_size=8))
def test_what_is_stored_is_what_is_loaded(found: dict[str, MeasuredNode], device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = ProfileCache(folder)
        cache.store(KEY, MeasuredTimes(found, device))
        assert cache.load(KEY) == MeasuredTimes(found, device)


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _renamed(text: str) -> str:
    return text.replace('"forward_s"', '"seconds"')


def _not_a_number(text: str) -> str:
    return text.replace("0.5", "NaN", 1)


def _negative(text: str) -> str:
    return text.replace("0.5", "-0.5", 1)


def _other_key(text: str) -> str:
    return text.replace("cpu: none", "cpu: another")


def _newer(text: str) -> str:
    return text.replace('"version": 1', '"version": 2')


@pytest.mark.parametrize(
    "damage",
    [lambda _: "", lambda _: "[]", lambda _: "\0" * 400, _cut, _renamed, _not_a_number, _negative, _other_key, _newer],
    ids="empty list zeros cut renamed nan negative key version".split(),
)
def test_a_damaged_or_foreign_file_is_ignored_and_written_again(damage: Callable[[str], str], tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.store(KEY, times("a"))
    path = tmp_path / KEY.file_name
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.warns(UserWarning, match=rf"{KEY.file_name}' is of no use \(.+\): measuring again"):
        assert cache.times(KEY, lambda: times("a", seconds=0.25)) == times("a", seconds=0.25)
    assert cache.load(KEY) == times("a", seconds=0.25)


def test_every_beginning_of_a_file_is_known_to_be_broken(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.store(KEY, times("a"))
    path = tmp_path / KEY.file_name
    content = path.read_bytes()
    for length in range(0, len(content.rstrip()), 7):
        path.write_bytes(content[:length])
        with pytest.warns(UserWarning, match="is of no use"):
            assert cache.load(KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = ProfileCache(tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot be kept in|is of no use") as caught:
        assert cache.times(KEY, lambda: times("a")) == times("a")
    assert "cannot be kept in" in str(caught[-1].message)


def test_a_failed_write_leaves_the_old_entry_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProfileCache(tmp_path)
    cache.store(KEY, times("a"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        cache.store(KEY, times("a", seconds=9.0))
    assert cache.load(KEY) == times("a")
    assert [path.name for path in tmp_path.iterdir()] == [KEY.file_name]


def test_what_memory_ran_out_for_is_measured_again(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    short = MeasuredTimes({"a": node()}, "cpu", {"b": "memory ran out"})
    assert cache.times(KEY, lambda: short) == short
    assert list(tmp_path.glob("*")) == []


def test_the_newest_entries_stay(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path, entries=3)
    (tmp_path / "notes.txt").write_text("not the cache's", encoding="utf-8")
    left = tmp_path / ".killed.part"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    keys = [KEY.model_copy(update={"rows": rows}) for rows in range(6)]
    for age, key in enumerate(keys[:5]):
        cache.store(key, times("a"))
        os.utime(tmp_path / key.file_name, (1e9 + age,) * 2)
    cache.store(keys[5], times("a"))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", *(key.file_name for key in keys[3:])}


WRITER = """
import sys
from autosplit.profile.cache import ProfileCache
from tests.profile.test_cache import KEY, times

cache = ProfileCache(sys.argv[1], entries=40)
names = [f"layer{i}#0/linear_0" for i in range(2000)]
print("ready", flush=True)
for round in range(int(sys.argv[2])):
    for rows in range(8):
        found = times(*names, seconds=1.0 + round)
        found.nodes.update((name, times(name, seconds=1.0 + i).nodes[name]) for i, name in enumerate(names))
        cache.store(KEY.model_copy(update={"rows": rows}), found)
        print(rows, flush=True)
"""


def writer(folder: Path, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(rounds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_killed_and_competing_writers_leave_whole_entries_only(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path, entries=40)
    killed, steady = writer(tmp_path, 10**6), writer(tmp_path, 2)
    for process in (killed, steady):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for _ in range(11):
        killed.stdout.readline()
        for rows in range(8):
            found = cache.load(KEY.model_copy(update={"rows": rows}))
            assert found is None or len(found.nodes) == 2000
    killed.kill()
    assert killed.wait() < 0
    killed.stdout.close()
    assert len(steady.communicate()[0].splitlines()) == 16
    assert steady.returncode == 0
    for rows in range(8):
        found = cache.load(KEY.model_copy(update={"rows": rows}))
        assert found is not None
        assert math.isclose(found.nodes["layer1999#0/linear_0"].forward_s, 2000.0)
    assert len(list(tmp_path.glob("*.json"))) == 8
    assert len(list(tmp_path.glob(".*.part"))) <= 1


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/caches"}, Path("/caches/autosplit/profiles")),
        ("linux", {"XDG_CACHE_HOME": "relative"}, Path("/users/me/.cache/autosplit/profiles")),
        ("linux", {}, Path("/users/me/.cache/autosplit/profiles")),
        ("darwin", {"XDG_CACHE_HOME": "/caches"}, Path("/users/me/Library/Caches/autosplit/profiles")),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/autosplit/profiles")),
        ("win32", {}, Path("/users/me/AppData/Local/autosplit/profiles")),
    ],
)
def test_the_platforms_own_folder(
    platform: str, environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/users/me"))
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == expected
    assert ProfileCache().folder == expected
    assert ProfileCache("here").folder == Path("here")


def test_a_key_is_a_value() -> None:
    assert ProfileKey.model_validate_json(KEY.model_dump_json()) == KEY == copy.deepcopy(KEY)
