"""The transport between processes: what the stages of one rank send to those of another.

    rank of s    forward ─► send(way, values) ── isend, tag of the way ──► recv(way) ─► forward    rank of t

What travels a way is known on both sides: at the first step of a kind each message is preceded by its description
(shapes, strides, dtypes, which tensors want a gradient and which are None); later ones are held against it. So a later
step sends tensors only, and a receive can be posted before its message is made. The sender never waits: a thread frees
what was sent when it has arrived.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autosplit.distributed.world import World
from autosplit.errors import InputError, ScheduleError
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.transport import Message, SharedMemory, Way
from autosplit.trace.borrowed.blank import is_dense

Ends = Callable[[Way], tuple[int, Sequence[int]]]
"""Gives the rank that sends what goes a way, and those that receive it."""
SHARED = -1
"""The microbatch of what goes once per step: shared values and tied parameters."""
ENDING = -2
"""The microbatch of such values for what comes behind the last cell."""


class Described(NamedTuple):
    """One tensor of a message; strides are those of memory without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Description = tuple[Described | None, ...]


@dataclass
class Descriptions:
    """What travels each way in steps of one kind; ``complete`` when a whole step has gone by them."""

    of: dict[Way, Description] = field(default_factory=dict)
    complete: bool = False


Sent = dict[Way, tuple[list[Any], list[torch.Tensor]]]
"""What is on its way: the works to wait for, and the tensors, which are kept until they have arrived."""


def arrived(sent: Sent, ways: Iterable[Way]) -> None:
    """Let go of messages that have arrived; wait for those that have not."""
    for way in ways:
        for work in sent.pop(way, ([], []))[0]:
            work.wait()


class Messages:
    """Brings messages between stages of one step, to and from other ranks."""

    def __init__(
        self,
        world: World,
        ends: Ends,
        lanes: Sequence[Lane],
        log: StepLog | None,
        *,
        known: Descriptions,
        sent: Sent,
        detached: bool,
        said: Any = None,
    ) -> None:
        """``lanes`` are the stages' and the caller's; ``said`` goes with descriptions, and both sides say the same."""
        self._world, self._ends, self._lanes, self._detached = world, ends, lanes, detached
        self.known, self._sent, self._said = known, sent, said
        self.arrivals: Mapping[Way, Iterable[Way]] = {}
        """For each message, those of this rank that have arrived when it is there."""
        self._inside = SharedMemory(lambda stage, _: lanes[stage], log, detached=detached)
        self._posted: dict[Way, tuple[list[torch.Tensor], list[Any]]] = {}

    def send(self, way: Way, message: Message) -> None:
        """Give away what a stage made, where this rank is the one that does; it is kept until it has arrived."""
        source, targets = self._ends(way)
        if source != self._world.rank:
            return
        if source in targets:
            self._inside.send(way, message)
            return
        description = tuple([None if tensor is None else described(tensor) for tensor in message])
        tag, works = self._tag(way), []
        if not self.known.complete:
            self.known.of[way] = description
            works += [work for to in targets for work in self._describe(description, to, tag)]
        elif self.known.of.get(way) != description:
            raise ScheduleError(
                f"{_place(way)} is {_text(description)}, and was "
                f"{_text(self.known.of.get(way, ()))} when this kind of step ran first; ranks agree on that once"
            )
        with self._lanes[way.source].active():
            flat = [flattened(tensor.detach()) for tensor in message if tensor is not None and tensor.numel()]
            works += [self._world.isend(tensor, to, tag) for to in targets for tensor in flat]
        self._sent[way] = works, flat

    def _tag(self, way: Way) -> int:
        return tag_of(way, len(self._lanes) - 1)

    def _describe(self, description: Description, to: int, tag: int) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps((self._said, description))), dtype=torch.uint8)
        parts = (torch.tensor([data.numel()]), data)
        return [dist.isend(part, group=self._world.control, group_dst=to, tag=tag) for part in parts]

    def _described(self, way: Way, source: int, tag: int) -> Description:
        """Return what comes; at the first step of a kind the sender says it."""
        if not self.known.complete:
            length = torch.zeros(1, dtype=torch.int64)
            with self._world.waiting(_place(way), source):
                dist.recv(length, group=self._world.control, group_src=source, tag=tag)
                data = torch.zeros(int(length), dtype=torch.uint8)
                dist.recv(data, group=self._world.control, group_src=source, tag=tag)
            said, self.known.of[way] = pickle.loads(data.numpy().tobytes())
            if said != self._said:
                raise InputError(
                    f"{_place(way)} came from a rank that has {said}, and this one has {self._said}; every rank takes "
                    "the same minibatches, with the same seed"
                )
        return self.known.of[way]

    def expect(self, way: Way) -> None:
        """Post the receive of a message that is yet to be made, where it is known what comes."""
        if self.known.complete:
            self._posted[way] = self._post(way)

    def _post(self, way: Way) -> tuple[list[torch.Tensor], list[Any]]:
        (source, _), tag = self._ends(way), self._tag(way)
        description, device = self._described(way, source, tag), self._lanes[way.target].device
        with self._lanes[way.target].active():
            made = [
                torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
                for one in description
                if one is not None
            ]
            works = [self._world.irecv(flattened(tensor), source, tag) for tensor in made if tensor.numel()]
        return made, works

    def recv(self, way: Way) -> Message:
        """Return what was sent, on this rank's device."""
        source, _ = self._ends(way)
        if source == self._world.rank:
            return self._inside.recv(way)
        made, works = self._posted.pop(way) if way in self._posted else self._post(way)
        with self._lanes[way.target].active(), self._world.waiting(_place(way), source):
            for work in works:
                work.wait()
            arrived(self._sent, self.arrivals.get(way, ()))
        there = iter(made)
        wants = self._detached and not way.backward
        return [
            None if one is None else next(there).requires_grad_(wants and one.requires_grad)
            for one in self.known.of[way]
        ]

    def clear(self) -> None:
        """Forget what nobody received."""
        self._inside.clear()


def described(tensor: torch.Tensor) -> Described:
    """Describe a tensor; one with gaps in its memory arrives without."""
    dense = tensor if tensor.is_contiguous() or is_dense(tensor) else torch.empty_like(tensor, device="meta")
    return Described(tuple(tensor.shape), dense.stride(), tensor.dtype, tensor.requires_grad)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as bytes; of one with gaps a copy."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    if not is_dense(tensor):
        tensor = tensor.clone(memory_format=torch.preserve_format)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _place(way: Way) -> str:
    what = f"{'gradients' if way.backward else 'values'} of stage {way.source} for stage {way.target}"
    return what if way.microbatch < 0 else f"{what}, microbatch {way.microbatch}"


def tag_of(way: Way, stages: int) -> int:
    """Return the number of a way in messages between stages."""
    number = ((way.microbatch - ENDING) * stages + way.source) * stages + way.target
    return (number * 2 + way.loss) * 2 + way.backward


def _text(description: Description) -> str:
    parts = ["nothing" if one is None else f"{one.dtype}{list(one.shape)}" for one in description]
    return ", ".join(parts) or "nothing"
