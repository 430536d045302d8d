"""A stream of minibatches over the ranks of torchrun, each of which runs its own stage in the caller's thread.

    every rank   takes the same minibatch from its own loader ─► its forwards and backwards, 1F1B ─► the same loss

Ranks do not wait for each other's callers, but for messages; that is what keeps stages busy at different minibatches. A
rank returns a loss when its own backward is done, so that all ranks can get to where they meet: at a new kind of
minibatch, at the loader's end, and where the pipeline is drained. Each message says of which minibatch it is.
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autosplit.distributed.facts import checksum, program_text
from autosplit.distributed.messages import Descriptions, Messages, Sent, arrived, tag_of
from autosplit.distributed.step import RankStep, hang_limit
from autosplit.distributed.world import known_to_all
from autosplit.errors import InputError
from autosplit.lower.split import named_state
from autosplit.options import Sample
from autosplit.ranks.loss import ReadsHere
from autosplit.ranks.recordings import RankRecordings
from autosplit.recorded import FoundCall, Recorded
from autosplit.runtime.transport import Way
from autosplit.schedule.action import Action
from autosplit.schedule.stream import StreamAction
from autosplit.stream.lowering import StreamProgram
from autosplit.stream.minibatches import StreamStep
from autosplit.stream.segment import Segment
from autosplit.stream.stream import Stream
from autosplit.trace.inputs.objects import tensors_in


class RankStreaming:
    """What a pipe of one rank has for streams."""

    def _stream(self, *given: Any) -> Stream:
        return RankStream(self, *given)


@dataclass(kw_only=True)
class RankStreamStep(StreamStep, RankStep):
    """One minibatch of a stream on one rank.

    Attributes:
        said: what ranks have to say alike of it.
        elsewhere: the names of parameters that other ranks have, by their identity.
    """

    said: str
    elsewhere: dict[int, str] = field(default_factory=dict)

    def transport(self, *, detached: bool) -> Messages:
        """Return what brings values from stage to stage, with a description of each message."""
        known, sent = Descriptions(), self.sent
        return Messages(
            self.world, self.ends, self.lanes, self.log, known=known, sent=sent, detached=detached, said=self.said
        )

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in: it reads no parameter of another rank."""
        return ReadsHere(self.elsewhere)


class RankSegment(Segment):
    """Runs one rank's stage of the minibatches."""

    is_shared = True

    def __init__(self, *given: Any, step: RankStreamStep) -> None:
        super().__init__(*given)
        self._world, self._running_step = step.world, step.running
        self._told: dict[int, torch.Tensor] = {}
        """On the last stage's rank, losses that the caller has not been given."""
        self._sent: deque[Sent] = deque()
        """What the last minibatches have sent: other ranks have taken it when so many more have come."""

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

    def _tell(self, number: int, loss: torch.Tensor) -> None:
        self._told[number] = loss

    def _update(self, stage: int, cell: StreamAction) -> None:
        step = self._minibatches[cell.minibatch].cells.step
        super()._update(stage, cell)
        assert isinstance(step, RankStreamStep)
        self._sent.append(step.sent)
        self.losses.put(self._shared(cell.minibatch, step))
        if len(self._sent) > 2 * self._count:
            arrived(sent := self._sent.popleft(), list(sent))

    def _shared(self, number: int, step: RankStreamStep) -> torch.Tensor:
        """Return a minibatch's loss, which the last stage's rank tells the others."""
        world, control = self._world, self._world.control
        way = Way(self._count - 1, self._count - 1, 0, loss=True)
        tag = tag_of(way, self._count)
        if world.rank == step.last:
            loss = self._told.pop(number)
            said = torch.tensor([loss.item(), _DTYPES.index(loss.dtype)], dtype=torch.float64)
            works = [dist.isend(said, group=control, group_dst=rank, tag=tag) for rank in world.others()]
            step.sent[way] = works, [said]
            return loss
        said = torch.zeros(2, dtype=torch.float64)
        with world.waiting("the loss", step.last):
            dist.recv(said, group=control, group_src=step.last, tag=tag)
        value, dtype = said.tolist()
        return torch.tensor(value, dtype=_DTYPES[int(dtype)], device=world.device)

    def _finish(self) -> None:
        if self.broken is None:
            with self._running_step(), self._world.waiting("its messages to arrive", *self._world.others()):
                for sent in self._sent:
                    arrived(sent, list(sent))
        self._sent.clear()
        super()._finish()


_TAKEN = "how many minibatches they have taken"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class RankStream(Stream):
    """The losses of a stream of which this rank runs a stage; see :class:`autosplit.stream.stream.Stream`.

    Every rank iterates over the same minibatches, and drains, saves and ends at the same places. What one rank raises
    inside a minibatch ends all ranks: resume from a checkpoint.
    """

    def __init__(self, pipe: Any, *given: Any) -> None:
        if pipe._feed != "all":
            raise InputError("a stream takes its minibatches on every rank; make the pipe with feed='all'")
        super().__init__(pipe, *given)
        self._world, self._taken = pipe._world, 0
        plan = self._core.recordings.plan
        self._step_s = 0.0 if plan is None else plan.step_s

    @property
    def _recordings(self) -> RankRecordings:
        recordings: RankRecordings = self._core.recordings
        return recordings

    def _take(self) -> None:
        super()._take()
        if self._exhausted and not (self._error is not None and known_to_all(self._error)):
            try:
                with self._world.watch.step(hang_limit(self._step_s)):
                    self._world.agree("takes no more minibatches", {_TAKEN: self._taken}, self._error)
            except Exception as error:
                self._error = error

    def _program(self, recorded: Recorded) -> StreamProgram:
        new = id(recorded) not in self._programs
        made = super()._program(recorded)
        if new:
            self._recordings.check_reads(recorded)
            facts = {"what each stage runs": program_text(made.lowered)}
            self._world.agree("takes a minibatch of a new kind", facts)
        return made

    def _step(self, found: FoundCall, program: StreamProgram, target: Any) -> RankStreamStep:
        said = f"minibatch {self._taken} with checksum {checksum((*found.tensors, *tensors_in(target)))}"
        if program.lowered.random:
            said += f", random state {zlib.crc32(torch.get_rng_state().numpy().data)}"
        self._taken += 1
        named, own = named_state(self._core.model), self._pipe._is_own
        return RankStreamStep(
            **vars(super()._step(found, program, target)),
            world=self._world,
            ranks=self._recordings.ranks,
            step_s=self._step_s,
            said=said,
            elsewhere={id(tensor): name for name, tensor in named if not own(name)},
        )

    def _whole(self, sample: Sample) -> NoReturn:
        raise InputError(
            "how a loss of your own adds up over microbatches is proved on outputs that no rank has: with "
            "staleness='2bw' give one of torch's losses, or the model's own"
        )

    def _segment(self, step: StreamStep) -> RankSegment:
        assert isinstance(step, RankStreamStep)
        self._recordings.check_fresh()
        self._recordings.trains()
        return RankSegment(self._stages, [1] * len(step.lowered.stages), self._staleness, step=step)
