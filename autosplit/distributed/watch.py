"""Failures: the first cause, with its rank and action, ends every process of a pipe within a bounded time.

    culprit   raises ─► failed(): first cause ─► the store ─► until others have read it ─► its exception goes on
              is killed, stops or hangs: whoever sees it first writes the cause
    others    read the cause ─► stderr ─► until the culprit has ended ─► a second ─► error file ─► exit

A thread of every rank writes four times a second what the rank is doing into the store of the process group, over a
connection of its own, and reads what the others do. Processes of the same machine learn of each other's end from the
kernel at once (``pidfd_open``). A process exits since nothing else ends a wait for a lost peer (gloo's ``abort()`` does
not). The culprit goes first, since torchrun reports the first process that fails as the root cause.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from autosplit.distributed.ends import call_on_sigterm, exit_now, exit_within, is_lost_connection, machine, uncaught
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


_Doing = tuple[Action | str | None, tuple[int, ...]]


class _State(NamedTuple):
    """What a rank says of itself; ``idle``: beats since it began its action, ``limit_s``: None outside a step."""

    beat: int = 0
    idle: int = 0
    limit_s: float | None = None
    action: str | None = None
    waits_for: tuple[int, ...] = ()
    closed: bool = False

    @property
    def place(self) -> str:
        return f"in {self.action}" if self.action else "between actions" if self.limit_s else "outside a step"


class _Cause(NamedTuple):
    """Why all ranks end: a rank, -1 for none of them, and its fault; ``stopped``: it cannot end by itself."""

    rank: int
    text: str
    stopped: bool = False


class Watch:
    """Watches the ranks of the default process group, and ends this process when another one fails.

    All ``size`` ranks make one at the same time; raises DeviceError when one has not within a minute. Every rank reads
    every other's state four times a second. Where the program leaves SIGTERM alone, the watch handles it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._pid = rank, os.getpid()
        self._now: _Doing = (None, ())
        self._last: object = self._now
        self._limit_s: float | None = None
        self._beats = self._idle = 0
        self._connection_lost = False
        self._raised: _Cause | None = None
        self._stack = ""
        self._states = {other: _State() for other in range(size)}
        self._others = [other for other in range(size) if other != rank]
        self._silent = dict.fromkeys(self._others, 0)
        self._cause = ""
        self._known, self._may_leave, self._closing = (threading.Event() for _ in range(3))
        self._handles: dict[int, int] = {}
        self._error_files: dict[int, str | None] = {}
        self._ended: set[int] = set()
        self._join()
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such a process runs no atexit
            Finalize(None, self._at_exit, exitpriority=0)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            call_on_sigterm(self._end_of_sigterm)
        self._thread = threading.Thread(target=self._watch, name="autosplit watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="autosplit store watch", daemon=True).start()

    def _join(self) -> None:
        """Meet the other ranks in the store, and get hold of the processes that run on this machine."""
        world: Any = dist.group.WORLD
        store = world.get_group_store().clone()  # a connection of its own
        self._host = _host(store)
        attempt = f"autosplit/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        number = store.add(f"{attempt}/{self.rank}", 1)
        self._store = PrefixStore(f"{attempt}/{number}", store)
        self._store.compare_set("cause", "", "")
        self._publish()
        own = [machine(), self._pid, os.environ.get("TORCHELASTIC_ERROR_FILE")]
        self._store.set(f"process/{self.rank}", json.dumps(own))
        keys = [f"process/{rank}" for rank in self._states]
        try:
            self._store.wait(keys, timedelta(seconds=_START_S))
        except RuntimeError as error:
            late = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
            raise DeviceError(f"rank {late} has not made the pipe within {_START_S:g} s; every rank must") from error
        for rank, text in enumerate(self._store.multi_get(keys)):
            place, pid, error_file = json.loads(text)
            if place == own[0]:
                self._error_files[rank] = error_file
                self._hold(rank, pid)

    def _hold(self, rank: int, pid: int) -> None:
        try:
            self._handles[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(rank)
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
        if not self._others or not self._thread.is_alive():
            return
        if self._raised is None:
            text = f"rank {self.rank} raised {type(error).__name__}: {error}, {self._state().place}"
            self._stack = "".join(traceback.format_exception(error))
            self._raised = _Cause(self.rank, text)  # the watching thread tells the others
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
        if self.rank == 0 and self._host == "rank 0" and self._raised is None:
            self._await("left", len(self._states))  # the store may end with this process
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
                running = {handle: rank for rank, handle in self._handles.items() if rank not in self._ended}
                ended = wait(list(running), _BEAT_S)
                self._ended.update(rank for handle, rank in running.items() if handle in ended)
                cause = self._beat()
                if not cause and self._host == "rank 0" and self._states[0].closed:
                    break  # and the store with it
                if not cause and (found := self._raised or self._judge()):
                    cause = self._blame(found)
                if cause:
                    return self._end(cause)
            self._publish(closed=True)
            self._store.add("left", 1)
        except RuntimeError:
            if not self._closing.is_set() and not self._known.is_set():
                self._end(self._lost_store(), has_store=False)

    def _beat(self) -> _Cause | None:
        """Say what this rank does, read what the others do; return the cause if there is one."""
        self._idle = self._idle + 1 if self._now is self._last else 0
        self._last = self._now
        self._beats += 1
        self._publish()
        cause, *texts = self._store.multi_get(["cause", *(f"state/{rank}" for rank in self._others)])
        for rank, text in zip(self._others, texts, strict=True):
            state = _State(*json.loads(text))
            self._silent[rank] = self._silent[rank] + 1 if state.beat == self._states[rank].beat else 0
            self._states[rank] = state
        return _Cause(*json.loads(cause)) if cause else None

    def _state(self) -> _State:
        action, waits_for = self._now
        text = describe(action) if isinstance(action, Action) else action
        return _State(self._beats, self._idle, self._limit_s, text, waits_for)

    def _publish(self, *, closed: bool = False) -> None:
        self._states[self.rank] = state = self._state()._replace(closed=closed)
        self._store.set(f"state/{self.rank}", json.dumps(state))

    def _judge(self) -> _Cause | None:
        """Return what is wrong with a rank by what is known of it."""
        for rank, silent in self._silent.items():
            state = self._states[rank]
            if state.closed:
                continue
            if rank in self._ended:
                return _Cause(rank, f"rank {rank} was killed, last seen {state.place}")
            lost = self._connection_lost and rank not in self._handles
            limit_s = _LOST_S if lost else min(state.limit_s or _SILENT_S, _SILENT_S)
            if silent * _BEAT_S > limit_s:
                text = f"rank {rank} was killed or stopped (no heartbeat for {limit_s:g} s), last seen {state.place}"
                return _Cause(rank, text, stopped=True)
        own = self._states[self.rank]
        if self._is_late(own) and not own.waits_for:
            return _Cause(self.rank, f"rank {self.rank} hangs {own.place} for {own.limit_s:g} s")
        if own.waits_for and own.idle * _BEAT_S == _NOTE_S:
            others = "; ".join(f"rank {rank} is {self._states[rank].place}" for rank in own.waits_for)
            _say(f"rank {self.rank} has waited {_NOTE_S:g} s for {own.action}: {others}")
        return self._waits_in_vain(own)

    def _waits_in_vain(self, own: _State) -> _Cause | None:
        """Return a cause where this rank waits for one that has finished, or for ranks that all wait themselves."""
        gone = [rank for rank in own.waits_for if self._states[rank].closed]
        waits = own.limit_s is not None and own.idle * _BEAT_S > min(own.limit_s, _GONE_S)
        if gone and (waits or self._connection_lost):
            return _Cause(self.rank, f"rank {self.rank} {own.place} waits for rank {gone[0]}, which has finished")
        if not self._is_late(own):
            return None
        waiting = {rank: set(state.waits_for) for rank, state in self._states.items() if not state.closed}
        stuck = {rank for rank, others in waiting.items() if others}
        while free := {rank for rank in stuck if not waiting[rank] <= stuck}:
            stuck -= free
        if self.rank not in stuck:
            return None
        text = "; ".join(f"rank {rank} {self._states[rank].place}" for rank in sorted(stuck))
        return _Cause(min(stuck), f"ranks wait for each other for {own.limit_s:g} s: {text}")

    def _is_late(self, own: _State) -> bool:
        """Tell whether no rank has moved for as long as this one's step allows."""
        still_s = _BEAT_S * min(state.idle for state in self._states.values() if not state.closed)
        return own.limit_s is not None and own.action is not None and still_s > own.limit_s

    def _blame(self, cause: _Cause) -> _Cause:
        """Make a cause the first one, unless there is one; return the first."""
        first = _Cause(*json.loads(self._store.compare_set("cause", "", json.dumps(cause))))
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
        while self._store.add(key, 0) < ranks and time.monotonic() < end:
            time.sleep(0.02)

    def _end(self, cause: _Cause, *, has_store: bool = True) -> None:
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
                self._await("read", sum(not self._states[rank].closed for rank in self._others))
        else:
            with suppress(RuntimeError):
                if has_store:
                    self._store.add("read", 1)
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

    def _lost_store(self) -> _Cause:
        if self._host == "rank 0" and self._has_ended(0):
            return _Cause(0, f"rank 0, which hosts the store, was killed, last seen {self._states[0].place}")
        return _Cause(-1, f"{self._host}, which hosts the store, was killed or cannot be reached")

    def _watch_store(self) -> None:
        """End this process where the other thread waits for the store: what hosts it is stopped."""
        seen, silent = 0, 0
        while not self._closing.wait(_BEAT_S) and not self._known.is_set() and self._thread.is_alive():
            seen, silent = self._beats, silent + 1 if self._beats == seen else 0
            limit_s = min(self._limit_s or _SILENT_S, _SILENT_S)
            if silent * _BEAT_S > limit_s:
                rank = 0 if self._host == "rank 0" else -1
                text = f"{self._host}, which hosts the store, was killed or stopped (no answer for {limit_s:g} s)"
                self._end(_Cause(rank, text, stopped=True), has_store=False)


def _host(store: Any) -> str:
    """Return whose end takes the store with it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "a machine"
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"autosplit: {text}\n".encode())
