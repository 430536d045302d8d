"""From filling the pipeline to draining it: minibatches come in, lanes run them 1F1B, losses come out in order.

    caller      put(0) put(1) put(2)  wait ─► loss 0     put(3) wait ─► loss 1      end()  wait ─► None
    lanes       F0 F1 F2 B0 U0 F3 ...                                   no more forwards, all backwards

An update follows the backwards of its round and takes their mean gradient, each minibatch weighted by its rows. Where
the stream ends, or is drained, within a round, that is the mean over the minibatches that there are.

An error in a forward ends the segment with the minibatch before it: what came earlier is finished, what came later is
dropped, and all stages are as if the stream had ended there. An error in a backward, or in an optimizer, stops all
lanes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from queue import Empty, SimpleQueue
from typing import Any

import torch

from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.threads import LaneThreads, Turn
from autosplit.runtime.ops import plus
from autosplit.runtime.step.sums import Held
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.stream import StreamAction, round_size, stream_actions
from autosplit.stream.cells import Minibatch, StreamCells
from autosplit.stream.versions import StageWeights

_LOOK_S = 0.2
"""How long the caller waits at a time: a signal to another thread does not end a wait."""


class Segment:
    """Runs minibatches; see the module's docstring.

    Attributes:
        is_shared: whether other processes have stages too.
        goes_on: whether more is to be done before the next loss is returned.
    """

    is_shared = False
    goes_on = False

    def __init__(self, stages: Mapping[int, StageWeights], replicas: Sequence[int], staleness: str) -> None:
        """``stages`` are those that run in this process; ``replicas`` are those of all stages."""
        self._stages, self._replicas, self.staleness = stages, replicas, staleness
        self._count = len(replicas)
        self._dealt = Schedule("stream", ((),) * sum(replicas), replicas=tuple(replicas))
        """Knows the lane of an action."""
        self._waits = True
        """Whether a lane waits until a minibatch comes in."""
        self._inside: set[int] = set()
        """The threads that run a cell."""
        self._minibatches: dict[int, Minibatch] = {}
        self._change = threading.Condition()
        self._held = self._here()
        self._running = {lane: threading.Lock() for lane in self._held}
        """Held by a lane while it runs a cell."""
        self.ended = False
        """Whether no minibatch follows."""
        self._next = 0
        """How many microbatches have come in."""
        self._now: list[StreamAction | None] = [None] * len(self._dealt.lanes)
        """What each lane has come to."""
        self._order = [threading.Lock() for _ in replicas]
        self._through = [0] * len(replicas)
        """By stage: all minibatches before this number have finished their forwards."""
        self.put_in = 0
        """How many minibatches have come in."""
        self.failed: tuple[int, BaseException] | None = None
        """The first minibatch whose forward raised, and what it raised."""
        self.broken: BaseException | None = None
        """What stopped all lanes."""
        self.losses: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        """The losses, in order; None when the lanes are done."""

    def _here(self) -> dict[int, Held]:
        """Return the lanes of this process, and what each has of which stage."""
        return {
            lane: Held(stage, index) for stage in self._stages for index, lane in enumerate(self._dealt.lanes_of(stage))
        }

    # -- the caller's side ---------------------------------------------------------------------------------------
    def put(self, minibatch: Minibatch) -> bool:
        """Give the lanes one more minibatch; return False where an error has ended the segment."""
        with self._change:
            if self.ended:
                return False
            minibatch.cells.step.first = self._next
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
            self.ended = True
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
        lanes = list(self._turns().values())

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
        lanes = self._turns()
        ready: dict[int, Turn | None] = dict.fromkeys(lanes)
        done: dict[int, int] = {}
        left = set(lanes)
        try:
            while left:
                for lane in sorted(left, reverse=True):
                    try:
                        turn = ready[lane] = ready[lane] or next(lanes[lane])
                    except StopIteration:
                        left.discard(lane)
                        continue
                    if turn is not None and all(done.get(need) for need in turn.needs):
                        self._act(turn.entry)
                        for need in turn.needs:
                            done[need] -= 1
                            if not done[need]:
                                del done[need]
                        if turn.tells:
                            done[turn.number] = len(turn.tells)
                        ready[lane] = None
                yield
        except BaseException as error:
            self.broken = error
        self._finish()

    def runs_here(self) -> bool:
        """Tell whether this thread runs a cell."""
        return threading.get_ident() in self._inside

    def wait(self) -> torch.Tensor | None:
        """Return the next loss; None when the lanes are done."""
        while True:
            with contextlib.suppress(Empty):
                return self.losses.get(timeout=_LOOK_S)

    # -- the lanes' side -----------------------------------------------------------------------------------------
    def _microbatches(self, minibatch: int) -> int | None:
        """Tell a lane how many microbatches a minibatch has: None where there is no such, 0 where that is not known.

        A lane is told once.
        """
        with self._change:
            self._change.wait_for(lambda: self.ended or minibatch < self.put_in or not self._waits)
            if minibatch < self.put_in:
                count = self._minibatches[minibatch].microbatches
                self._let_go(minibatch)
                return count
            return None if self.ended else 0

    def _let_go(self, minibatch: int) -> None:
        """Note that a lane or a stage needs a minibatch no more."""
        with self._change:
            entry = self._minibatches[minibatch]
            entry.left -= 1
            if not entry.left:
                del self._minibatches[minibatch]

    def _turns(self) -> dict[int, Iterator[Any]]:
        """Return what each lane does."""
        return {lane: self._turns_of(held.stage, lane) for lane, held in self._held.items()}

    def _turns_of(self, stage: int, lane: int) -> Iterator[Any]:
        """Yield what a lane does, and what it waits for; None where the next minibatch is not known yet."""
        lane_of, lanes = self._dealt.lane_of, self._dealt.lanes_of(stage)
        replica, siblings = lanes.index(lane), tuple(other for other in lanes if other != lane)

        def name(other: int, kind: str, number: int) -> int:
            return (number * self._count + other) * 3 + "FBU".index(kind)

        for cell in stream_actions(stage, replica, self._replicas, self.staleness, self._microbatches):
            if cell is None:
                yield None
                continue
            self._now[lane] = cell
            action = Action(stage, cell.kind, cell.microbatch)
            needs = [name(stage, *need) for need in cell.needs]
            if cell.kind == "U":
                yield Turn(action, name(stage, "U", cell.update), tuple(needs), siblings)
                continue
            sources, users = self._minibatches[cell.minibatch].ways
            before, after = (sources, users) if cell.kind == "F" else (users, sources)
            needs += [name(other, cell.kind, cell.microbatch) for other in before[stage]]
            tells = [lane_of(other, cell.microbatch) for other in after[stage]]
            if cell.kind == "B" and cell.microbatch + len(lanes) > cell.last:
                tells += {lane_of(stage, cell.last)} - {lane}
            yield Turn(action, name(*action), tuple(needs), tuple(tells))

    def _act(self, action: Action) -> None:
        """Run what a lane has come to; nothing where its minibatch is dropped."""
        lane = self._dealt.lane_of(action.stage, action.microbatch)
        cell, held = self._now[lane], self._held[lane]
        assert cell is not None
        with self._running[lane]:
            self._inside.add(threading.get_ident())
            try:
                if cell.kind == "U":
                    self._update(action.stage, cell)
                elif not self._is_dropped(cell.minibatch):
                    cells = self._minibatches[cell.minibatch].cells
                    with cells.step.lane_of(held).active():
                        (self._forward if cell.kind == "F" else self._backward)(held, cell, cells)
            finally:
                self._inside.discard(threading.get_ident())

    def _is_dropped(self, minibatch: int) -> bool:
        return self.failed is not None and minibatch >= self.failed[0]

    def _forward(self, held: Held, cell: StreamAction, cells: StreamCells) -> None:
        try:
            self._stages[held.stage].take(cells.sums[held], cell.update)
            cells.act(Action(held.stage, "F", cell.offset))
        except Exception as error:
            self._fail(cell.minibatch, error)
        else:
            self._end_forwards(held.stage, cell)

    def _end_forwards(self, stage: int, cell: StreamAction) -> None:
        """Note that a forward is over; go on with what comes behind all forwards of minibatches, in their order."""
        with self._order[stage]:
            self._minibatches[cell.minibatch].open[stage] -= 1
            while not self._is_dropped(number := self._through[stage]):
                if (entry := self._minibatches.get(number)) is None or entry.open[stage]:
                    break
                try:
                    entry.cells.end_forwards(stage)
                    if stage == self._count - 1:
                        self._tell(number, entry.cells.total())
                except Exception as error:
                    self._fail(number, error)
                self._through[stage] += 1

    def _tell(self, number: int, loss: torch.Tensor) -> None:
        """Give the caller the loss of a minibatch."""
        self.losses.put(loss)

    def _backward(self, held: Held, cell: StreamAction, cells: StreamCells) -> None:
        weights, sums = self._stages[held.stage], cells.sums[held]
        if sums.reads_modules:
            weights.take(sums, cell.update)
        cells.act(Action(held.stage, "B", cell.offset))
        if cell.microbatch + self._replicas[held.stage] > cell.last:  # its last one of the round
            weights.release(sums)

    def _update(self, stage: int, cell: StreamAction) -> None:
        """Step by the minibatches of a round that are not dropped."""
        weights, size = self._stages[stage], round_size(self.staleness, self._replicas[stage])
        numbers = [n for n in range(cell.update * size, cell.minibatch + 1) if not self._is_dropped(n)]
        if not numbers:
            return
        entries = [self._minibatches[number] for number in numbers]
        with weights.lane.active():
            parts = [(each.cells.step.rows, self._gradients(stage, each.cells)) for each in entries]
            weights.step(_mean(parts), entries[-1].settings, minibatches=len(entries))
        for number in numbers:
            self._stepped(number)
            self._let_go(number)

    def _gradients(self, stage: int, cells: StreamCells) -> list[torch.Tensor | None]:
        """Return the gradients of a stage's weights by a minibatch."""
        return cells.gradients(stage, self._stages[stage].lane)

    def _stepped(self, number: int) -> None:
        """Note that a stage has stepped by a minibatch."""

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


def _mean(parts: Sequence[tuple[int, list[torch.Tensor | None]]]) -> list[torch.Tensor | None]:
    """Return the mean of gradients, each weighted by the rows that it comes from; None is no gradient."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(rows for rows, _ in parts)
    means: list[torch.Tensor | None] = []
    for each in zip(*(gradients for _, gradients in parts), strict=True):
        weighted = [g * (rows / total) for (rows, _), g in zip(parts, each, strict=True) if g is not None]
        means.append(reduce(plus, weighted) if weighted else None)
    return means
