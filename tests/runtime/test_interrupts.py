"""Ctrl-C while lanes work: the lanes end their action, nothing of the step stays; a second one leaves what hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from autosplit.runtime.lanes.threads import LaneThreads
from autosplit.schedule.action import Action, describe
from tests.pairwise import in_turn
from tests.runtime.gates import (
    HOWS,
    MARK,
    SAFETY_S,
    Case,
    case_of,
    hold,
    notes,
)

ROOT = Path(__file__).parents[2]
ACTIONS = [Action(0, "F", 0), Action(1, "F", 3), Action(2, "B", 0), Action(0, "B", 2)]
how_of = pytest.mark.parametrize("how", HOWS)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set while the caller waits for the other lanes of a step that has failed."""
    begun, late = threading.Event(), LaneThreads._late

    def told(own: LaneThreads, board: Any) -> Any:
        if board.stopped:
            begun.set()
        return late(own, board)

    monkeypatch.setattr(LaneThreads, "_late", told)
    return begun


def copies(case: Case) -> dict[str, Any]:
    return {name: None if leaf.grad is None else leaf.grad.tolist() for name, leaf in case.leaves().items()}


@in_turn(how=HOWS, action=ACTIONS)
def test_ctrl_c_on_threads(draining: threading.Event, how: str, action: Action) -> None:
    case, ended = case_of("threads", how), []
    threads = case.threads()
    case.run(how)
    before = copies(case)

    def work() -> None:
        press()
        hold(until=draining)
        ended.append(True)

    with case.gates.at({action: work}), pytest.raises(KeyboardInterrupt) as caught:
        case.run(how)
    assert ended == [True]
    assert not case.gates.inside
    assert [a for a in case.gates.passed if a.stage == action.stage][-1] == action
    assert notes(caught.value)[0].startswith("interrupted during ")
    assert describe(action) in notes(caught.value)[0]
    assert copies(case) == before
    case.assert_works()
    assert case.threads() == threads


@in_turn(how=HOWS, action=ACTIONS)
def test_ctrl_c_inline(how: str, action: Action) -> None:
    case = case_of("inline", how)
    case.run(how)
    before = copies(case)

    def work() -> None:
        press()
        hold(until=threading.Event())

    with case.gates.at({action: work}), pytest.raises(KeyboardInterrupt) as caught:
        case.run(how)
    if (how, action.kind) != ("call", "B"):  # torch's own autograd runs that, as for a plain model
        assert describe(action) in notes(caught.value)[0]
        assert copies(case) == before
    case.assert_works()


@how_of
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_second_ctrl_c_leaves_behind_what_hangs(draining: threading.Event, how: str, kind: Any) -> None:
    case, action, release = case_of("threads", how), Action(1, kind, 2), threading.Event()
    case.run(how)
    before, threads = copies(case), case.threads()

    def hang() -> None:
        press()
        hold(until=draining)
        press()
        hold(until=release)

    with case.gates.at({action: hang}), pytest.raises(KeyboardInterrupt) as caught:
        case.run(how)
    try:
        assert describe(action) in notes(caught.value)[0]
        assert copies(case) == before
        case.assert_works()
        assert threads[1].is_alive()
        assert threads[1] not in case.threads()
        case.run(how)
        before = copies(case)
    finally:
        release.set()
    for thread in set(threads) - set(case.threads()):
        thread.join(SAFETY_S)
        assert not thread.is_alive()
    assert copies(case) == before
    case.assert_works()


def test_ctrl_c_while_another_caller_has_the_lanes() -> None:
    case, calling, interrupted, found = case_of("threads", "call"), threading.Event(), threading.Event(), []

    def once(*_: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def work() -> None:
        hold(until=calling)
        while not interrupted.wait(0.05):  # one that comes just before the main thread waits would wait with it
            press()

    def second_call() -> None:
        calling.set()
        case.pipe(case.value, MARK)

    signal.signal(signal.SIGINT, once)
    other = threading.Thread(target=lambda: found.append(case.pipe(case.value, MARK)))
    with case.gates.at({Action(1, "F", 1): work}):
        other.start()
        with pytest.raises(KeyboardInterrupt):
            second_call()
        other.join(SAFETY_S)
    torch.testing.assert_close(found[0], case.plain(case.value, MARK))
    case.assert_works()


# -- in a process of its own -----------------------------------------------------------------------------------------
HEAD = """
import atexit
atexit.register(lambda: say("lanes at exit:", len(lane_threads())))  # runs last: what is registered first

import threading
from autosplit.runtime.lanes.threads import LaneThreads
from autosplit.schedule.action import Action
from tests.pairwise import in_turn
from tests.runtime.gates import Case, lane_threads

def say(*words):
    print(*words, flush=True)

case, release, drain = Case(schedule="1f1b"), threading.Event(), LaneThreads._drain

def hang():
    say("inside")
    release.wait()

def told(own, board):
    say("draining")
    if RELEASED:
        release.set()
    drain(own, board)

LaneThreads._drain = told
"""
HANG = """
with case.gates.at({{Action.parse({action!r}): hang}}):
    case.run({how!r})
"""
GO_ON = """
try:
    {body}
except KeyboardInterrupt:
    say("went on")
case.assert_works()
"""


@contextlib.contextmanager
def script(*parts: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script; kill it should the test fail."""
    command = [sys.executable, "-c", "\n".join((HEAD, *parts))]
    with subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
        limit = threading.Timer(SAFETY_S, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            limit.join()
            process.kill()


def interrupt(process: subprocess.Popen[str], *, times: int) -> tuple[str, str]:
    """Press Ctrl-C when a lane is inside an action, and perhaps again; return what the process prints after that."""
    assert process.stdout is not None
    assert process.stderr is not None
    for line in ("inside", "draining")[:times]:
        assert process.stdout.readline() == f"{line}\n"
        process.send_signal(signal.SIGINT)
    out, errors = process.stdout.read(), process.stderr.read()
    process.wait()
    return out, errors


@pytest.mark.slow
def test_a_script_with_idle_lanes_ends_at_once_and_in_silence() -> None:
    with script("case.run('call')", "say(len(lane_threads()))") as process:
        assert process.communicate() == ("3\nlanes at exit: 0\n", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_a_script_whose_lane_hangs_ends_with_the_second_ctrl_c() -> None:
    with script("RELEASED = False", HANG.format(action="2B3", how="call")) as process:
        out, errors = interrupt(process, times=2)
        assert process.returncode == -signal.SIGINT
    assert out == "lanes at exit: 1\n"
    assert "KeyboardInterrupt\ninterrupted during " in errors
    assert "stage 2, backward, microbatch 3" in errors


def test_a_script_goes_on_and_ends_while_a_lane_hangs() -> None:
    body = "\n    ".join(HANG.format(action="1F1", how="1f1b").strip().splitlines())
    with script("RELEASED = False", GO_ON.format(body=body)) as process:
        out, errors = interrupt(process, times=2)
        assert (out, errors) == ("went on\nlanes at exit: 1\n", "")
        assert process.returncode == 0
