"""Turns of the lanes, and lanes that run toy actions: order, messages, errors and draining, without a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.threads import LaneThreads, Turn, Turns, backwards, turns
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.orders import forward_only
from tests.runtime.gates import SAFETY_S

CHAIN = [set(), {0}, {1}]
SKIP = [set(), {0}, {0, 1}]
"""Stage 2 takes values of stages 0 and 1."""


def turn(text: str, number: int, needs: tuple[int, ...], tells: tuple[int, ...]) -> Turn:
    return Turn(Action.parse(text), number, needs, tells)


# -- turns -----------------------------------------------------------------------------------------------------------


def test_turns_with_a_skip_and_backwards() -> None:
    assert turns(build("gpipe", stages=3, microbatches=1), SKIP) == (
        (turn("0F0", 0, (), (1, 2)), turn("0B0", 1, (3, 5), ())),
        (turn("1F0", 2, (0,), (2,)), turn("1B0", 3, (5,), (0,))),
        (turn("2F0", 4, (0, 2), ()), turn("2B0", 5, (), (0, 1))),
    )


def test_backwards_alone_wait_for_no_forward_and_descend() -> None:
    assert turns(backwards(forward_only(2, 2)), [set(), {0}]) == (
        (turn("0B1", 0, (2,), ()), turn("0B0", 1, (3,), ())),
        (turn("1B1", 2, (), (0,)), turn("1B0", 3, (), (0,))),
    )


def test_a_stage_that_takes_nothing_waits_for_nobody_nor_for_itself() -> None:
    assert turns(forward_only(2, 1), [set(), {1}]) == ((turn("0F0", 0, (), ()),), (turn("1F0", 1, (), ()),))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sources", [CHAIN, SKIP], ids=["chain", "skip"])
def test_each_need_is_told_to_the_lane_that_has_it(schedule: str, sources: list[set[int]]) -> None:
    made = turns(build(schedule, stages=3, microbatches=5), sources)
    told = {(t.number, lane) for own in made for t in own for lane in t.tells}
    assert told == {(need, lane) for lane, own in enumerate(made) for t in own for need in t.needs}
    assert sorted(t.number for own in made for t in own) == list(range(3 * 2 * 5))


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


def forwards(stages: int, microbatches: int) -> Turns:
    """Return forwards of stages that take nothing of each other."""
    return turns(forward_only(stages, microbatches), [set()] * stages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sources", [CHAIN, SKIP], ids=["chain", "skip"])
def test_actions_run_on_their_lanes_in_order_and_after_what_they_need(schedule: str, sources: list[set[int]]) -> None:
    made, done = turns(build(schedule, stages=3, microbatches=6), sources), []
    with lanes(3) as own:
        run(own, made, lambda action: done.append((action, threading.current_thread().name)))
    at = {action: position for position, (action, _) in enumerate(done)}
    numbers = {t.number: t.action for turns_of_lane in made for t in turns_of_lane}
    for lane, turns_of_lane in enumerate(made):
        name = f"autosplit lane {lane}"
        assert [action for action, on in done if on == name] == [t.action for t in turns_of_lane]
        assert all(at[numbers[need]] < at[t.action] for t in turns_of_lane for need in t.needs)


def test_a_need_may_be_told_before_it_is_asked_for() -> None:
    """The second lane's inbox holds messages of later microbatches when it looks for the first one of another."""
    made = (
        (turn("0F0", 0, (), (2,)), turn("0F1", 1, (), (2,)), turn("0F2", 2, (), (1, 2))),
        (turn("1F2", 3, (2,), (2,)),),
        (turn("2F2", 4, (3,), ()), turn("2F0", 5, (0, 1), ()), turn("2F1", 6, (2,), ())),
    )
    done: list[str] = []
    with lanes(3) as own:
        run(own, made, lambda action: done.append(str(action)))
    assert [text for text in done if text[0] == "2"] == ["2F2", "2F0", "2F1"]


@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit, KeyboardInterrupt, MemoryError])
def test_any_error_comes_as_it_is(error: type[BaseException]) -> None:
    raised = error()

    def act(action: Action) -> None:
        raise raised

    with lanes(1) as own, pytest.raises(error) as caught:
        run(own, forwards(1, 1), act)
    assert caught.value is raised
