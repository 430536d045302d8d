"""The overlap benchmark: its ideal, its arithmetic, and that every contender does the same work."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import overlap, pairs
from benchmarks.overlap import HAND, PEER, Case, Sleeps

SLEEPS = Sleeps(forward_s=0.005, backward_s=0.010, exact=True)
RUNNABLE = list(overlap.NAMES)
if pairs.torchgpipe() is None:
    RUNNABLE.remove(PEER)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Give back the number of threads that a benchmark sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The seconds that stages ask for, which then do not pass."""
    asked: list[float] = []
    monkeypatch.setattr(overlap, "time", SimpleNamespace(sleep=asked.append, perf_counter=time.perf_counter))
    return asked


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [4, 8, 32])
def test_the_ideal_of_equal_stages_is_known(schedule, stages, chunks):
    case = Case(stages, chunks)
    assert case.nominal_s(SLEEPS) == pytest.approx(stages * chunks * 0.015)
    assert case.ideal(schedule, SLEEPS) == pytest.approx(stages * chunks / (chunks + stages - 1))


@pytest.mark.parametrize("schedule", overlap.VIRTUAL)
def test_two_stages_on_a_device_halve_what_filling_costs(schedule):
    case = Case(lanes=4, chunks=8, virtual=2)
    assert case.title == "S=4 M=8 v=2"
    assert case.nominal_s(SLEEPS) == pytest.approx(8 * 8 * 0.015)
    single = Case(lanes=4, chunks=8).ideal("1f1b", SLEEPS)
    assert single < case.ideal(schedule, SLEEPS) < 4
    if schedule != "zb_v":
        assert case.ideal(schedule, SLEEPS) == pytest.approx(4 * 8 / (8 + 3 / 2))


def test_zero_bubble_gains_nothing_where_nothing_can_wait():
    assert Case(4, 8).ideal("zb_h1", SLEEPS) == pytest.approx(Case(4, 8).ideal("1f1b", SLEEPS))


@pytest.mark.parametrize("exact", [True, False])
def test_a_sleep_is_never_asked_to_be_shorter(slept, exact):
    overlap.sleep(0.005, exact)
    assert slept == [0.005]


def some_case(name: str) -> Case:
    return Case(lanes=2, chunks=4, virtual=2) if Case(2, 4, virtual=2).runs(name) else Case(lanes=3, chunks=4)


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in overlap.LIMITS])
def test_every_contender_sleeps_as_often_and_finds_the_same_gradients(slept, name):
    case = some_case(name)
    gradients = {}
    for who in (HAND, name):
        torch.manual_seed(0)
        model = nn.Sequential(*(overlap.SleepingStage(SLEEPS) for _ in range(case.stages)))
        step = overlap.contender(who, model, case, SLEEPS)
        slept.clear()
        step()
        assert Counter(slept) == {0.005: 4 * case.stages, 0.010: 4 * case.stages}
        gradients[who] = [parameter.grad for parameter in model.parameters()]
    for ours, plain in zip(gradients[name], gradients[HAND], strict=True):
        torch.testing.assert_close(ours, plain)
        assert plain.abs().sum() > 0


@pytest.mark.parametrize("name", overlap.LIMITS)
def test_the_limit_sleeps_as_often_and_in_the_order_of_the_schedule(slept, name):
    case = some_case(name)
    step = overlap.contender(name, nn.Sequential(), case, SLEEPS)
    for _ in range(2):
        slept.clear()
        step()
        assert Counter(slept) == {0.005: 4 * case.stages, 0.010: 4 * case.stages}
        assert slept[:3] == [0.005] * 3  # the last stage's first forward comes before any backward


def test_speed_up_is_nominal_over_the_measured_median(slept, monkeypatch):
    asked = {}

    def interleave(contenders, *, repeats):
        asked.update(repeats)
        return {
            name: [pairs.Reading(wall_s=seconds, process_s=0.01, thread_s=0.0) for seconds in walls]
            for name, walls in (("inline call", (0.25, 0.20, 0.15)), (HAND, (0.30,)))
        }

    monkeypatch.setattr(pairs, "interleave", interleave)
    ours, hand = overlap.measure(Case(2, 8), ["inline call", HAND], SLEEPS, repeats=5, serial_repeats=3)
    assert asked == {"inline call": 3, HAND: 3}
    assert ours["speed_up"] == pytest.approx(0.240 / 0.20)
    assert ours["share"] == pytest.approx(1.2 / (16 / 9))
    assert ours["over_hand"] == pytest.approx(1.5)
    assert hand["over_hand"] == 1.0
    assert "1.78x" in overlap.row(ours).values()


def test_the_share_of_the_ideal_is_asked_of_threads_only():
    figures = [
        {"case": Case(2, 8).title, "contender": name, "share": share}
        for name, share in (("threads call", 0.98), ("threads 1f1b", 0.96), ("inline call", 0.5))
    ]
    checks = overlap.checks_of(figures)
    assert [check.ok for check in checks] == [True, False]
    assert checks[1].name == "S=2 M=8 threads 1f1b, share of the ideal"


def test_lateness_is_what_passes_beyond_the_sleep(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(overlap, "time", SimpleNamespace(sleep=lambda _: None, perf_counter=lambda: next(clock)))
    late = overlap.overshoot(0.25, exact=False, threads=1, times=2)
    assert late == pairs.Spread(median=0.5, low=0.375, high=0.625)


def test_the_benchmark_runs(tmp_path, capsys):
    path = tmp_path / "overlap.json"
    sizes = "--lanes 2 --virtual-lanes 2 --chunks 2 3 --repeats 2 --serial-repeats 1".split()
    short = "--forward-ms 0.1 --backward-ms 0.2".split()
    overlap.main([*sizes, *short, "--json", str(path), "--only", *RUNNABLE])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["forward_s"] == 0.0001
    cases = [Case(2, chunks, virtual) for virtual in (1, 2) for chunks in (2, 3)]
    expected = [(case.title, name) for case in cases for name in RUNNABLE if case.runs(name)]
    assert [(figure["case"], figure["contender"]) for figure in content["figures"]] == expected
    assert [sleeper["threads"] for sleeper in content["machine"]["sleeps"]] == [1, 2]
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    assert "exact sleeps on 2 threads are late by µs" in printed


def test_the_benchmark_goes_on_without_the_peer(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    sizes = "--lanes 2 --virtual-lanes --chunks 2 --repeats 1".split()
    short = "--forward-ms 0.1 --backward-ms 0.1 --no-exact-sleep".split()
    overlap.main([*sizes, *short, "--only", PEER, HAND])
    printed = capsys.readouterr().out
    assert "torchgpipe is not installed; going on without it" in printed
    assert "sleeps below are default ones" in printed
    assert HAND in printed
