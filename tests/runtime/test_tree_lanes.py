"""Microbatches of a model's own Python overlap on lanes; a failure ends all threads; nothing stays behind."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autosplit.errors import DeviceError
from autosplit.runtime.ambient import ThreadState
from autosplit.runtime.tree_lanes import Crossing
from tests.runtime.tree_cases import CHUNKS, MARK, SAFETY_S, STAGES, Case, notes, own_threads, value

PLACES = [(f"gates.{stage}", microbatch) for stage in range(STAGES) for microbatch in range(CHUNKS)]
SPOT: contextvars.ContextVar[str] = contextvars.ContextVar("SPOT", default="nowhere")


class Boom(Exception):
    """What a test raises inside a unit."""


def raiser(error: BaseException) -> Any:
    def trip() -> None:
        raise error

    return trip


# -- overlap ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("second", range(1, STAGES))
def test_two_microbatches_are_in_two_lanes_at_once(second: int) -> None:
    case, meeting = Case(), threading.Barrier(2)

    def meet() -> None:
        meeting.wait(SAFETY_S)  # whoever is alone here breaks the barrier, and the call raises

    with case.handlers.at({(f"gates.{second}", 0): meet, ("gates.0", 1): meet}):
        case.call()
    case.assert_works()


def test_all_lanes_work_at_once() -> None:
    case, meeting = Case(), threading.Barrier(STAGES)
    places = {(f"gates.{stage}", STAGES - 1 - stage): lambda: meeting.wait(SAFETY_S) for stage in range(STAGES)}
    with case.handlers.at(places):
        case.call()
    assert len({case.handlers.threads[place] for place in places}) == STAGES


def test_a_lane_has_one_microbatch_at_a_time() -> None:
    case, inside, most = Case(), dict.fromkeys(range(STAGES), 0), []
    lock = threading.Lock()

    def pass_through(name: str, microbatch: int) -> None:
        if name:
            with lock:
                inside[int(name[-1])] += 1
                most.append(inside[int(name[-1])])
            for _ in range(50):
                torch.randn(10)
            with lock:
                inside[int(name[-1])] -= 1

    with case.handlers.at({}, pass_through):
        case.call()
    assert most == [1] * (STAGES * CHUNKS)


def test_the_lowest_microbatch_that_waits_is_next() -> None:
    crossing, order, begun = Crossing(lanes=1, microbatches=6), [], threading.Event()

    def act(number: int) -> None:
        if number != 3:
            assert begun.wait(SAFETY_S)
        with crossing.held(0, microbatch=number, unit="unit"):
            begun.set()
            end_s = time.monotonic() + SAFETY_S
            while number == 3 and len(crossing._lanes[0].waiting) < 5:
                assert time.monotonic() < end_s
            order.append(number)

    crossing.run(act, ThreadState.current())
    assert order == [3, 0, 1, 2, 4, 5]


def test_every_microbatch_has_one_intra_op_thread_and_the_caller_its_own_number() -> None:
    case, found, before = Case(), [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with case.handlers.at({}, lambda name, microbatch: found.append(torch.get_num_threads())):
            case.call()
        assert torch.get_num_threads() == 3
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert set(found) == {1}
    assert fresh == [3]


def test_the_callers_modes_hold_in_the_threads() -> None:
    case, found = Case(), []

    def look(name: str, microbatch: int) -> None:
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, SPOT.get()))

    token = SPOT.set("the caller")
    try:
        for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
            with mode():
                case.call()  # this kind of call is then known
                with case.handlers.at({}, look):
                    case.call()
            assert len(set(case.handlers.threads.values())) == CHUNKS
    finally:
        SPOT.reset(token)
    off = False, torch.get_autocast_dtype("cpu")
    kinds = [(False, False, off), (False, True, off), (True, False, (True, torch.bfloat16))]
    assert found == [(*kind, "the caller") for kind in kinds for _ in range((STAGES + 1) * CHUNKS)]


def test_hooks_on_saved_tensors_are_called_in_the_callers_thread() -> None:
    case, threads = Case(), set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), case.handlers.at({}):
        case.call().sum().backward()
    assert threads == {threading.current_thread()}
    assert {place[1] for place in case.handlers.passed} == {0}


def test_two_callers_at_once() -> None:
    case, errors = Case(), []
    meeting = threading.Barrier(2)

    def work() -> None:
        try:
            meeting.wait(SAFETY_S)
            for _ in range(5):
                case.assert_works()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all("forward" not in module.__dict__ for module in case.model.modules())


# -- failure ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES[::3])
def test_a_units_own_exception(place: tuple[str, int]) -> None:
    case, error = Case(), Boom("a unit fails")
    with case.handlers.at({place: raiser(error)}), pytest.raises(Boom) as caught:
        case.call()
    assert caught.value is error
    assert notes(error) == [f"in unit {place[0]!r}, stage {place[0][-1]}, microbatch {place[1]}"]
    assert not own_threads()
    case.assert_works()


def test_an_exception_in_the_models_own_python() -> None:
    case, error = Case(), Boom("the root fails")
    with case.handlers.at({("", 2): raiser(error)}), pytest.raises(Boom) as caught:
        case.call()
    assert caught.value is error
    assert notes(error) == ["in the model's own Python, microbatch 2"]
    assert not own_threads()
    case.assert_works()


def test_of_several_exceptions_the_lowest_microbatchs_is_raised() -> None:
    case, meeting = Case(), threading.Barrier(2)

    def fail(number: int) -> Any:
        def trip() -> None:
            meeting.wait(SAFETY_S)
            raise Boom(number)

        return trip

    with case.handlers.at({("gates.1", 0): fail(0), ("gates.0", 1): fail(1)}), pytest.raises(Boom, match="0"):
        case.call()
    assert not own_threads()


def test_after_a_failure_no_further_unit_begins() -> None:
    case, failed = Case(), threading.Event()

    def fail() -> None:
        failed.set()
        raise Boom

    def wait() -> None:
        assert failed.wait(SAFETY_S)
        end_s = time.monotonic() + SAFETY_S
        while len(own_threads()) > 1:  # all others have ended; this one is in its unit and ends at the next door
            assert time.monotonic() < end_s

    with case.handlers.at({("gates.1", 0): fail, ("gates.0", 1): wait}), pytest.raises(Boom):
        case.call()
    assert set(case.handlers.passed) <= {("gates.0", 0), ("gates.1", 0), ("gates.0", 1)}


def join_all() -> None:
    """Wait until no microbatch's thread is left; one whose start Ctrl-C interrupted has yet to begin."""
    end_s = time.monotonic() + SAFETY_S
    while (threads := own_threads()) and time.monotonic() < end_s:
        for thread in threads:
            if thread.ident is None:
                threading.Event().wait(1e-3)
            else:
                thread.join(SAFETY_S)
    assert not own_threads()


@pytest.fixture
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_pythons_own_handler")
@pytest.mark.parametrize("place", PLACES[::4])
def test_ctrl_c(place: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    case, stopped, stop = Case(), threading.Event(), Crossing.stop

    def told(crossing: Crossing) -> None:
        stop(crossing)
        stopped.set()

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(SAFETY_S)

    monkeypatch.setattr(Crossing, "stop", told)
    with case.handlers.at({place: press}), pytest.raises(KeyboardInterrupt) as caught:
        case.call()
    assert f"unit {place[0]!r}, stage {place[0][-1]}, microbatch {place[1]}" in notes(caught.value)[-1]
    join_all()  # one that was about to begin when Ctrl-C came ends by itself
    case.assert_works()


@pytest.mark.usefixtures("_pythons_own_handler")
def test_a_second_ctrl_c_leaves_a_unit_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    case, free, late, pressed = Case(), threading.Event(), Crossing._late, []

    def press_again(crossing: Crossing) -> Any:
        if crossing._stopped and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return late(crossing)

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert free.wait(SAFETY_S)

    monkeypatch.setattr(Crossing, "_late", press_again)
    with case.handlers.at({("gates.0", 0): hang}), pytest.raises(KeyboardInterrupt):
        case.call()
    assert own_threads()
    free.set()
    join_all()
    monkeypatch.undo()
    case.assert_works()


def test_a_unit_that_takes_too_long_is_given_up() -> None:
    case, free = Case(timeout_s=0.05), threading.Event()
    with case.handlers.at({("gates.1", 0): lambda: free.wait(SAFETY_S)}), pytest.raises(DeviceError) as caught:
        case.call()
    assert "unit 'gates.1', stage 1, microbatch 0 did not end within 0.05 s" in str(caught.value)
    free.set()
    join_all()
    case.run.timeout_s = None
    case.assert_works()


def test_an_exception_keeps_nothing_alive() -> None:
    case = Case()
    x = value().requires_grad_()
    alive = weakref.ref(x)
    gc.disable()
    try:
        with case.handlers.at({("gates.2", 1): raiser(Boom())}), contextlib.suppress(Boom):
            case.call(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


# -- what stays ------------------------------------------------------------------------------------------------------
def test_nothing_of_a_call_is_on_the_model() -> None:
    case = Case()
    before = {name: dict(module.__dict__) for name, module in case.model.named_modules()}
    found: list[Any] = []

    def look(name: str, microbatch: int) -> None:
        if (name, microbatch) == ("gates.1", 0):
            found.append(copy.deepcopy(case.model))
            found.append(list(case.model.state_dict()))

    with case.handlers.at({}, look):
        case.call()
    assert {name: dict(module.__dict__) for name, module in case.model.named_modules()} == before
    twin, names = found  # made while the call was under way
    assert names == list(case.model.state_dict())
    twin.gates[0].layer.weight.data.zero_()
    assert torch.equal(twin.gates[0](value(), MARK), torch.tanh(twin.gates[0].layer(value())))
    assert twin.gates[0](value(), MARK).std(0).abs().max() == 0


def test_what_was_a_unit_can_be_pickled_between_calls() -> None:
    case = Case()
    before = pickle.dumps(case.model.gates[0].layer)
    case.call()
    assert pickle.dumps(case.model.gates[0].layer) == before


def test_hooks_of_the_user_see_the_whole_batch_once() -> None:
    case, seen = Case(), []
    handle = case.model.gates[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    case.run.call((value(), MARK.clone().requires_grad_()), {})  # a kind of call that is not known
    seen.clear()
    case.run.call((value(), MARK.clone().requires_grad_()), {})
    assert seen == [len(MARK)]
    handle.remove()


def test_two_hundred_calls_leave_no_threads_and_no_memory() -> None:
    case = Case()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    for _ in range(3):
        case.call(value().requires_grad_()).sum().backward()
    before, threads = tensors(), threading.active_count()
    for _ in range(200):
        case.call(value().requires_grad_()).sum().backward()
    assert threading.active_count() == threads
    assert tensors() <= before  # fewer where something that an earlier test left goes meanwhile
