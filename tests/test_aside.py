"""A child's answer is what the work gives in place, and wherever there is no answer the work is done in place."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit import aside as module
from autosplit import progress
from autosplit.aside import aside, can_fork, checked, later, second_core, withdrawn_where_it_raises

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with second_core():
        yield


def _process() -> int:
    return os.getpid()


def _no_children() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return True


@pytest.mark.usefixtures("_two_cores")
def test_work_is_done_by_a_child_whose_answer_comes_back() -> None:
    with aside(lambda: (os.getpid(), {"a": [1.5, float("inf")]}, torch.Size([3]))) as other:
        process, *rest = other.result()
        assert other.result()[0] == process
    assert other.elsewhere
    assert process != os.getpid()
    assert rest == [{"a": [1.5, float("inf")]}, torch.Size([3])]
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_an_answer_larger_than_a_pipe_comes_whole() -> None:
    with aside(lambda: bytes(range(256)) * 20_000) as other:
        assert other.result() == bytes(range(256)) * 20_000


@pytest.mark.usefixtures("_two_cores")
def test_known_objects_come_back_as_themselves_and_need_not_be_picklable() -> None:
    class Local:
        """Cannot be pickled."""

    own: Any = Local()
    function = lambda: own  # noqa: E731
    with aside(lambda: [own, {"again": own}, function], known=(own, function)) as other:
        found = other.result()
    assert other.elsewhere
    assert [each is own for each in (found[0], found[1]["again"])] == [True, True]
    assert found[2] is function


@pytest.mark.usefixtures("_two_cores")
def test_a_child_that_dies_is_replaced_by_the_caller() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with aside(work) as other:
        assert other.elsewhere
        assert other.result() == here
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize("made", [lambda: lambda: 1, threading.Lock, lambda: iter(_Broken())])
def test_what_cannot_be_sent_is_made_in_place(made: Any) -> None:
    with aside(lambda: (os.getpid(), made())) as other:
        assert other.elsewhere
        assert other.result()[0] == os.getpid()


class _Broken:
    def __iter__(self) -> Iterator[int]:
        return (number for number in range(2))


class _Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(process: int) -> None:
    raise RuntimeError(f"nobody reads what {process} sent")


@pytest.mark.usefixtures("_two_cores")
def test_what_cannot_be_read_is_made_in_place() -> None:
    with aside(_Unreadable) as other:
        assert isinstance(other.result(), _Unreadable)


@pytest.mark.usefixtures("_two_cores")
def test_an_error_is_the_work_s_own_with_its_traceback() -> None:
    def work() -> None:
        raise KeyError("no such stage")

    with pytest.raises(KeyError, match="no such stage") as caught, aside(work) as other:
        other.result()
    assert caught.traceback[-1].name == "work"
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_an_error_of_the_caller_s_ends_the_child() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="mine"), aside(lambda: time.sleep(60)):
        raise ValueError("mine")
    assert time.monotonic() - began < 30
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_a_child_that_takes_far_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            time.sleep(60)
        return "in place"

    with aside(work) as other:
        assert other.elsewhere
        assert other.result() == "in place"
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_what_the_work_prints_and_warns_of_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        print("to read")
        print("to know", file=sys.stderr)
        warnings.warn("look out", UserWarning, stacklevel=1)
        return os.getpid()

    with pytest.warns(UserWarning, match="look out") as seen:
        process = _answer(work)
    assert process != os.getpid()
    assert [each.filename for each in seen] == [__file__]
    assert capsys.readouterr() == ("to read\n", "to know\n")


@pytest.mark.usefixtures("_two_cores")
def test_a_warning_that_is_an_error_is_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises(UserWarning, match="look out"),
            aside(lambda: warnings.warn("look out", stacklevel=1)) as other,
        ):
            other.result()


@pytest.mark.usefixtures("_two_cores")
def test_a_child_touches_no_bar_of_the_caller_s() -> None:
    class Bars:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def began(self, name: str, total: int | None) -> Bars:
            with self.lock:
                return self

        def moved(self, done: int, total: int | None) -> None:
            with self.lock:
                pass

        def ended(self) -> None:
            with self.lock:
                pass

    def work() -> int:
        progress.update(1)
        with progress.phase("inside"):
            progress.update(2)
        return os.getpid()

    bars = Bars()
    with progress.listening(bars), progress.phase("outside"), bars.lock, aside(work) as other:
        assert other.result() != os.getpid()


@pytest.mark.usefixtures("_two_cores")
def test_a_child_has_one_thread_and_no_children() -> None:
    with aside(lambda: (torch.get_num_threads(), can_fork())) as other:
        assert other.elsewhere
        assert other.result() == (1, False)


def _answer(work: Callable[[], int]) -> int:
    with aside(work) as other:
        return other.result()


def _pid_aside(*, worth: bool = True) -> int:
    with aside(_process, worth=worth) as other:
        return other.result()


def test_nothing_is_forked_where_it_is_unsafe_or_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert _pid_aside() == here, "a library forks nobody's process"
    with second_core():
        assert _pid_aside(worth=False) == here
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(_pid_aside()))
        thread.start()
        thread.join()
        assert found == [here]
        with aside(_idle), aside(_idle), aside(_idle):
            assert _pid_aside() == here, "children are at work on all cores"
        assert _pid_aside() != here
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            assert _pid_aside() == here
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _: {0})
            assert _pid_aside() == here
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", _no_room)
            assert _pid_aside() == here
        with aside(_nothing) as first, aside(_nothing) as second, aside(_nothing) as third:
            for each in (first, second, third):
                each.result()
            assert _pid_aside() != here, "children that are done work no more"
    assert _pid_aside() == here
    assert _no_children()


def _idle() -> None:
    time.sleep(60)


def _no_room() -> int:
    raise BlockingIOError("Resource temporarily unavailable")


_INTERRUPTED = """
    import os, signal, sys, threading, time, warnings
    os.sched_getaffinity = lambda _: {0, 1}
    from autosplit.aside import aside, second_core

    warnings.simplefilter("error")
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    try:
        with second_core(), aside(lambda: time.sleep(60)) as other:
            print(other._child.process, flush=True)
            other.result()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(130)
"""


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "caller alone"])
def test_ctrl_c_ends_both_without_a_word(group: bool, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(textwrap.dedent(_INTERRUPTED))
    caller = subprocess.Popen(
        [sys.executable, "-c", "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
         " runpy.run_path(sys.argv[1], run_name='__main__')", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert caller.stdout is not None
    child = int(caller.stdout.readline())
    (os.killpg if group else os.kill)(caller.pid, signal.SIGINT)
    said, complaints = caller.communicate(timeout=60)
    assert (said, complaints, caller.returncode) == ("interrupted\n", "", 130)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.usefixtures("_two_cores")
def test_checks_are_made_meanwhile() -> None:
    here, made = os.getpid(), list[int]()

    def check() -> None:
        made.append(os.getpid())

    def work() -> str:
        later(check)
        later(check)
        return "done"

    assert checked(work) == "done"
    assert made == [], "a child's list is its own"
    later(check)
    assert made == [here]
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize("known", [False, True], ids=["at the end", "on the way"])
def test_a_check_that_fails_is_made_again_in_its_place(known: bool) -> None:
    steps: list[str] = []

    def check() -> None:
        raise ValueError("not the model")

    def work() -> None:
        steps.append("begun")
        later(check)
        if known:
            time.sleep(0.5)
            with aside(_process):
                steps.append("went on")
        steps.append("done")

    with pytest.raises(ValueError, match="not the model"):
        checked(work)
    assert steps == (["begun", "begun"] if known else ["begun", "done", "begun"])
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_what_a_check_returned_can_be_asked_for() -> None:
    here = os.getpid()
    assert checked(lambda: later(os.getpid)()) != here
    assert later(os.getpid)() == here
    tries: list[int] = []

    def check() -> int:
        if len(tries) == 1:
            raise ValueError("not the first time")
        return len(tries)

    def work() -> int:
        tries.append(0)
        return later(check)()

    assert checked(work) == 2
    assert _no_children()


@pytest.mark.usefixtures("_two_cores")
def test_an_error_behind_a_check_that_holds_is_raised_at_once() -> None:
    steps: list[str] = []

    def work() -> None:
        steps.append("begun")
        later(_nothing)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checked(work)
    assert steps == ["begun"]


@pytest.mark.usefixtures("_two_cores")
def test_checks_of_what_raised_are_neither_waited_for_nor_held_against_the_rest() -> None:
    began, steps = time.monotonic(), list[str]()

    def work() -> str:
        steps.append("begun")
        waited = later(os.getpid)
        with contextlib.suppress(KeyError), withdrawn_where_it_raises():
            later(_idle)
            raise KeyError("not this way")
        return str(waited())

    assert checked(work) != str(os.getpid())
    assert steps == ["begun"]
    assert time.monotonic() - began < 30
    assert _no_children()


def _nothing() -> None:
    pass
