"""The life of the lanes' threads: when they start and end, what they hold, and who may use them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.options import Sample
from autosplit.schedule.action import Action
from tests.runtime.gates import (
    CHUNKS,
    MARK,
    SAFETY_S,
    STAGES,
    VALUE,
    Boom,
    Case,
    Gates,
    case_of,
    hold,
    lane_threads,
    raiser,
    split,
)

ROOT = Path(__file__).parents[2]
ROWS = torch.arange(48.0).reshape(8, 6).cos()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(STAGES)))


def new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return sorted(lane_threads() - before, key=lambda thread: thread.name)


def assert_ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(SAFETY_S)
        assert not thread.is_alive()


# -- start and end ---------------------------------------------------------------------------------------------------
def test_none_before_the_first_call_then_one_per_lane_for_good() -> None:
    before = lane_threads()
    pipe = split(model())
    pipe.prepare(Sample(ROWS))
    assert new_since(before) == []
    pipe(ROWS)
    own = new_since(before)
    assert sorted(thread.name for thread in own) == [f"autosplit lane {lane}" for lane in range(STAGES)]
    assert all(thread.daemon for thread in own)
    for _ in range(3):
        pipe(ROWS).sum().backward()
        pipe.train_step(ROWS, target=ROWS, loss_fn=nn.MSELoss())
        assert new_since(before) == own


@pytest.mark.parametrize("used", ["called", "trained", "failed"])
def test_they_end_with_the_pipe(used: str) -> None:
    before, case = lane_threads(), Case(schedule="1f1b")
    own = new_since(before)
    assert len(own) == STAGES
    if used == "trained":
        case.run("step")
    if used == "failed":
        with case.gates.at({Action(1, "B", 1): raiser(Boom())}), contextlib.suppress(Boom):
            case.run("step")
    del case
    gc.collect()
    assert_ended(own)


def test_they_end_when_the_model_is_taken_back_and_start_anew() -> None:
    before, pipe = lane_threads(), split(model())
    pipe(ROWS)
    own = new_since(before)
    module = pipe.unsplit()
    assert not any(thread.is_alive() for thread in own)
    torch.testing.assert_close(pipe(ROWS), module(ROWS))
    assert len(new_since(before)) == STAGES
    pipe.unsplit()


def test_a_backward_after_the_pipe_is_gone_leaves_no_thread() -> None:
    before, plain = lane_threads(), model()
    pipe = split(copy.deepcopy(plain))
    parameters, loss = list(pipe.parameters()), pipe(ROWS).sum()
    first = new_since(before)
    del pipe
    gc.collect()
    assert_ended(first)
    loss.backward()
    plain(ROWS).sum().backward()
    for mine, other in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    second = new_since(before)
    del loss
    gc.collect()
    assert_ended(second)


# -- threads of torch's own ------------------------------------------------------------------------------------------
def test_lanes_have_one_intra_op_thread_and_nobody_else_does() -> None:
    before, found, later = torch.get_num_threads(), {}, []
    torch.set_num_threads(3)
    try:
        case = Case()

        def count(stage: int) -> Callable[[], None]:
            return lambda: found.update({stage: torch.get_num_threads()})

        with case.gates.at({Action(stage, "F", CHUNKS - 1): count(stage) for stage in range(STAGES)}):
            case.run("call")
        assert found == dict.fromkeys(range(STAGES), 1)
        assert torch.get_num_threads() == 3
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


# -- callers ---------------------------------------------------------------------------------------------------------


def test_a_second_caller_waits_until_the_lanes_are_free() -> None:
    """Lanes that two steps share, in another order each, would wait for each other."""
    case, inside, release, second, found = case_of("threads", "call"), *(threading.Event() for _ in range(3)), []

    def last() -> None:
        inside.set()
        hold(until=release)

    def first() -> None:
        if inside.is_set():
            second.set()

    callers = [threading.Thread(target=lambda: found.append(case.pipe(case.value, MARK))) for _ in range(2)]
    with case.gates.at({Action(STAGES - 1, "F", CHUNKS - 1): last, Action(0, "F", 0): first}):
        callers[0].start()
        hold(until=inside)
        callers[1].start()
        assert not second.wait(0.3)  # it may well begin later than that, but never while the first is under way
        release.set()
        hold(until=second)
        assert_ended(callers)
    for output in found:
        torch.testing.assert_close(output, case.plain(case.value, MARK))


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_call_from_inside_a_stage_is_refused(kind: Any) -> None:
    case = case_of("threads", "call")

    def again() -> None:
        with torch.enable_grad():
            case.pipe(case.value, MARK)

    with (
        case.gates.at({Action(1, kind, 1): again}),
        pytest.raises(RuntimeError, match=r"from inside one of its own stages.*lanes='inline'"),
    ):
        case.run("call")
    case.assert_works()


def test_the_model_may_be_taken_back_while_another_thread_is_in_a_step() -> None:
    case, inside, release, found = Case(), threading.Event(), threading.Event(), []

    def work() -> None:
        inside.set()
        hold(until=release)

    caller = threading.Thread(target=lambda: found.append(case.pipe(case.value, MARK)))
    with case.gates.at({Action(2, "F", 3): work}):
        caller.start()
        hold(until=inside)
        closer = threading.Thread(target=case.pipe.unsplit)
        closer.start()
        release.set()
        assert_ended([caller, closer])
    torch.testing.assert_close(found[0], case.plain(VALUE, MARK))
    case.assert_works()


# -- what is held ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["call", "no graph", "step", "failed"])
def test_an_idle_lane_holds_no_tensor(how: str) -> None:
    case = Case(schedule="1f1b")
    gates: Gates = case.gates

    def use() -> list[threading.Event]:
        value, target = VALUE.clone().requires_grad_(), VALUE.clone()
        held = [value, target]
        if how == "step":
            case.pipe.train_step(value, MARK, target=target, loss_fn=nn.MSELoss())
        elif how == "failed":
            with gates.at({Action(1, "B", 2): raiser(Boom())}), contextlib.suppress(Boom):
                case.pipe.train_step(value, MARK, target=target, loss_fn=nn.MSELoss())
        else:
            with torch.set_grad_enabled(how == "call"):
                held.append(case.pipe(value, MARK))
        gone = [threading.Event() for _ in held]
        for tensor, event in zip(held, gone, strict=True):
            weakref.finalize(tensor, event.set)
        return gone

    gone = use()
    gc.collect()
    for event in gone:  # a lane lets go of a step a moment after the caller has gone on
        assert event.wait(10)


# -- in a process of its own -----------------------------------------------------------------------------------------
FORK = """
import os, sys, torch
from tests.runtime.gates import Case, lane_threads
case = Case(schedule="1f1b")
from tests.runtime.gates import MARK, VALUE

def works():
    with torch.no_grad():
        assert torch.allclose(case.pipe(VALUE, MARK), case.plain(VALUE, MARK))
    if plain_backward_works:
        case.assert_works()

assert len(lane_threads()) == 3
child = os.fork()
if not child:
    try:  # builds of torch with CUDA refuse any backward in a child of a process that has had one
        case.of_plain()
        plain_backward_works = True
    except RuntimeError as error:
        assert "fork" in str(error)
        plain_backward_works = False
    assert not lane_threads()
    works()
    assert len(lane_threads()) == 3
    case.pipe.unsplit()
    works()
    sys.exit(7)
unused = os.fork()
if not unused:
    sys.exit(8)
codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in (child, unused)]
case.assert_works()
print(codes)
"""
GROWTH = """
import gc, re, threading
import torch
from torch import nn
from tests.runtime.gates import split

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

def steps(times):
    for step in range(times):
        value = torch.ones(8, 6) * (step % 7)
        if step % 2:
            loss(pipe(value), value).backward()
        else:
            pipe.train_step(value, target=value, loss_fn=loss)
        pipe.zero_grad()

def measure():
    gc.collect()
    return threading.active_count(), sorted(t.ident for t in threading.enumerate()), len(gc.get_objects()), resident()

loss = nn.MSELoss()
pipe = split(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), schedule="1f1b")
steps(200)
first = measure()
steps(1000)
second = measure()
assert second[:2] == first[:2], (first, second)
assert abs(second[2] - first[2]) <= 10, (first[2], second[2])
assert second[3] <= 1.01 * first[3], (first[3], second[3])
print("flat")
"""


def script(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=5 * SAFETY_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    assert script(FORK) == "[7, 8]\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc here")
def test_a_thousand_steps_leave_threads_memory_and_objects_as_they_are() -> None:
    assert script(GROWTH) == "flat\n"
