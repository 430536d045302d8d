"""Turns of the lanes, and lanes that run toy actions: order, messages, errors and draining, without a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.threads import LaneThreads, Turns, turns
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.orders import forward_only
from tests.runtime.gates import SAFETY_S

CHAIN = [set(), {0}, {1}]
SKIP = [set(), {0}, {0, 1}]
"""Stage 2 takes values of stages 0 and 1."""


# -- turns -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit, KeyboardInterrupt, MemoryError])
def test_any_error_comes_as_it_is(error: type[BaseException]) -> None:
    raised = error()

    def act(action: Action) -> None:
        raise raised

    with lanes(1) as own, pytest.raises(error) as caught:
        run(own, forwards(1, 1), act)
    assert caught.value is raised
