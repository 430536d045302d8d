"""Lanes that run at the same time on the CPU: one persistent thread each, with one intra-op thread.

    caller        run(turns) ──┬─────────────── waits ───────────────► returns, or raises what a lane raised
    lane 0                     ├► 0F0 ─► 0F1 ─►  ...         │
    lane 1                     └►      ▲ 1F0 ─► 1F1 ─► ...   ▼
                                 message: "0F0 is done"

A lane works through its turns in order. Before a turn it takes messages from its inbox until all that the turn needs is
done; after it, it tells the lanes that wait for it. Values themselves lie in memory that all lanes share.

    lane 0   0F0 ──────────────┐     2F0 takes values of stages 0 and 1, so it waits for both messages;
    lane 1         1F0 ──────┐ │     0F0 tells lanes 1 and 2.
    lane 2               2F0 ◄─┴─┘   A backward waits for the stages that took its values, and tells those it took from.

A step that fails stops all lanes: each ends the action that it is in, and no further one starts. A lane whose action
does not end is left behind: its thread ends when the action does, and a new thread takes its place in the next step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from autosplit.errors import DeviceError
from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.schedule.action import Action, Schedule, describe
from autosplit.schedule.entry import Entry, Receive, Route, Send

Act = Callable[[Any], None]
_NOTHING = contextlib.nullcontext()
_JOIN_S = 5.0
_POLL_S = 0.05
_LOOK_S = 0.2
"""How long the caller waits at a time: a signal just before a wait, or to another thread, does not end it."""


class StepCoordinator:
    """What the lanes and the caller share during one step."""

    def __init__(self, threads: Sequence[_LaneThread]) -> None:
        self.threads = threads
        self.inboxes: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in threads]
        self.news: SimpleQueue[None] = SimpleQueue()
        self.busy = set(range(len(threads)))
        """The lanes whose turns are not over."""
        self.running: list[tuple[Action, float] | None] = [None] * len(threads)
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
        if self.stopped or not self.busy:
            self.news.put(None)

    def follow(self, lane: int, turns: Iterable[Turn], act: Act) -> None:
        """Run a lane's turns, each as soon as what it needs is done."""
        take, arrived, running = self.inboxes[lane].get, set[int | None](), self.running
        for turn in turns:
            for need in turn.needs:
                while need not in arrived:
                    arrived.add(take())
                    if self.stopped:
                        return
                arrived.discard(need)
            running[lane] = turn.entry, time.monotonic()
            if self.stopped:  # asked last: who stops the coordinator sees every action that may still start
                return
            act(turn.entry)
            running[lane] = None
            for target in turn.tells:
                self.inboxes[target].put(turn.number)

    def under_way(self, least_s: float = 0.0) -> dict[int, Action]:
        """Return the actions that have been running for at least ``least_s``, by lane."""
        now = time.monotonic()
        entries = {lane: entry for lane, entry in enumerate(self.running) if entry is not None}
        return {lane: action for lane, (action, start_s) in entries.items() if now - start_s >= least_s}

    def patience_s(self, timeout_s: float | None) -> float:
        """Return the seconds until the oldest running action is late, or until the caller looks up anyway."""
        starts = [entry[1] for entry in self.running if entry is not None]
        if timeout_s is None or not starts:
            return _LOOK_S
        return min(_LOOK_S, max(_POLL_S, min(starts) + timeout_s - time.monotonic()))

    def leave(self, lane: int) -> None:
        """Go on without a lane; its thread ends when its action does."""
        self.running[lane] = None
        self.busy.discard(lane)
        self.threads[lane].jobs.put(None)


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
    """The threads of a pipe's lanes: started by the first step, stopped by :meth:`close` or with this object.

    Attributes:
        timeout_s: how long one action may run before the step is given up; None waits for ever.
    """

    def __init__(self, lanes: int, *, timeout_s: float | None = None) -> None:
        self.lanes = lanes
        self.timeout_s = timeout_s
        self._threads: dict[int, _LaneThread] = {}
        self._begin()
        weakref.finalize(self, _end, self._threads)

    def _begin(self) -> None:
        """Have no threads yet: at first, and in a forked process, which gets none of its parent's."""
        self._threads.clear()
        self._process = os.getpid()
        self._step = threading.Lock()

    def run(
        self,
        turns: Sequence[Iterable[Turn]],
        act: Act,
        state: ThreadState,
        within: AbstractContextManager[Any] = _NOTHING,
    ) -> None:
        """Run a step: ``act`` performs one action, on its lane's thread, in the given thread state.

        The caller enters ``within`` when it has the lanes for itself, and leaves it before another caller has.

        Raises what an action raised, the first if there are several; DeviceError when one runs for longer than
        ``timeout_s``. All other lanes have ended their action by then.
        """
        if self._process != os.getpid():
            self._begin()
        self.check_caller()
        with self._step, within:
            coordinator = StepCoordinator(self._start())
            try:
                self._perform(coordinator, turns, act, state)
            finally:
                self._leave(coordinator, coordinator.under_way())
        error, coordinator.error = coordinator.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, which would hold it until the next garbage collection

    def has_caller(self) -> bool:
        """Tell whether one of the lanes' own threads calls."""
        return any(worker.thread is threading.current_thread() for worker in list(self._threads.values()))

    def check_caller(self) -> None:
        """Raise RuntimeError where one of the lanes' own threads calls, which would wait for itself."""
        if self.has_caller():
            raise RuntimeError("a pipe was called from inside one of its own stages; use lanes='inline' for that")

    def close(self) -> None:
        """Stop the threads and wait for their end; the next step starts new ones."""
        _end(self._threads)

    def _start(self) -> Sequence[_LaneThread]:
        """Return the lanes' threads; start the missing ones: all at first, later those that were abandoned."""
        missing = [lane for lane in range(self.lanes) if lane not in self._threads]
        if missing:
            intra_op = torch.get_num_threads()
            try:
                self._threads.update((lane, _LaneThread(f"autosplit lane {lane}")) for lane in missing)
                for worker in list(self._threads.values()):
                    worker.ready.wait()
            finally:
                torch.set_num_threads(intra_op)  # what threads of the caller's start with; the lanes keep their one
        return [self._threads[lane] for lane in range(self.lanes)]

    def _perform(
        self, coordinator: StepCoordinator, turns: Sequence[Iterable[Turn]], act: Act, state: ThreadState
    ) -> None:
        try:
            for lane, lane_turns in enumerate(turns):
                coordinator.threads[lane].jobs.put(partial(_work, coordinator, lane, lane_turns, act, state))
            self._wait(coordinator)
        except BaseException as error:
            coordinator.stop()
            running = coordinator.under_way().values()
            if running and isinstance(error, KeyboardInterrupt):
                error.add_note(f"interrupted during {'; '.join(map(describe, running))}")
            self._drain(coordinator)
            raise

    def _wait(self, coordinator: StepCoordinator) -> None:
        """Wait until every lane has ended; raise DeviceError when an action does not end in time."""
        while coordinator.busy:
            try:
                coordinator.news.get(timeout=coordinator.patience_s(self.timeout_s))
            except Empty:
                late = self._late(coordinator)
            else:
                continue
            if coordinator.stopped:
                self._leave(coordinator, late)
            elif late:
                raise DeviceError(
                    f"{'; '.join(map(describe, late.values()))} did not end within {self.timeout_s:g} s; give slow "
                    "stages more time with pipe.lane_timeout_s = seconds (None: no limit)"
                )

    def _late(self, coordinator: StepCoordinator) -> dict[int, Action]:
        return {} if self.timeout_s is None else coordinator.under_way(self.timeout_s)

    def _drain(self, coordinator: StepCoordinator) -> None:
        """Wait for the actions that still run, but not for those that are late; return on a second Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            while coordinator.under_way():
                with contextlib.suppress(Empty):
                    coordinator.news.get(timeout=_POLL_S)
                self._leave(coordinator, self._late(coordinator))

    def _leave(self, coordinator: StepCoordinator, lanes: Iterable[int]) -> None:
        """Go on without lanes that hang; new threads take their places in the next step."""
        for lane in lanes:
            coordinator.leave(lane)
            self._threads.pop(lane, None)


def _end(threads: dict[int, _LaneThread]) -> None:
    """Stop threads and wait for their end, except for this one's own."""
    popped = [threads.pop(lane) for lane in list(threads)]
    for lane in popped:
        lane.jobs.put(None)
    for lane in popped:
        if lane.thread is not threading.current_thread():
            lane.thread.join(_JOIN_S)


def _work(coordinator: StepCoordinator, lane: int, turns: Iterable[Turn], act: Act, state: ThreadState) -> None:
    try:
        with state.entered():
            state.context.copy().run(coordinator.follow, lane, turns, act)
    except BaseException as error:
        coordinator.end(lane, error)
    else:
        coordinator.end(lane, None)


class Turn(NamedTuple):
    """One entry of a lane, its number, the numbers of the entries that it waits for, and the lanes that it tells.

    A lane that has waited for an entry once does not wait for it again.
    """

    entry: Any
    number: int
    needs: tuple[int, ...]
    tells: tuple[int, ...]


Turns = tuple[tuple[Turn, ...], ...]
"""The turns of every lane, in order."""


def turns(lists: Sequence[Sequence[Entry]]) -> Turns:
    """Return every lane's turns: the entries of its list, with what each receives and sends.

    A lane waits for what the action before a send has made; its own entries come in its own order.
    """
    maker, taker, number = dict[Route, int](), dict[Route, int](), -1
    for lane, entries in enumerate(lists):
        for entry in entries:
            if isinstance(entry, Receive):
                taker[entry.route] = lane
            elif isinstance(entry, Send):
                maker[entry.route] = number
            else:
                number += 1
    numbers = count()
    return tuple(tuple(_turns(entries, numbers, maker, taker)) for entries in lists)


def _turns(
    entries: Sequence[Entry], numbers: Iterator[int], maker: Mapping[Route, int], taker: Mapping[Route, int]
) -> list[Turn]:
    pending, arrived, tells, lane = list[int](), set[int](), set[int](), list[Turn]()
    for entry in entries:
        if isinstance(entry, Receive):
            pending.append(maker[entry.route])
        elif isinstance(entry, Send):
            tells.add(taker[entry.route])
            lane[-1] = lane[-1]._replace(tells=tuple(sorted(tells)))
        else:
            needs = tuple(dict.fromkeys(number for number in pending if number not in arrived))
            lane.append(Turn(entry, next(numbers), needs, ()))
            arrived.update(needs)
            pending.clear()
            tells.clear()
    return lane


def forwards(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, in its order: what a call of the pipe runs first."""
    lanes = tuple(tuple(action for action in lane if action.kind == "F") for lane in schedule.lanes)
    return replace(schedule, name="forward", lanes=lanes, marks=())


def backwards(schedule: Schedule) -> Schedule:
    """Return the whole backwards of a call: its forwards in reverse, as autograd takes one thread's graph."""
    lanes = tuple(
        tuple(Action(action.stage, "B", action.microbatch) for action in reversed(lane))
        for lane in forwards(schedule).lanes
    )
    return replace(schedule, name="backward", lanes=lanes, marks=())
