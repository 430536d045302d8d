"""From filling the pipeline to draining it: minibatches come in, lanes run them 1F1B, losses come out in order.

    caller      put(0) put(1) put(2)  wait ─► loss 0     put(3) wait ─► loss 1      end()  wait ─► None
    lanes       F0 F1 F2 B0 F3 ...                                      no more forwards, all backwards

An error in a forward ends the segment with the minibatch before it: what came earlier is finished, what came later is
dropped, and all stages have made the same updates. An error in a backward, or in an optimizer, stops all lanes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.threads import LaneThreads, Turn
from autosplit.runtime.loss.proof import WholeCheck
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import CellContext
from autosplit.runtime.step.step import Step
from autosplit.runtime.step.sums import Held
from autosplit.runtime.step.train_cells import TrainCells
from autosplit.schedule.action import Action
from autosplit.schedule.stream import stream_actions
from autosplit.stream.optimizers import Settings
from autosplit.stream.versions import StageWeights

_LOOK_S = 0.2
"""How long the caller waits at a time: a signal to another thread does not end a wait."""


class Minibatch:
    """One minibatch in flight."""

    def __init__(self, cells: StreamCells, settings: Sequence[Settings], sources: Sequence[set[int]]) -> None:
        """``cells`` run its stages; ``settings`` are the options of each stage's optimizer as it came in.

        ``sources`` are the stages of which each stage takes values.
        """
        self.cells, self.settings, self.sources = cells, settings, sources
        self.users = [{t for t, taken in enumerate(sources) if s in taken} for s in range(len(sources))]
        self.microbatches = len(cells.step.sizes)
        self.first = 0
        """The number of its first microbatch in the segment."""
        self.left = len(cells.step.stages)
        """How many stages of this process have not stepped by it."""


class StreamCells(TrainCells):
    """The cells of one minibatch: every stage computes with that version of its weights which is the minibatch's."""

    def __init__(self, step: Step, loss: Any, check: WholeCheck | None) -> None:
        super().__init__(step, loss, check)
        self._states = [replace(step.state, statistics={}) for _ in step.lowered.stages]

    def _trained(self, step: Step) -> Mapping[Held, Sequence[torch.Tensor]]:
        """Return none: each stage says which version it computes with."""
        return {}

    def context(self, stage: int, microbatch: int) -> CellContext:
        """Return where operations of a cell draw and leave what norms see; a stage updates its own norms."""
        return CellContext(self._states[stage], microbatch)

    def begin(self, stage: int, leaves: Sequence[torch.Tensor]) -> None:
        """Have the microbatches of a stage's minibatch add up the gradients of its weights."""
        self.sums[Held(stage, 0)].use(leaves)

    def end_forwards(self, stage: int) -> None:
        """Update a stage's running statistics, when its last forward is over."""
        update_statistics(self._states[stage], self.step.lanes)

    def forget(self, stage: int) -> None:
        """Let go of a stage's weights, when it has stepped."""
        self.begin(stage, ())


class Segment:
    """Runs minibatches; see the module's docstring.

    Attributes:
        is_shared: whether other processes have stages too.
    """

    is_shared = False

    def __init__(self, stages: Mapping[int, StageWeights], count: int, staleness: str) -> None:
        """``stages`` are those of ``count`` that run in this process."""
        self._stages, self._count, self.staleness = stages, count, staleness
        self._waits = True
        """Whether a lane waits until a minibatch comes in."""
        self._inside = threading.local()
        self._minibatches: dict[int, Minibatch] = {}
        self._change = threading.Condition()
        self._running = {stage: threading.Lock() for stage in stages}
        """Held by a lane while it runs a cell."""
        self._ended = False
        self._next = 0
        """How many microbatches have come in."""
        self._cells: list[tuple[int, int, bool]] = [(0, 0, False)] * count
        """What each lane has come to: a minibatch, which of its microbatches, and whether that is the last one."""
        self.put_in = 0
        """How many minibatches have come in."""
        self.failed: tuple[int, BaseException] | None = None
        """The first minibatch whose forward raised, and what it raised."""
        self.broken: BaseException | None = None
        """What stopped all lanes."""
        self.losses: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        """The losses, in order; None when the lanes are done."""

    # -- the caller's side ---------------------------------------------------------------------------------------
    def put(self, minibatch: Minibatch) -> bool:
        """Give the lanes one more minibatch; return False where an error has ended the segment."""
        with self._change:
            if self._ended:
                return False
            minibatch.first = self._next
            self._next += minibatch.microbatches
            self._minibatches[self.put_in] = minibatch
            self.put_in += 1
            self._change.notify_all()
            return True

    def meet(self, doing: str) -> None:
        """Meet the processes that have the other stages, in what all are about to do."""

    def end(self) -> None:
        """Say that no minibatch follows."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the cells that run, and start none for as long as this lasts."""
        with contextlib.ExitStack() as stack:
            for lock in self._running.values():
                stack.enter_context(lock)
            yield

    def start(self, threads: LaneThreads, state: ThreadState) -> None:
        """Let the lanes' threads run what comes, in a thread state of the caller's."""
        lanes = [self._turns(stage) for stage in self._stages]

        def run() -> None:
            try:
                threads.run(lanes, self._act, state)
            except BaseException as error:
                self.broken = error
            self._finish()

        threading.Thread(target=run, name="autosplit stream", daemon=True).start()

    def run_here(self) -> Iterator[None]:
        """Run the lanes in this thread, a round at a time: of each lane what it can start."""
        self._waits = False
        lanes = {stage: self._turns(stage) for stage in self._stages}
        ready: dict[int, Turn | None] = dict.fromkeys(lanes)
        done: dict[int, int] = {}
        left = set(lanes)
        try:
            while left:
                for stage in sorted(left, reverse=True):
                    try:
                        turn = ready[stage] = ready[stage] or next(lanes[stage])
                    except StopIteration:
                        left.discard(stage)
                        continue
                    if turn is not None and all(done.get(need) for need in turn.needs):
                        self._act(turn.action)
                        for need in turn.needs:
                            done[need] -= 1
                            if not done[need]:
                                del done[need]
                        if turn.tells:
                            done[turn.number] = len(turn.tells)
                        ready[stage] = None
                yield
        except BaseException as error:
            self.broken = error
        self._finish()

    def runs_here(self) -> bool:
        """Tell whether this thread runs a cell."""
        return getattr(self._inside, "cell", False)

    def wait(self) -> torch.Tensor | None:
        """Return the next loss; None when the lanes are done."""
        while True:
            try:
                return self.losses.get(timeout=_LOOK_S)
            except Empty:
                continue

    # -- the lanes' side -----------------------------------------------------------------------------------------
    def _microbatches(self, minibatch: int) -> int | None:
        """Return how many microbatches a minibatch has; None where there is no such, 0 where that is not known yet."""
        with self._change:
            self._change.wait_for(lambda: self._ended or minibatch < self.put_in or not self._waits)
            if minibatch < self.put_in:
                return self._minibatches[minibatch].microbatches
            return None if self._ended else 0

    def _turns(self, stage: int) -> Iterator[Any]:
        """Yield what a stage's lane does, and what it waits for; None where the next minibatch is not known yet."""

        def name(other: int, kind: str, microbatch: int) -> int:
            return (microbatch * self._count + other) * 2 + (kind == "B")

        for cell in stream_actions(stage, self._count, self.staleness, self._microbatches):
            if cell is None:
                yield None
                continue
            kind, number, place, last = cell
            self._cells[stage] = number, place, last
            minibatch = self._minibatches[number]
            microbatch = minibatch.first + place
            given = minibatch.sources, minibatch.users
            before, after = given if kind == "F" else reversed(given)
            needs = tuple(name(other, kind, microbatch) for other in sorted(before[stage].intersection(self._stages)))
            tells = tuple(after[stage].intersection(self._stages))
            yield Turn(Action(stage, kind, microbatch), name(stage, kind, microbatch), needs, tells)

    def _act(self, action: Action) -> None:
        """Run the cell that a lane has come to; nothing where its minibatch is dropped."""
        stage = action.stage
        number, place, last = self._cells[stage]
        if self.failed is not None and number >= self.failed[0]:
            return
        minibatch = self._minibatches[number]
        with self._running[stage], self._in_cell(), minibatch.cells.step.lanes[stage].active():
            if action.kind == "F":
                try:
                    self._forward(stage, number, minibatch, place, last=last)
                except Exception as error:
                    self._fail(number, error)
            else:
                self._backward(stage, number, minibatch, place, last=last)

    @contextlib.contextmanager
    def _in_cell(self) -> Iterator[None]:
        self._inside.cell = True
        try:
            yield
        finally:
            self._inside.cell = False

    def _forward(self, stage: int, number: int, minibatch: Minibatch, place: int, *, last: bool) -> None:
        cells, leaves = minibatch.cells, self._stages[stage].take(number)
        if place == 0:
            cells.begin(stage, leaves)
        cells.act(Action(stage, "F", place))
        if last:
            cells.end_forwards(stage)
            if stage == self._count - 1:
                self._tell(number, cells.total())

    def _tell(self, number: int, loss: torch.Tensor) -> None:
        """Give the caller the loss of a minibatch."""
        self.losses.put(loss)

    def _backward(self, stage: int, number: int, minibatch: Minibatch, place: int, *, last: bool) -> None:
        cells, weights = minibatch.cells, self._stages[stage]
        weights.take(number)
        cells.act(Action(stage, "B", place))
        if last:
            cells.forget(stage)
            weights.step(number, cells.sums[Held(stage, 0)].totals, minibatch.settings[stage])
            with self._change:
                minibatch.left -= 1
                if not minibatch.left:
                    del self._minibatches[number]

    def _fail(self, minibatch: int, error: BaseException) -> None:
        """Drop a minibatch whose forward raised, and all behind it."""
        with self._change:
            if self.failed is None or minibatch < self.failed[0]:
                self.failed = minibatch, error
        self.end()

    def _finish(self) -> None:
        """Say that the lanes are done; the stand-ins have the newest weights, so that no older ones live on."""
        try:
            for stage in self._stages.values():
                stage.end()
            self._minibatches.clear()
        finally:
            self.losses.put(None)
