"""Lanes that run at the same time on the CPU: one persistent thread each, with one intra-op thread.

    caller        run(turns) ──┬─────────────── waits ───────────────► returns, or raises what a lane raised
    lane 0                     ├► 0F0 ─► 0F1 ─►  ...         │
    lane 1                     └►      ▲ 1F0 ─► 1F1 ─► ...   ▼
                                 message: "0F0 is done"

A lane works through its turns in order. Before a turn it takes messages from its inbox until all that the turn needs is
done; after it, it tells the lanes that wait for it. Values themselves lie in memory that all lanes share.

A step that fails stops all lanes: each ends the action that it is in, and no further one starts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import torch

from autosplit.errors import DeviceError
from autosplit.runtime.ambient import ThreadState
from autosplit.runtime.turns import Turn, Turns
from autosplit.schedule.action import Action, describe

Act = Callable[[Action], None]
_JOIN_S = 5.0
_POLL_S = 0.05


class _Board:
    """What the lanes and the caller share during one step."""

    def __init__(self, lanes: int) -> None:
        self.inboxes: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in range(lanes)]
        self.news: SimpleQueue[None] = SimpleQueue()
        self.busy = set(range(lanes))
        self.running: list[tuple[Action, float] | None] = [None] * lanes
        self.stopped = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        """Let no further action start, and wake every lane that waits for a message."""
        self.stopped = True
        for inbox in self.inboxes:
            inbox.put(None)

    def end(self, lane: int, error: BaseException | None) -> None:
        """Note that a lane has ended; the first error stops the others."""
        if error is not None and self.error is None:
            self.error = error
            self.stop()
        self.running[lane] = None
        self.busy.discard(lane)
        if error is not None or not self.busy:
            self.news.put(None)

    def follow(self, lane: int, turns: tuple[Turn, ...], act: Act) -> None:
        """Run a lane's turns, each as soon as what it needs is done."""
        take, arrived, running = self.inboxes[lane].get, set[int | None](), self.running
        for turn in turns:
            for need in turn.needs:
                while need not in arrived:
                    arrived.add(take())
                    if self.stopped:
                        return
            if self.stopped:
                return
            running[lane] = turn.action, time.monotonic()
            act(turn.action)
            running[lane] = None
            for target in turn.tells:
                self.inboxes[target].put(turn.number)

    def under_way(self, least_s: float = 0.0) -> dict[int, Action]:
        """Return the actions that have been running for at least ``least_s``, by lane."""
        now = time.monotonic()
        entries = {lane: entry for lane, entry in enumerate(self.running) if entry is not None}
        return {lane: action for lane, (action, start_s) in entries.items() if now - start_s >= least_s}

    def patience_s(self, timeout_s: float) -> float:
        """Return the seconds until the oldest running action is late."""
        starts = [entry[1] for entry in self.running if entry is not None]
        return max(_POLL_S, min(starts) + timeout_s - time.monotonic()) if starts else timeout_s


class _LaneThread:
    """One lane's thread; between steps it holds nothing but its queue."""

    def __init__(self, name: str) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        torch.get_num_threads()  # torch sets a thread up when it is first asked, and would undo the next line later
        torch.set_num_threads(1)
        self.ready.set()
        while (job := self.jobs.get()) is not None:
            job()
            del job


class LaneThreads:
    """The threads of a pipe's lanes: started by the first step, stopped by :meth:`close`.

    Attributes:
        timeout_s: how long one action may run before the step is given up; None waits for ever.
    """

    def __init__(self, lanes: int, *, timeout_s: float | None = None) -> None:
        self.lanes = lanes
        self.timeout_s = timeout_s
        self._begin()

    def _begin(self) -> None:
        """Have no threads yet: at first, and in a forked process, which gets none of its parent's."""
        self._threads: list[_LaneThread] = []
        self._process = os.getpid()
        self._step = threading.Lock()

    def run(self, turns: Turns, act: Act, state: ThreadState) -> None:
        """Run a step: ``act`` performs one action, on its lane's thread, in the given thread state.

        Raises what an action raised, the first if there are several; DeviceError when one runs for longer than
        ``timeout_s``. All other lanes have ended their action by then.
        """
        if self._process != os.getpid():
            self._begin()
        if any(t.thread is threading.current_thread() for t in self._threads):
            raise RuntimeError("a pipe was called from inside one of its own stages; use lanes='inline' for that")
        with self._step:
            self._start()
            board = _Board(self.lanes)
            try:
                for lane, own in enumerate(turns):
                    self._threads[lane].jobs.put(partial(_work, board, lane, own, act, state))
                self._wait(board)
            except BaseException as error:
                board.stop()
                running = board.under_way().values()
                if running and isinstance(error, KeyboardInterrupt):
                    error.add_note(f"interrupted during {'; '.join(map(describe, running))}")
                self._drain(board)
                raise
            if board.error is not None:
                raise board.error

    def close(self) -> None:
        """Stop the threads and wait for their end; the next step starts new ones."""
        threads, self._threads = self._threads, []
        if self._process != os.getpid():
            return
        for own in threads:
            own.jobs.put(None)
        for own in threads:
            if own.thread is not threading.current_thread():
                own.thread.join(_JOIN_S)

    def _start(self) -> None:
        """Start the threads that are missing: all at first, and those that were left behind."""
        missing = self.lanes - len(self._threads)
        if not missing:
            return
        intra_op = torch.get_num_threads()
        try:
            for _ in range(missing):
                self._threads.append(_LaneThread(f"autosplit lane {len(self._threads)}"))
            for own in self._threads:
                own.ready.wait()
        finally:
            torch.set_num_threads(intra_op)  # what threads of the caller's start with; the lanes keep their one

    def _wait(self, board: _Board) -> None:
        """Wait until every lane has ended; raise DeviceError when an action does not end in time."""
        while board.busy:
            patience_s = None if self.timeout_s is None else board.patience_s(self.timeout_s)
            try:
                board.news.get(timeout=patience_s)
            except Empty:
                self._look_for_hangs(board)

    def _look_for_hangs(self, board: _Board) -> None:
        late = {} if self.timeout_s is None else board.under_way(self.timeout_s)
        if late and not board.stopped:
            raise DeviceError(
                f"{'; '.join(map(describe, late.values()))} did not end within {self.timeout_s:g} s; give slow "
                "stages more time with pipe.lane_timeout_s = seconds (None: no limit)"
            )
        self._leave(board, set(late))

    def _drain(self, board: _Board) -> None:
        """Wait for the actions that still run; leave behind those that are late, and all on a second Ctrl-C."""
        try:
            while board.busy:
                try:
                    board.news.get(timeout=_POLL_S)
                except Empty:
                    self._look_for_hangs(board)
        except KeyboardInterrupt:
            self._leave(board, set(board.busy))

    def _leave(self, board: _Board, lanes: set[int]) -> None:
        """Go on without lanes that hang: their threads end when their action does, new ones take their places."""
        for lane in lanes:
            board.busy.discard(lane)
            self._threads[lane].jobs.put(None)
        self._threads = [own for lane, own in enumerate(self._threads) if lane not in lanes]


def _work(board: _Board, lane: int, turns: tuple[Turn, ...], act: Act, state: ThreadState) -> None:
    try:
        with state.entered():
            state.context.copy().run(board.follow, lane, turns, act)
    except BaseException as error:
        board.end(lane, error)
    else:
        board.end(lane, None)
