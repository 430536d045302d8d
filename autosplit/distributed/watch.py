"""Failures: the first cause, with its rank and action, ends every process of a pipe within a bounded time.

    culprit   raises ─► failed(): first cause ─► the store ─► until others have read it ─► its exception goes on
              is killed, stops or hangs: whoever sees it first writes the cause
    others    read the cause ─► stderr ─► until the culprit has ended ─► a second ─► error file ─► exit

A thread of every rank writes four times a second what the rank is doing into the store of the process group, counts it
there where it has moved, and reads the counter and what the next rank does (:mod:`autosplit.distributed.board`).
Processes of the same machine learn of each other's end from the kernel at once (``pidfd_open``). A process exits since
nothing else ends a wait for a lost peer (gloo's ``abort()`` does not). The culprit goes first, since torchrun reports
the first process that fails as the root cause.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

from autosplit.distributed.board import Board, Cause, News, State
from autosplit.distributed.ends import call_on_sigterm, exit_now, exit_within, is_lost_connection, uncaught
from autosplit.errors import DeviceError
from autosplit.schedule.action import Action, describe

# Seconds. Limits are counted in beats, so that nobody is late on a machine that pauses.
_BEAT_S = 0.25  # how often a rank says what it is doing
_SILENT_S = 60.0  # a rank that says nothing for so long is gone, also outside a step, where code may hold the GIL
_GONE_S = 10.0  # how long a rank waits for one that has finished, whose last words may be on their way
_LOST_S = 3.0  # the same for a rank of another machine, where a connection was lost
_NOTE_S = 60.0  # when a rank says for whom it waits
_START_S = 60.0  # how long a rank waits for the others' watches
_EXPLAIN_S = 5.0  # how long a lost connection waits for a better cause
_READ_S = 4.0  # how long a culprit, or who hosts the store, waits until the others have read what it says
_UNWIND_S = 5.0  # how long its exception may travel before its process ends
_END_S = _READ_S + _UNWIND_S + 1.0  # when the others kill it, where it is on the same machine
_SHOWN = 8  # of how many ranks a message says what they do

_Doing = tuple[Action | str | None, tuple[int, ...]]


class Watch:
    """Watches the ranks of the default process group, and ends this process when another one fails.

    All ``size`` ranks make one at the same time; raises DeviceError when one has not within a minute. Where the program
    leaves SIGTERM alone, the watch handles it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size, self._pid = rank, size, os.getpid()
        self._now: _Doing = (None, ())
        self._last: object = self._now
        self._limit_s: float | None = None
        self._beats = self._idle = self._still = 0
        """Beats so far, since this rank has begun its action, and since any rank has begun one."""
        self._connection_lost = False
        self._raised: Cause | None = None
        self._stack = self._cause = ""
        self._news = News(None, 0, 0, 0)
        self._closed_before = 0
        self._silent: dict[int, int] = {}
        self._known, self._may_leave, self._closing = (threading.Event() for _ in range(3))
        self._handles: dict[int, int] = {}
        self._error_files: dict[int, str | None] = {}
        self._running: dict[Any, int] = {}
        """The ranks of this machine by the handle of their process, until it has ended."""
        self._ended: list[int] = []
        """Those that have ended since the last beat."""
        self._board = Board(rank, size, self._state(), _START_S)
        for other, pid, error_file in self._board.neighbours:
            self._error_files[other] = error_file
            self._hold(other, pid)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such a process runs no atexit
            Finalize(None, self._at_exit, exitpriority=0)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            call_on_sigterm(self._end_of_sigterm)
        self._thread = threading.Thread(target=self._watch, name="autosplit watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="autosplit store watch", daemon=True).start()

    def _hold(self, rank: int, pid: int) -> None:
        try:
            self._handles[rank] = handle = os.pidfd_open(pid)
            self._running[handle] = rank
        except ProcessLookupError:
            self._ended.append(rank)
        except (AttributeError, OSError):
            pass  # not Linux, or forbidden: heartbeats alone

    def doing(self, action: Action | str | None, waits_for: tuple[int, ...] = ()) -> _Doing:
        """Say what this rank starts to do, and return what it did; None: nothing that can hang.

        ``waits_for``: the ranks of a receive or a collective, without which this one cannot go on. A rank that waits
        does not hang as long as one of them works or is outside a step.
        """
        before, self._now = self._now, (action, waits_for)
        return before

    @contextmanager
    def step(self, limit_s: float | None) -> Iterator[None]:
        """Count the hang limit inside: the seconds in which some rank has to move, None for no limit."""
        self.doing(None)
        before, self._limit_s = self._limit_s, limit_s
        try:
            yield
            self.doing(None)  # not after an exception: failed() names the action
        finally:
            self._limit_s = before

    def failed(self, error: BaseException) -> None:
        """Make this rank's exception the cause of the end, unless there is one.

        Returns for the exception to go on: when the others know it or, after another's failure, when that rank has
        ended. The process ends a few seconds later, whatever becomes of the exception.
        """
        if self._size == 1 or not self._thread.is_alive():
            return
        if self._raised is None:
            text = f"rank {self.rank} raised {type(error).__name__}: {error}, {self._state().place}"
            self._stack = "".join(traceback.format_exception(error))
            self._raised = Cause(self.rank, text)  # the watching thread tells the others
        self._may_leave.wait(_END_S + 1)

    def explain(self, error: BaseException) -> DeviceError:
        """Return the error to raise for a connection that was lost, which names the cause.

        Waits for the cause, since the connections of a process end before anybody knows why. Without a cause the lost
        connection is this rank's failure.
        """
        self._connection_lost = True
        if not self._known.wait(_EXPLAIN_S):
            self.failed(error)
        self._may_leave.wait(_END_S + 1)
        return DeviceError(self._cause or str(error))

    def close(self) -> None:
        """Say that this rank has finished: its end is no failure, and what fails later is not seen."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self._at_exit)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            with suppress(ValueError):  # another thread than the main one
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._thread.join(_UNWIND_S)
        if self.rank == 0 and self._board.host == "rank 0" and self._raised is None:
            self._await("closed", self._size)  # the store may end with this process
        for handle in self._handles.values():
            os.close(handle)

    def _at_exit(self) -> None:
        """Tell a script's end from an exception that nobody caught."""
        if os.getpid() != self._pid:
            return
        if (error := uncaught()) is None:
            self.close()
        elif is_lost_connection(error):
            self.explain(error)
        else:
            self.failed(error)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Die of SIGTERM, unless a cause is known: torchrun sends it to all as soon as one rank has failed."""
        if os.getpid() != self._pid or not self._known.wait(4 * _BEAT_S):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _end_of_sigterm(self) -> None:
        """End where the handler has not: the main thread waits in a library."""
        if not self._known.wait(8 * _BEAT_S) and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            exit_now()

    def _watch(self) -> None:
        try:
            while not self._closing.is_set():
                self._ended += [self._running.pop(handle) for handle in wait(list(self._running), _BEAT_S)]
                cause = self._beat()
                if not cause and self._board.host == "rank 0" and self._board.seen.get(0, State()).closed:
                    break  # and the store with it
                if not cause and (wrong := self._raised or self._judge()):
                    cause = self._blame(wrong)
                if cause:
                    return self._end(cause)
            self._board.publish(self._state()._replace(closed=True))
            self._board.count("closed")
        except RuntimeError:
            if not self._closing.is_set() and not self._known.is_set():
                self._end(self._lost_store(), has_store=False)

    def _beat(self) -> Cause | None:
        """Say what this rank does, read what is to be known; return the cause if there is one."""
        moved, self._last = self._now is not self._last, self._now
        self._idle = 0 if moved else self._idle + 1
        self._beats += 1
        self._board.publish(self._state())
        if moved:
            self._board.count("moves")
        if self._connection_lost and not self._news.lost:
            self._board.count("lost")
        before, moves = self._board.seen, self._news.moves
        self._news = self._board.news()
        self._still = self._still + 1 if self._news.moves == moves else 0
        self._silent = {
            rank: self._silent.get(rank, 0) + 1 if rank in before and state.beat == before[rank].beat else 0
            for rank, state in self._board.seen.items()
        }
        return self._news.cause

    def _state(self) -> State:
        action, waits_for = self._now
        text = describe(action) if isinstance(action, Action) else action
        return State(self._beats, self._limit_s, text, waits_for)

    def _judge(self) -> Cause | None:
        """Return what is wrong with a rank by what is known of it."""
        ended, self._ended = self._ended, []
        for rank, state in self._board.states(ended).items():
            if not state.closed:
                return Cause(rank, f"rank {rank} was killed, last seen {state.place}")
        for rank, silent in self._silent.items():
            state = self._board.seen[rank]
            lost = self._news.lost and rank not in self._handles
            limit_s = _LOST_S if lost else min(state.limit_s or _SILENT_S, _SILENT_S)
            if not state.closed and silent * _BEAT_S > limit_s:
                text = f"rank {rank} was killed or stopped (no heartbeat for {limit_s:g} s), last seen {state.place}"
                return Cause(rank, text, stopped=True)
        mine = self._state()
        late = mine.action is not None and self._passes(mine.limit_s)
        if late and not mine.waits_for:
            return Cause(self.rank, f"rank {self.rank} hangs {mine.place} for {mine.limit_s:g} s")
        if mine.waits_for and self._idle * _BEAT_S == _NOTE_S:
            others = _shown(self._board.states(mine.waits_for), "is ")
            _say(f"rank {self.rank} has waited {_NOTE_S:g} s for {mine.action}: {others}")
        return self._waits_for_closed(mine) or (self._waits_in_a_circle(mine) if late else None)

    def _passes(self, limit_s: float | None) -> bool:
        """Tell whether it is at this beat that no rank has moved for as long as a step allows, or once more as long."""
        return limit_s is not None and self._still > 0 and self._still % (int(limit_s / _BEAT_S) + 1) == 0

    def _waits_for_closed(self, mine: State) -> Cause | None:
        """Return a cause where this rank waits for one that has finished."""
        self._closed_before = self._closed_before if self._idle else 0
        waits = mine.limit_s is not None and self._idle * _BEAT_S > min(mine.limit_s, _GONE_S)
        if self._news.closed == self._closed_before or not mine.waits_for or not (waits or self._connection_lost):
            return None
        self._closed_before = self._news.closed
        states = self._board.states(mine.waits_for)
        gone = next((rank for rank, state in states.items() if state.closed), None)
        text = f"rank {self.rank} {mine.place} waits for rank {gone}, which has finished"
        return None if gone is None else Cause(self.rank, text)

    def _waits_in_a_circle(self, mine: State) -> Cause | None:
        """Return a cause where this rank waits for ranks that all wait themselves."""
        states, waits_for = {self.rank: mine}, set(mine.waits_for)
        while unread := self._board.other_ranks(waits_for) - states.keys():
            states_read = self._board.states(unread)
            if any(state.closed or not state.waits_for for state in states_read.values()):
                return None
            states |= states_read
            waits_for = {rank for state in states_read.values() for rank in state.waits_for}
        return Cause(min(states), f"ranks wait for each other for {mine.limit_s:g} s: {_shown(states)}")

    def _blame(self, cause: Cause) -> Cause:
        """Make a cause the first one, unless there is one; return the first."""
        first = self._board.blame(cause)
        if first == cause and cause.rank != self.rank:
            self._report(cause.rank, cause.text)
        return first

    def _report(self, rank: int, text: str, stack: str = "") -> None:
        """Write torchrun's error file of a rank of this machine, whole at any moment."""
        if path := self._error_files.get(rank):
            extra = {"py_callstack": f"{stack}{text}", "timestamp": str(int(time.time()))}
            with suppress(OSError):
                with open(f"{path}.{self.rank}", "w", encoding="utf-8") as file:
                    json.dump({"message": {"message": text, "extraInfo": extra}}, file)
                os.replace(file.name, path)

    def _await(self, key: str, ranks: int) -> None:
        """Wait until so many ranks have said so."""
        end = time.monotonic() + _READ_S
        while self._board.count(key, 0) < ranks and time.monotonic() < end:
            time.sleep(0.02)

    def _end(self, cause: Cause, *, has_store: bool = True) -> None:
        """End this process, a second after the culprit; one that raises ends by its exception."""
        exit_within(2 * _END_S)
        raised = cause.rank == self.rank and self._raised is not None
        if not raised:
            _say(f"rank {self.rank} ends: {cause.text}")
        self._cause = cause.text
        self._known.set()
        if cause.rank == self.rank:
            self._report(self.rank, cause.text, self._stack)
            with suppress(RuntimeError):  # the store is gone, which is another cause
                self._await("read", self._size - 1 - self._board.count("closed", 0))
        else:
            with suppress(RuntimeError):
                if has_store:
                    self._board.count("read")
            if cause.rank in self._handles and (cause.stopped or not self._has_ended(cause.rank)):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handles[cause.rank], signal.SIGKILL)
            time.sleep(1.0)
            self._report(self.rank, cause.text)
        self._may_leave.set()
        if raised:
            exit_within(_UNWIND_S)
            return
        if cause.rank != self.rank:
            time.sleep(1.0)  # for the exception of a wait that was explained
        exit_now()

    def _has_ended(self, rank: int) -> bool:
        """Wait for the end of a process of this machine."""
        return rank in self._handles and bool(wait([self._handles[rank]], _END_S))

    def _lost_store(self) -> Cause:
        host = self._board.host
        if host == "rank 0" and self._has_ended(0):
            label = self._board.seen.get(0, State()).place
            return Cause(0, f"rank 0, which hosts the store, was killed, last seen {label}")
        return Cause(-1, f"{host}, which hosts the store, was killed or cannot be reached")

    def _watch_store(self) -> None:
        """End this process where the other thread waits for the store: what hosts it is stopped."""
        seen, silent = 0, 0
        while not self._closing.wait(_BEAT_S) and not self._known.is_set() and self._thread.is_alive():
            seen, silent = self._beats, silent + 1 if self._beats == seen else 0
            limit_s = min(self._limit_s or _SILENT_S, _SILENT_S)
            if silent * _BEAT_S > limit_s:
                rank = 0 if self._board.host == "rank 0" else -1
                text = f"{self._board.host}, which hosts the store, was killed or stopped (no answer for {limit_s:g} s)"
                self._end(Cause(rank, text, stopped=True), has_store=False)


def _shown(states: Mapping[int, State], verb: str = "") -> str:
    texts = [f"rank {rank} {verb}{states[rank].place}" for rank in sorted(states)]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "; ".join(texts[:_SHOWN] + more)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"autosplit: {text}\n".encode())
