"""An action that hangs is named, its step is given up, and the lane gets a new thread."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.errors import DeviceError
from autosplit.runtime.lanes import threads as threads_of_autosplit
from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.threads import LaneThreads, Turns, turns
from autosplit.schedule.action import Action, describe
from autosplit.schedule.catalog import build
from autosplit.schedule.order import lane_lists
from autosplit.schedule.orders import forward_only
from tests.pairwise import in_turn
from tests.runtime.gates import HOWS, SAFETY_S, Case, case_of, hold, split

SHORT_S = 0.3


@pytest.fixture
def short() -> Any:
    """Return what gives a pipe little patience until the test ends."""
    given: list[tuple[Any, Any]] = []

    def give(pipe: Any) -> None:
        given.append((pipe, pipe.lane_timeout_s))
        pipe.lane_timeout_s = SHORT_S

    yield give
    for pipe, before in given:
        pipe.lane_timeout_s = before


@in_turn(how=HOWS, action=[Action(0, "F", 0), Action(1, "F", 2), Action(2, "B", 1), Action(0, "B", 3)])
def test_an_action_that_hangs_is_named_and_left(short: Callable[[Any], None], how: str, action: Action) -> None:
    case, release = case_of("threads", how), threading.Event()
    case.run(how)
    before, threads = {name: leaf.grad for name, leaf in case.leaves().items()}, case.threads()
    values = {name: None if grad is None else grad.tolist() for name, grad in before.items()}
    limit_s = case.pipe.lane_timeout_s
    short(case.pipe)
    with case.gates.at({action: lambda: hold(until=release)}), pytest.raises(DeviceError) as caught:
        case.run(how)
    case.pipe.lane_timeout_s = limit_s
    try:
        assert describe(action) in str(caught.value)
        assert f"did not end within {SHORT_S} s" in str(caught.value)
        assert "pipe.lane_timeout_s" in str(caught.value)
        assert caught.value.__context__ is None
        assert {n: None if t.grad is None else t.grad.tolist() for n, t in case.leaves().items()} == values
        case.assert_works()
        assert threads[action.stage].is_alive()
        assert case.threads()[action.stage] is not threads[action.stage]
        case.run(how)
        values = {name: leaf.grad.tolist() for name, leaf in case.leaves().items()}
    finally:
        release.set()
    threads[action.stage].join(SAFETY_S)
    assert not threads[action.stage].is_alive()
    assert {name: leaf.grad.tolist() for name, leaf in case.leaves().items()} == values
    case.assert_works()


def test_a_lane_that_hangs_after_another_failed_is_left(short: Callable[[Any], None]) -> None:
    case, inside, release = Case(), threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        hold(until=release)

    def fail() -> None:
        hold(until=inside)
        raise ZeroDivisionError

    short(case.pipe)
    with case.gates.at({Action(2, "F", 0): fail, Action(0, "F", 1): hang}), pytest.raises(ZeroDivisionError):
        case.run("call")
    case.pipe.lane_timeout_s = None
    case.assert_works()
    release.set()


def test_lanes_that_are_late_one_after_another_are_left_each(
    short: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes 0 and 1 hang at one time of the clock; lane 2 did all that it could and stays."""
    case, release, held = Case(), threading.Event(), threading.Event()
    threads = case.threads()

    def hang() -> None:
        held.set()
        hold(until=release)

    def hang_later() -> None:
        hold(until=held)  # begins while lane 0 hangs already
        clock.now_s += 2 * SHORT_S
        hold(until=release)

    short(case.pipe)
    late = "stage 0, forward, microbatch 1; stage 1, forward, microbatch 0 did not end"
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        with (
            case.gates.at({Action(0, "F", 1): hang, Action(1, "F", 0): hang_later}),
            pytest.raises(DeviceError, match=late),
        ):
            case.run("call")
    case.pipe.lane_timeout_s = None
    assert [now is before for now, before in zip(case.threads(), threads, strict=True)] == [False, False, True]
    case.assert_works()
    release.set()
    for thread in threads[:2]:
        thread.join(SAFETY_S)
        assert not thread.is_alive()


class Clock:
    """A clock that only actions move on; ``looked`` tells that the caller has looked for actions that are late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.looked = threading.Event()
        late = LaneThreads._late

        def look(own: LaneThreads, board: Any) -> dict[int, Action]:
            found = late(own, board)
            self.looked.set()
            return found

        monkeypatch.setattr(LaneThreads, "_late", look)
        monkeypatch.setattr(threads_of_autosplit.time, "monotonic", lambda: self.now_s)


def test_a_slow_step_of_short_actions_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action is late by its own time: not by the step's, nor while its lane waits for another's two."""
    with monkeypatch.context() as patch:
        clock, own, done = Clock(patch), LaneThreads(2, timeout_s=0.05), []

        def act(action: Action) -> None:
            clock.now_s += 0.04
            clock.looked.clear()
            hold(until=clock.looked)
            done.append(action)

        own.run(turns(lane_lists(build("gpipe", stages=2, microbatches=1), [set(), {0}])), act, ThreadState.current())
        own.close()
    assert len(done) == 4


def test_an_action_that_is_late_by_that_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        clock, own, given_up = Clock(patch), LaneThreads(1, timeout_s=0.05), threading.Event()

        def act(action: Action) -> None:
            clock.now_s += 0.06
            hold(until=given_up)

        with pytest.raises(DeviceError, match=r"stage 0, forward, microbatch 0 did not end within 0\.05 s"):
            own.run(turns(lane_lists(forward_only(1, 1), [set()])), act, ThreadState.current())
        given_up.set()
        own.close()


# -- the setting -----------------------------------------------------------------------------------------------------
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def test_the_limit_is_half_an_hour_and_can_be_set_before_and_after_the_first_call() -> None:
    pipe = split(model())
    assert pipe.lane_timeout_s == 1800
    assert autosplit(model(), devices=["cpu"] * 2, lanes="threads").lane_timeout_s == 1800
    pipe.lane_timeout_s = 7
    pipe(torch.ones(8, 4))
    assert pipe.lane_timeout_s == pipe._core.threads.timeout_s == 7
    pipe.lane_timeout_s = 8.5
    assert pipe.lane_timeout_s == pipe._core.threads.timeout_s == 8.5


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("called", [False, True], ids=["new", "called"])
def test_the_limit_goes_with_copies(name: str, called: bool) -> None:
    pipe, value = split(model()), torch.ones(8, 4)
    pipe.lane_timeout_s = 11.5
    if called:
        pipe(value)
    twin = COPIES[name](pipe)
    assert twin.lane_timeout_s == 11.5
    twin.lane_timeout_s = 2000
    twin(value)
    assert pipe.lane_timeout_s == 11.5
    assert twin._core.threads.timeout_s == 2000


CHAIN = [set(), {0}, {1}]
SKIP = [set(), {0}, {0, 1}]
"""Stage 2 takes values of stages 0 and 1."""


# -- lanes that run toy actions --------------------------------------------------------------------------------------
@contextlib.contextmanager
def lanes(count: int, *, timeout_s: float | None = SAFETY_S) -> Iterator[LaneThreads]:
    own = LaneThreads(count, timeout_s=timeout_s)
    try:
        yield own
    finally:
        own.close()


def run(own: LaneThreads, made: Turns, act: Callable[[Action], None]) -> None:
    own.run(made, act, ThreadState.current())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sources", [CHAIN, SKIP], ids=["chain", "skip"])
def test_actions_run_on_their_lanes_in_order_and_after_what_they_need(schedule: str, sources: list[set[int]]) -> None:
    made, done = turns(lane_lists(build(schedule, stages=3, microbatches=6), sources)), []
    with lanes(3) as own:
        run(own, made, lambda action: done.append((action, threading.current_thread().name)))
    at = {action: position for position, (action, _) in enumerate(done)}
    numbers = {t.number: t.entry for turns_of_lane in made for t in turns_of_lane}
    for lane, turns_of_lane in enumerate(made):
        name = f"autosplit lane {lane}"
        assert [action for action, on in done if on == name] == [t.entry for t in turns_of_lane]
        assert all(at[numbers[need]] < at[t.entry] for t in turns_of_lane for need in t.needs)


@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit, KeyboardInterrupt, MemoryError])
def test_any_error_comes_as_it_is(error: type[BaseException]) -> None:
    raised = error()

    def act(action: Action) -> None:
        raise raised

    with lanes(1) as own, pytest.raises(error) as caught:
        run(own, turns(lane_lists(forward_only(1, 1), [set()])), act)
    assert caught.value is raised
