"""A stream of minibatches over the ranks of torchrun, each of which runs its own stage in the caller's thread.

    every rank   takes the same minibatch from its own loader ─► its forwards and backwards, 1F1B ─► the same loss

Ranks do not wait for each other's callers, but for messages; that is what keeps stages busy at different minibatches.
Before a rank returns a loss it does all that it can with the minibatches that it has taken. So no other rank waits for
it when it waits for all ranks: in the caller's loop, at a new kind of minibatch, at the loader's end, and where the
pipeline is drained. Each message says of which minibatch it is.
"""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import torch

from autosplit.distributed.facts import checksum, program_text
from autosplit.distributed.messages import Descriptions, Incoming, Sent, arrived
from autosplit.distributed.ranks.loss import ReadsHere
from autosplit.distributed.ranks.prepared import is_checked
from autosplit.distributed.ranks.recordings import RankRecordings
from autosplit.distributed.replicas import join, packed
from autosplit.distributed.step import RankStep
from autosplit.errors import InputError, as_known, known_to_all
from autosplit.options import Sample
from autosplit.recorded import FoundCall, Recorded
from autosplit.runtime.lanes.threads import Turn
from autosplit.runtime.lower.split import named_state
from autosplit.runtime.ops import SHARED, plus
from autosplit.runtime.step.sums import Held
from autosplit.runtime.transport import Message
from autosplit.schedule.action import Action
from autosplit.schedule.entry import Route
from autosplit.schedule.stream import StreamAction, replica_actions, updates_behind
from autosplit.stream.cells import Minibatch, StreamCells
from autosplit.stream.flight import OpenStream
from autosplit.stream.lowering import StreamProgram
from autosplit.stream.minibatches import StreamStep
from autosplit.stream.segment import Segment
from autosplit.stream.stream import Stream
from autosplit.trace.inputs.objects import tensors_in

_STREAMS: WeakSet[OpenStream] = WeakSet()
"""Those of all pipes of this process."""


class RankStreaming:
    """What a pipe of one rank has for streams."""

    _core: Any

    def _check_alone(self) -> None:
        """Raise InputError where another pipe has minibatches in flight: their messages go the same ways."""
        _STREAMS.add(self._core.stream)
        for flight in filter(None, [other.flight for other in _STREAMS if other is not self._core.stream]):
            if not flight.segment.ended:  # by its loader, or by a loop that was left
                raise InputError(
                    "a stream of another pipe has minibatches in flight over the same ranks, and their messages would "
                    "mix with this pipe's; call its drain(), or close(), on all ranks first"
                )
            flight.finish()

    def _stream(self, *args: Any) -> Stream:
        return RankStream(self, *args)


@dataclass(kw_only=True)
class RankStreamStep(StreamStep, RankStep):
    """One minibatch of a stream on one rank.

    Attributes:
        minibatch: its number in the stream of this pipe.
        said: what ranks have to say alike of it.
        posted: the messages of all minibatches in flight whose receives are posted.
        elsewhere: the names of parameters that other ranks have, by their identity; None: it is not looked at.
    """

    minibatch: int
    said: str
    posted: dict[tuple[int, Route], Incoming]
    elsewhere: dict[int, str] | None

    def _described(self) -> dict[str, Any]:
        """Return by what messages are described, each for itself."""
        return {"known": Descriptions(), "minibatch": self.minibatch, "said": self.said, "posted": self.posted}

    @property
    def loss_way(self) -> Route:
        """The way of the minibatch's loss to all ranks."""
        return Route(len(self.ranks) - 1, len(self.ranks) - 1, SHARED, loss=True)

    @property
    def counts(self) -> list[int]:
        """How many replicas each stage has."""
        return [len(ranks) for ranks in self.ranks]

    @property
    def last(self) -> int:
        """The rank of the last stage that has the minibatch's last microbatch; it tells the loss."""
        return self.ends(Route(len(self.ranks) - 1, 0, len(self.sizes) - 1))[0]

    def ends(self, route: Route) -> tuple[int, Sequence[int]]:
        """Return the rank that sends what goes a way, and those that receive it.

        Replicas take the microbatches of the stream in turn. What goes from a stage to itself is for its other
        replicas, and the loss for the rank that tells it; that tells the others the minibatch's.
        """
        if route == self.loss_way:
            return self.last, [rank for rank in range(self.world.size) if rank != self.last]
        replicas, targets = self.ranks[route.source], self.ranks[route.target]
        number = self.first + route.microbatch
        there = replicas[number % len(replicas)]
        if route.source != route.target:
            return there, (targets[number % len(targets)],)
        return there, (self.last,) if route.loss else [rank for rank in replicas if rank != there]

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in: it reads no parameter of another rank."""
        return nullcontext() if self.elsewhere is None else ReadsHere(self.elsewhere)


class RankSegment(Segment):
    """Runs what one rank does of the minibatches.

    Replicas of a stage send each other the gradients of their parts of a minibatch, and what norms saw of it. Each
    makes all updates, so that they keep the same weights.
    """

    is_shared = True

    def __init__(self, *args: Any, step: RankStreamStep) -> None:
        self._world, self._running_step = step.world, step.running
        super().__init__(*args)
        (stage,) = self._stages
        self._behind = updates_behind(self.staleness, self._replicas)[stage]
        self._told: dict[int, torch.Tensor] = {}
        """On the rank that tells them, losses that the caller has not been given, by minibatch."""
        self._parts: deque[tuple[int, StreamCells, Route, Message]] = deque()
        """What the stage's other replicas were sent: the update that it is for, its minibatch, and where it went."""
        self._sent: deque[Sent] = deque()
        """What the last minibatches have sent."""

    def _here(self) -> dict[int, Held]:
        (stage,) = self._stages
        return {self._world.rank: Held(stage, 0)}

    def _turns_of(self, stage: int, lane: int) -> Iterator[Any]:
        """Yield what this rank does; for what comes from other ranks it waits where it takes it."""
        replica = self._dealt.lanes_of(stage).index(lane)
        for cell in replica_actions(stage, replica, self._replicas, self.staleness, self._microbatches):
            self._now[lane], self.goes_on = cell, cell is not None
            yield cell and Turn(Action(stage, cell.kind, cell.microbatch), 0, (), ())

    def put(self, minibatch: Minibatch) -> bool:
        """Take one more minibatch."""
        self.goes_on = True
        return super().put(minibatch)

    def end(self) -> None:
        """Say that no minibatch follows: what is in flight can be done then."""
        self.goes_on = self.goes_on or (not self.ended and self.broken is None)
        super().end()

    def meet(self, doing: str) -> None:
        """Meet the other ranks; raise InputError where they have taken another number of minibatches."""
        with self._running_step():
            self._world.agree(doing, {_TAKEN: self.put_in})

    def _act(self, action: Action) -> None:
        with self._running_step():
            self._world.watch.doing(action)
            super()._act(action)

    def _fail(self, minibatch: int, error: BaseException) -> NoReturn:
        raise error  # other ranks have gone on: it ends them all

    def _end_forwards(self, stage: int, cell: StreamAction) -> None:
        cells = self._minibatches[cell.minibatch].cells
        if self._replicas[stage] == 1 and cell.offset + 1 == len(cells.step.sizes):
            cells.end_forwards(stage)

    def _backward(self, held: Held, cell: StreamAction, cells: StreamCells) -> None:
        super()._backward(held, cell, cells)
        stage, count, step = held.stage, self._replicas[held.stage], _step_of(cells)
        if cell.offset + count < len(step.sizes):
            return  # it has more microbatches of this minibatch
        if count > 1:
            route = Route(stage, stage, cell.offset).back
            self._parts.append((cell.update, cells, route, self._part(stage, cells)))
            cells.transport.send(route, self._parts[-1][-1])
        if stage == self._count - 1:
            step.join_losses(cells)
            if self._world.rank == step.last:
                self._tell(cell.minibatch, cells.total())

    def _part(self, stage: int, cells: StreamCells) -> Message:
        """Return this rank's gradients of the stage's weights, and as bytes what norms saw and the sparse ones."""
        gradients = super()._gradients(stage, cells)
        sparse = {index: g.cpu() for index, g in enumerate(gradients) if g is not None and g.is_sparse}
        saw = pickle.dumps((packed(cells.state(stage).statistics, cells.named()), sparse))
        return [
            *(None if index in sparse else g for index, g in enumerate(gradients)),
            torch.frombuffer(bytearray(saw), dtype=torch.uint8).to(self._world.device),
        ]

    def _gradients(self, stage: int, cells: StreamCells) -> list[torch.Tensor | None]:
        """Return the sums of what the replicas have, in their order; norms see what all of them saw."""
        count, step = self._replicas[stage], _step_of(cells)
        if count == 1:
            return super()._gradients(stage, cells)
        kept = {route: message for _, of, route, message in self._parts if of is cells}
        last = range(max(0, len(step.sizes) - count), len(step.sizes))  # of each replica its last microbatch
        routes = [Route(stage, stage, index).back for index in sorted(last, key=lambda at: (step.first + at) % count)]
        parts = [kept[route] if route in kept else cells.transport.recv(route) for route in routes]
        words = [pickle.loads(data.cpu().numpy().tobytes()) for *_, data in parts if data is not None]
        saw = cells.state(stage).statistics
        saw.clear()
        join(saw, (seen for seen, _ in words), cells.named(), in_turn=True)
        cells.end_forwards(stage)
        total, *others = (
            [sparse[index].to(self._world.device) if index in sparse else g for index, g in enumerate(gradients)]
            for (*gradients, _), (_, sparse) in zip(parts, words, strict=True)
        )
        for gradients in others:
            total = [a if b is None else b if a is None else plus(a, b) for a, b in zip(total, gradients, strict=True)]
        sent = {id(gradient) for each in kept.values() for gradient in each}  # an optimizer may change its gradients
        return [gradient.clone() if gradient is not None and id(gradient) in sent else gradient for gradient in total]

    def _update(self, stage: int, cell: StreamAction) -> None:
        begin = self._stages[stage].minibatches
        parts = sum(len(self._minibatches[n].cells.step.sizes) for n in range(begin, cell.minibatch + 1))
        super()._update(stage, cell)
        while parts >= self._replicas[stage] and self._parts and self._parts[0][0] < cell.update - self._behind:
            _, cells, route, _ = self._parts.popleft()  # the others have begun a round that needs that update
            arrived(_step_of(cells).sent, [route])

    def _tell(self, number: int, loss: torch.Tensor) -> None:
        """Tell the other ranks the loss of a minibatch."""
        cells = self._minibatches[number].cells
        self._told[number] = loss
        cells.transport.send(_step_of(cells).loss_way, [loss])

    def _stepped(self, number: int) -> None:
        cells = self._minibatches[number].cells
        step = _step_of(cells)
        self._sent.append(step.sent)
        heard = [self._told.pop(number)] if number in self._told else cells.transport.recv(step.loss_way)
        self.losses.put(heard[0])
        if len(self._sent) > 2 * (len(self._dealt.lanes) + max(self._replicas)):  # other ranks are not so far behind
            arrived(sent := self._sent.popleft(), list(sent))

    def _finish(self) -> None:
        self.goes_on = False
        if self.broken is None:
            with self._running_step(), self._world.waiting("its messages to arrive", *self._world.others()):
                for sent in self._sent:
                    arrived(sent, list(sent))
        if self.broken is None and max(self._replicas) > 1:
            with self._running_step():
                self.broken = self._unlike()
        self._sent.clear()
        super()._finish()

    def _unlike(self) -> BaseException | None:
        """Return what to say of replicas that have come to have different weights."""
        ((stage, weights),) = self._stages.items()
        words = self._world.agree("ends a stream", {}, word=(stage, checksum(weights.parameters)))
        first = dict(reversed([(word[0], (rank, word[1])) for rank, word in enumerate(words)]))
        for rank, (stage, digest) in enumerate(words):
            if digest != first[stage][1]:
                return as_known(
                    InputError(
                        f"ranks {first[stage][0]} and {rank} are replicas of stage {stage}, and have different weights "
                        "after the same minibatches: their optimizers or hooks differ; give all ranks the same"
                    )
                )
        return None


def _step_of(cells: StreamCells) -> RankStreamStep:
    assert isinstance(cells.step, RankStreamStep)
    return cells.step


_TAKEN = "how many minibatches they have taken"


class RankStream(Stream):
    """The losses of a stream of which this rank runs a stage; see :class:`autosplit.stream.stream.Stream`.

    Every rank iterates over the same minibatches, and drains, saves and ends at the same places. What one rank raises
    inside a minibatch ends all ranks: resume from a checkpoint.
    """

    def __init__(self, pipe: Any, *args: Any) -> None:
        if pipe._feed != "all":
            raise InputError("a stream takes its minibatches on every rank; make the pipe with feed='all'")
        super().__init__(pipe, *args)
        self._world, self._taken = pipe._world, 0
        self._posted: dict[tuple[int, Route], Incoming] = {}
        self._timeout_s: float = pipe._timeout_s

    @property
    def _recordings(self) -> RankRecordings:
        recordings: RankRecordings = self._core.recordings
        return recordings

    def _take(self) -> None:
        super()._take()
        if self._exhausted and not (self._error is not None and known_to_all(self._error)):
            try:
                with self._world.watch.step(self._timeout_s):
                    why = "" if self._error is None else f": {type(self._error).__name__}: {self._error}"
                    self._world.agree(f"takes no more minibatches{why}", {_TAKEN: self._taken}, self._error)
            except Exception as error:
                self._error = error

    def _program(self, recorded: Recorded) -> StreamProgram:
        new = id(recorded) not in self._programs
        program = super()._program(recorded)
        if new:
            self._recordings.check_reads(recorded)
            facts = {"what each stage runs": program_text(program.lowered)}
            self._world.agree("takes a minibatch of a new kind", facts)
        return program

    def _step(self, call: FoundCall, program: StreamProgram, target: Any) -> RankStreamStep:
        number, tensors, elsewhere = self._taken, (*call.tensors, *tensors_in(target)), None
        said = f"minibatch {number} of {[[*tensor.shape] for tensor in tensors]}"
        if self._pipe._agreement.compares(number):
            said += f" with checksum {checksum(tensors)}"
        if is_checked(number):
            named, is_own = named_state(self._core.model), self._recordings.is_own
            elsewhere = {id(tensor): name for name, tensor in named if not is_own(name)}
        if program.lowered.random:
            said += f", random state {zlib.crc32(torch.get_rng_state().numpy().data)}"
        self._taken += 1
        return RankStreamStep(
            **vars(super()._step(call, program, target)) | {"reduce_dtype": self._pipe._reduce_dtype},
            world=self._world,
            parallel=self._pipe._planned().parallel,
            ranks=self._recordings.ranks,
            timeout_s=self._timeout_s,
            minibatch=number,
            said=said,
            posted=self._posted,
            elsewhere=elsewhere,
        )

    def _whole(self, sample: Sample) -> NoReturn:
        raise InputError(
            "how a loss of your own adds up over microbatches is proved on outputs that no rank has: with "
            "staleness='2bw' give one of torch's losses, or the model's own"
        )

    def _segment(self, step: StreamStep) -> RankSegment:
        assert isinstance(step, RankStreamStep)
        self._pipe._check_alone()
        self._recordings.check_fresh()
        self._recordings.trains()
        return RankSegment(self._stages, step.counts, self._staleness, step=step)
