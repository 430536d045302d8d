"""Work that a second core does meanwhile: a forked child has all objects, works out one thing and sends it back.

    caller ── fork ──► its own work ──────────────► result()
                └────► work() ──► pickled ──► pipe ────┘

Only inside of `second_core`, which the command line opens: a process of somebody else's may hold locks and threads that
do not survive a fork. Wherever a child is of no use, or ends without an answer, `result` does the work in place: what
comes back is the same, and an error is the work's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from autosplit.progress import silent
from autosplit.sent import pickled, unpickled

Result = TypeVar("Result")

_ALLOWED: ContextVar[bool] = ContextVar("autosplit_second_core", default=False)
_CHILDREN: ContextVar[tuple[_Child, ...]] = ContextVar("autosplit_children", default=())
_CHECKS: ContextVar[_Checks | None] = ContextVar("autosplit_checks", default=None)

_PATIENCE_S = 60.0
"""A child that is not done so long after the caller is, or four times as long as the caller took, is given up."""
_PIECE_BYTES = 2**20
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def second_core() -> Iterator[None]:
    """Let work inside the block be done aside where that is safe, by children of this process."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def can_fork() -> bool:
    """Tell whether a child would be safe and of use.

    Not on one core, nor where more children than cores work already; not from another thread than the main one; not
    with an accelerator, whose driver and whose threads of autograd's do not survive a fork; on Linux alone.
    """
    if not _ALLOWED.get() or not hasattr(os, "sched_getaffinity") or not hasattr(os, "fork"):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or sum(child.busy for child in _CHILDREN.get()) > cores:
        return False
    import torch

    return not torch.accelerator.is_available()


@contextlib.contextmanager
def aside(work: Callable[[], Result], *, known: Sequence[Any] = (), worth: bool = True) -> Iterator[Aside[Result]]:
    """Begin ``work`` on another core, as far as that is safe; inside the block its `Aside.result` can be asked for.

    The work must change nothing that the caller sees. ``known`` are objects of the caller's that may be part of the
    result: they come back as themselves and need not be picklable. ``worth``: whether the work is more than a fork and
    its way back, some hundredths of a second. The child ends with the block.
    """
    checks = _CHECKS.get()
    if checks is not None:
        checks.look()
    child = _begun(work, known) if worth and can_fork() else None
    if child is None:
        yield Aside(work, known, None)
        return
    token = _CHILDREN.set((*_CHILDREN.get(), child))
    try:
        yield Aside(work, known, child)
    finally:
        _CHILDREN.reset(token)
        child.end()


def checked(work: Callable[[], Result]) -> Result:
    """Return what the work returns, whose checks by `later` are made aside meanwhile.

    Where one of them fails, the work is done again from the start with each check in its place.
    """
    if _CHECKS.get() is not None or not can_fork():
        return work()
    with contextlib.ExitStack() as children:
        checks = _Checks(children)
        token = _CHECKS.set(checks)
        try:
            result = work()
            if checks.hold():
                return result
        except _Wrong:
            pass
        except Exception:
            if checks.hold():
                raise
        finally:
            _CHECKS.reset(token)
    return work()


def believes() -> bool:
    """Tell whether a check by `later` would be made aside now."""
    return _CHECKS.get() is not None and can_fork()


class _Wrong(BaseException):
    """A check failed, so that what comes of the work is of no use."""


def later(check: Callable[[], Result]) -> Callable[[], Result]:
    """Make a check, which raises where something is wrong: inside of `checked` aside, while the caller goes on.

    Returns what waits for the check and gives what it returned.
    """
    checks = _CHECKS.get()
    if checks is not None:
        return checks.begin(check)
    result = check()
    return lambda: result


def withdrawn_where_it_raises() -> contextlib.AbstractContextManager[None]:
    """Give up the checks that are begun inside where the block raises: what they check is of no use then."""
    checks = _CHECKS.get()
    return contextlib.nullcontext() if checks is None else checks.attempt()


class _Checks:
    """Checks that are made aside; ``children`` ends them."""

    def __init__(self, children: contextlib.ExitStack) -> None:
        self._children = children
        self._begun: list[Aside[Any]] = []

    def begin(self, check: Callable[[], Result]) -> Callable[[], Result]:
        """Begin a check aside; where that cannot be, make it now. Returns what waits for it."""
        begun = self._children.enter_context(aside(check))
        if not begun.elsewhere:
            begun.result()
        self._begun.append(begun)
        return partial(self._result, begun)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Give up what is begun inside where the block raises."""
        before = len(self._begun)
        try:
            yield
        except Exception:
            for begun in self._begun[before:]:
                begun.give_up()
            del self._begun[before:]
            raise

    def look(self) -> None:
        """Raise `_Wrong` where it is known already that something is."""
        if not all(self._holds(begun) for begun in self._begun if begun.ready):
            raise _Wrong

    def hold(self) -> bool:
        """Wait for all checks and tell whether nothing was wrong."""
        return all(map(self._holds, self._begun))

    def _result(self, begun: Aside[Result]) -> Result:
        """Return what a check returned; raise `_Wrong` where it failed."""
        if not self._holds(begun):
            raise _Wrong
        return begun.result()

    @staticmethod
    def _holds(begun: Aside[Any]) -> bool:
        try:
            begun.result()
        except Exception:  # whatever it is, it is raised when the work is done again
            return False
        return True


class Aside(Generic[Result]):
    """Work that is done aside, or if need be by whoever asks for its result."""

    def __init__(self, work: Callable[[], Result], known: Sequence[Any], child: _Child | None) -> None:
        self._work, self._known, self._child = work, known, child
        self._made: list[Result] = []

    @property
    def elsewhere(self) -> bool:
        """Whether a child is doing it."""
        return self._child is not None

    @property
    def ready(self) -> bool:
        """Whether nobody has to wait for the result but to do the work."""
        return self._child is None or bool(self._made) or not self._child.busy

    def give_up(self) -> None:
        """End the child: nobody will ask for its answer."""
        if self._child is not None:
            self._child.kill()

    def result(self) -> Result:
        """Return what the work returns; raises what it raises."""
        if not self._made:
            answer = None if self._child is None else self._answer(self._child)
            if answer is None:
                self._made.append(self._work())
            else:
                answer.shown()
                self._made.append(answer.result)
        return self._made[0]

    def _answer(self, child: _Child) -> _Answer | None:
        """Return what the child sent; None where it ended without, or nobody can read it."""
        data = child.read()
        try:
            return None if data is None else unpickled(data, self._known)
        except Exception:  # a stranger's class may raise anything when it is read; the work is done in place then
            return None


@dataclass(frozen=True)
class _Answer:
    """What a child found, printed and warned of."""

    result: Any
    printed: tuple[str, str]
    warned: tuple[tuple[Warning, type[Warning], str, int], ...]

    def shown(self) -> None:
        """Print and warn as the work would have in place."""
        for stream, text in zip((sys.stdout, sys.stderr), self.printed, strict=True):
            if text and stream is not None:
                stream.write(text)
        for message, category, path, line in self.warned:
            module = next((m for m in list(sys.modules.values()) if vars(m).get("__file__") == path), None)
            registry = None if module is None else vars(module).setdefault("__warningregistry__", {})
            warnings.warn_explicit(message, category, path, line, registry=registry)


class _Child:
    """A child at work: its process, and where its answer comes from."""

    def __init__(self, process: int, pipe: int) -> None:
        self.process, self.pipe = process, pipe
        self.begun_s = time.monotonic()
        self.over = False

    @property
    def busy(self) -> bool:
        """Whether it has said nothing yet."""
        return not select.select([self.pipe], [], [], 0)[0]

    def read(self) -> bytes | None:
        """Wait for the answer and return it; None where the child failed, or takes far too long."""
        pieces: list[bytes] = []
        until = time.monotonic() + max(_PATIENCE_S, 4 * (time.monotonic() - self.begun_s))
        while True:
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self.pipe, _PIECE_BYTES)
            if not piece:
                return b"".join(pieces) if self._waited() == 0 else None
            pieces.append(piece)

    def end(self) -> None:
        """End the child, should it still work."""
        os.close(self.pipe)
        if not self.over:
            self.kill()
            self._waited()

    def kill(self) -> None:
        """Let the child work no more, if it still does; its process is not waited for."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)

    def _waited(self) -> int | None:
        """Wait for the child to end and return how it did; None where somebody else has asked already."""
        self.over = True
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.process, 0)[1]
        return None


def _begun(work: Callable[[], Any], known: Sequence[Any]) -> _Child | None:
    """Fork a child that does the work; None where the system has no room for one.

    A signal to end waits until the child has no handlers of ours any more.
    """
    ours, its = os.pipe()
    caller, blocked = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, such as that of a bar
            process = os.fork()
        if process == 0:
            _work(work, known, its, caller=caller, blocked=blocked)
    except OSError:
        os.close(ours)
        return None
    finally:
        os.close(its)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return _Child(process, ours)


def _work(work: Callable[[], Any], known: Sequence[Any], pipe: int, *, caller: int, blocked: set[Any]) -> None:
    """Do the work in the child and end it; nothing of the caller's is unwound, flushed or ended here."""
    status = 1
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _end_with(caller)
        gc.freeze()  # what the caller has is not looked through, so that its pages stay shared
        import torch

        torch.set_num_threads(1)
        _ALLOWED.set(False)
        _CHECKS.set(None)
        data = memoryview(pickled(_answered(work), known))
        while data:
            data = data[os.write(pipe, data) :]
        status = 0
    finally:
        os._exit(status)


def _end_with(caller: int) -> None:
    """Let the system kill this process as soon as the caller is gone, also where that was killed (Linux's prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != caller:  # it was gone before
        os._exit(1)


def _answered(work: Callable[[], Any]) -> _Answer:
    """Return what the work returns and says; bars and streams of the caller's may be locked and are left alone."""
    warned: list[tuple[Any, type[Warning], str, int]] = []

    def keep(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        warned.append((message, category, filename, lineno))

    printed = io.StringIO(), io.StringIO()
    warnings.showwarning = cast(Any, keep)
    with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]), silent():
        result = work()
    return _Answer(result, (printed[0].getvalue(), printed[1].getvalue()), tuple(warned))
