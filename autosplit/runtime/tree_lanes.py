"""Microbatches of a model that runs by its own Python: a thread each, and lanes that they pass one at a time.

    microbatch 0   ── unit a ── unit b ── unit c ─►          a thread runs the whole forward; at the door of a unit it
    microbatch 1   ········· unit a ── unit b ── unit c ─►   waits for the unit's lane, the lowest microbatch first
                     lane 0     lane 1     lane 2

The threads live for one call. Autograd numbers what a thread does from 0, so a new thread gives the same graph the same
numbers, and a backward the same order, call after call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autosplit.errors import DeviceError
from autosplit.runtime.ambient import ThreadState

_LOOK_S = 0.2
"""How long the caller waits at a time: a signal just before a wait, or to another thread, does not end it."""
_POLL_S = 0.05
Run = Callable[[int], Any]


class Over(BaseException):
    """Ends a microbatch's thread at the next door when another one has failed; no exception of the model."""


class _Busy(NamedTuple):
    microbatch: int
    unit: str
    since_s: float


class _Lane:
    """Who has a lane, and who waits for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self.free = threading.Condition(lock)
        self.waiting: set[int] = set()
        self.busy: _Busy | None = None


class Crossing:
    """One call: its microbatches' threads, its lanes, what came out and what went wrong."""

    def __init__(self, *, lanes: int, microbatches: int, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._lanes = [_Lane(self._lock) for _ in range(lanes)]
        self._under_way = set(range(microbatches))
        self._ready = 0
        self._stopped = False
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}

    # -- at the doors --------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def held(self, lane: int, *, microbatch: int, unit: str) -> Iterator[None]:
        """Have a lane for one call of a unit."""
        own = self._lanes[lane]
        with self._lock:
            own.waiting.add(microbatch)
            while not self._stopped and (own.busy is not None or min(own.waiting) != microbatch):
                own.free.wait()
            own.waiting.discard(microbatch)
            if self._stopped:
                raise Over
            own.busy = _Busy(microbatch, unit, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                own.busy = None
                own.free.notify_all()

    # -- the caller ----------------------------------------------------------------------------------------------
    def run(self, act: Run, state: ThreadState) -> list[Any]:
        """Run ``act(microbatch)`` for all microbatches, each in a thread of its own in the given thread state.

        Returns the results in order. Raises what the lowest microbatch that failed raised, and DeviceError when a unit
        runs for longer than ``timeout_s``; the other threads have ended by then, except for one that hangs.
        """
        threads = [
            threading.Thread(target=self._serve, args=(number, act, state), name=f"autosplit microbatch {number}")
            for number in sorted(self._under_way)
        ]
        try:
            self._start(threads)
            self._wait()
        except BaseException as error:
            busy = self._running()
            self.stop()
            if busy and isinstance(error, KeyboardInterrupt):
                error.add_note(f"interrupted during {'; '.join(busy)}")
            self._drain(threads)
            raise
        for thread in threads:
            thread.join()
        return self._outcome()

    def stop(self) -> None:
        """Let no further unit begin, and wake every thread that waits for a lane."""
        with self._lock:
            self._stopped = True
            for lane in self._lanes:
                lane.free.notify_all()
            self._news.notify_all()

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start the threads, each with one intra-op thread; what threads of the caller's start with stays the same."""
        intra_op, started = torch.get_num_threads(), 0
        try:
            for thread in threads:
                thread.daemon = True
                thread.start()
                started += 1
            with self._lock:
                while self._ready < started:
                    self._news.wait(_LOOK_S)
        finally:
            with self._lock:
                self._under_way &= set(range(started))
            if intra_op > 1:
                torch.set_num_threads(intra_op)

    def _serve(self, number: int, act: Run, state: ThreadState) -> None:
        error: BaseException | None = None
        try:
            if torch.get_num_threads() > 1:
                torch.set_num_threads(1)
            with self._lock:
                self._ready += 1
                self._news.notify_all()
                if self._stopped:
                    raise Over
            torch.set_autocast_cache_enabled(False)  # else weights are cast in the graph of whoever comes first
            with replace(state, autocast_cache=False).entered():
                result = state.context.copy().run(act, number)
            with self._lock:
                self._results[number] = result
        except Over:
            pass
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is not None:
                self._errors[number] = error
            self._under_way.discard(number)
            self._news.notify_all()
        if error is not None:
            self.stop()
            del error

    def _wait(self) -> None:
        while True:
            with self._lock:
                if not self._under_way:
                    return
                self._news.wait(_LOOK_S)
            late = self._late()
            if late:
                raise DeviceError(
                    f"{'; '.join(late)} did not end within {self.timeout_s:g} s; give slow units more time with "
                    "pipe.lane_timeout_s = seconds (None: no limit)"
                )

    def _running(self, least_s: float = 0.0) -> list[str]:
        """Return in words which units have been running for at least ``least_s``."""
        now = time.monotonic()
        pairs = [(number, lane.busy) for number, lane in enumerate(self._lanes)]
        return [
            describe(busy.unit, number, busy.microbatch)
            for number, busy in pairs
            if busy is not None and now - busy.since_s >= least_s
        ]

    def _late(self) -> list[str]:
        return [] if self.timeout_s is None else self._running(self.timeout_s)

    def _drain(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads, but not for a unit that is late; return on a second Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            while not self._late():
                with self._lock:
                    if not self._under_way:
                        break
                    self._news.wait(_POLL_S)
            for number, thread in enumerate(threads):
                if thread.is_alive() and number not in self._under_way:
                    thread.join()

    def _outcome(self) -> list[Any]:
        results, errors = self._results, self._errors
        self._results, self._errors = {}, {}
        if errors:
            error = errors[min(errors)]
            errors.clear()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, which would hold it until the next garbage collection
        return [results[number] for number in sorted(results)]


def describe(unit: str, stage: int, microbatch: int | None) -> str:
    """Return a call of a unit in words: ``unit 'blocks.2', stage 1, microbatch 3``."""
    where = f"unit {unit!r}" if unit else "the model itself"
    return f"{where}, stage {stage}" + ("" if microbatch is None else f", microbatch {microbatch}")
