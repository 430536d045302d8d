"""The transport between processes: what the stages of one rank send to those of another.

    rank of s    forward ─► send(way, values) ── isend, in one order per pair ──► recv(way) ─► forward    rank of t

What travels a way is known on both sides: at the first step of a kind each message is preceded by its description (the
way, shapes, strides, dtypes, which tensors want a gradient and which are None); later ones are held against it. So a
later step sends tensors only, and a receive can be posted before its message is made. NCCL has no tags: a rank posts
the receives of another in the order in which that sends, which the descriptions of the first step tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autosplit.distributed import words
from autosplit.distributed.world import World
from autosplit.errors import InputError, ScheduleError
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.transport import Message, SharedMemory
from autosplit.schedule.entry import Route
from autosplit.trace.borrowed.blank import is_dense

_BLOCK = 1 << 14
"""Bytes that a value takes at least between ranks: most values are one message."""
Ends = Callable[[Route], tuple[int, Sequence[int]]]
"""Gives the rank that sends what goes a way, and those that receive it."""


class Described(NamedTuple):
    """One tensor of a message; strides are those of memory without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Description = tuple[Described | None, ...]


@dataclass
class Descriptions:
    """What each rank sends in steps of one kind, in its order; ``complete`` when a whole step has gone by them."""

    of: dict[int, dict[Route, Description]] = field(default_factory=lambda: defaultdict(dict))
    complete: bool = False


class Incoming(NamedTuple):
    """A message whose receives are posted."""

    said: Any
    description: Description
    tensors: list[torch.Tensor]
    works: list[Any]


Sent = dict[Route, tuple[list[Any], list[torch.Tensor]]]
"""What is on its way: the works to wait for, and the tensors, which are kept until they have arrived."""


def arrived(sent: Sent, routes: Iterable[Route]) -> None:
    """Let go of messages that have arrived; wait for those that have not."""
    for route in routes:
        for work in sent.pop(route, ([], []))[0]:
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
        minibatch: int = 0,
        said: Any = None,
        posted: dict[tuple[int, Route], Incoming] | None = None,
    ) -> None:
        """``lanes`` are the stages' and the caller's; ``said`` goes with descriptions, and both sides say the same.

        Several minibatches in flight have numbers, and share ``posted``: their messages come in one order.
        """
        self._world, self._ends, self._lanes, self._detached = world, ends, lanes, detached
        self._sent, self._minibatch, self._said = sent, minibatch, said
        self.arrivals: Mapping[Route, Iterable[Route]] = {}
        """For each message, those of this rank that have arrived when it is there."""
        self.ordered: Collection[Route] = ()
        """The messages that are kept until `release`."""
        self._kept: dict[Route, Message] = {}
        self._inside = SharedMemory(lambda stage, _: lanes[stage], log, detached=detached)
        self._posted = {} if posted is None else posted
        self.follow(known)

    def follow(self, known: Descriptions) -> None:
        """Send and receive by these descriptions from now on."""
        if not known.complete:
            known.of.clear()
        self.known = known
        self._coming: dict[int, Iterator[tuple[Route, Description]]] = {}

    def send(self, route: Route, message: Message) -> None:
        """Give away what a stage made, where this rank is the one that does; it is kept until it has arrived."""
        source, targets = self._ends(route)
        if source != self._world.rank:
            return
        if source in targets:
            self._inside.send(route, message)
        elif route in self.ordered:
            self._kept[route] = message
        else:
            self._send(route, message)

    def release(self, route: Route) -> None:
        """Send a message that waits for its place in the order."""
        self._send(route, self._kept.pop(route))

    def _send(self, route: Route, message: Message) -> None:
        description = tuple([None if tensor is None else described(tensor) for tensor in message])
        known, works = self.known.of[self._world.rank], list[Any]()
        if self.known.complete and known.get(route) != description:
            raise ScheduleError(
                f"{_place(route)} is {_text(description)}, and was {_text(known.get(route, ()))} when this kind of "
                "step ran first; ranks agree on that once"
            )
        known[route] = description
        with self._lanes[route.source].active():
            flat = [flattened(tensor.detach()) for tensor in message if tensor is not None and tensor.numel()]
            for to in self._ends(route)[1]:
                if not self.known.complete:
                    works += post(self._world, (self._minibatch, route, self._said, description), to)
                works += [self._world.isend(tensor, to) for tensor in flat]
        self._sent[route] = works, flat

    def _described(self, source: int, awaited: Route) -> tuple[int, Route, Any, Description]:
        """Return what a rank sends next; at the first step of a kind it says that."""
        if self.known.complete:
            route, description = next(self._coming.setdefault(source, iter(self.known.of[source].items())))
            return self._minibatch, route, self._said, description
        minibatch, route, said, description = hear(self._world, _place(awaited), source)
        self.known.of[source][route] = description
        return minibatch, route, said, description

    def expect(self, route: Route) -> None:
        """Post the receive of a message, behind those of all that its rank sends before."""
        while (self._minibatch, route) not in self._posted:
            source, _ = self._ends(route)
            minibatch, other, said, description = self._described(source, route)
            self._posted[minibatch, other] = Incoming(said, description, *self._post(other, source, description))

    def _post(self, route: Route, source: int, description: Description) -> tuple[list[torch.Tensor], list[Any]]:
        lane = self._lanes[route.target]
        with lane.active():
            blanks = [blank_like(like, lane.device) for like in description if like is not None]
            return blanks, [self._world.irecv(flattened(tensor), source) for tensor in blanks if tensor.numel()]

    def recv(self, route: Route) -> Message:
        """Return what was sent, on this rank's device."""
        source, _ = self._ends(route)
        if source == self._world.rank:
            return self._inside.recv(route)
        self.expect(route)
        said, description, tensors, works = self._posted.pop((self._minibatch, route))
        if said != self._said:
            raise InputError(
                f"{_place(route)} came from a rank that has {said}, and this one has {self._said}; every rank takes "
                "the same minibatches, with the same seed"
            )
        with self._lanes[route.target].active(), self._world.waiting(_place(route), source):
            for work in works:
                work.wait()
            arrived(self._sent, self.arrivals.get(route, ()))
        there = iter(tensors)
        wants = self._detached and not route.backward
        return [None if d is None else next(there).requires_grad_(wants and d.requires_grad) for d in description]

    def clear(self) -> None:
        """Forget what nobody received."""
        self._inside.clear()


def post(world: World, value: Any, target: int, tag: int = 0) -> list[Any]:
    """Tell a rank a value by the CPU, in one order per tag; return the works to wait for."""
    text = words.packed(value).ljust(_BLOCK, b"\0")
    pieces = [words.block(piece, 0) for piece in (text[:_BLOCK], text[_BLOCK:]) if piece]
    return [dist.isend(piece, group=world.control, group_dst=target, tag=tag) for piece in pieces]


def hear(world: World, what: str, source: int, tag: int = 0) -> Any:
    """Return what a rank tells next."""
    text, size = b"", _BLOCK
    with world.waiting(what, source):
        while len(text) < size:
            piece = torch.empty(size - len(text), dtype=torch.uint8)
            dist.recv(piece, group=world.control, group_src=source, tag=tag)
            text += piece.numpy().tobytes()
            size = max(size, words.end(text))
    return words.unpacked(text)


def described(tensor: torch.Tensor) -> Described:
    """Describe a tensor; one with gaps in its memory arrives without."""
    dense = tensor if tensor.is_contiguous() or is_dense(tensor) else torch.empty_like(tensor, device="meta")
    return Described(tuple(tensor.shape), dense.stride(), tensor.dtype, tensor.requires_grad)


def blank_like(like: Described, device: torch.device) -> torch.Tensor:
    """Return a tensor of which there is a description, without its values."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)


def share(tensor: torch.Tensor, source: int, world: World) -> None:
    """Give a tensor the values that one rank has of it; of a quantised weight, those of its pieces."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            share(getattr(tensor, name), source, world)
        return
    raw = torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor  # it takes no values
    value = raw.detach().to(world.device, copy=True, memory_format=torch.contiguous_format)
    world.broadcast(flattened(value), source)
    if source != world.rank:
        tensor.detach().copy_(value)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as bytes; of one with gaps a copy."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    if not is_dense(tensor):
        tensor = tensor.clone(memory_format=torch.preserve_format)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _place(route: Route) -> str:
    what = f"{'gradients' if route.backward else 'values'} of stage {route.source} for stage {route.target}"
    return what if route.microbatch < 0 else f"{what}, microbatch {route.microbatch}"


def _text(description: Description) -> str:
    parts = ["nothing" if like is None else f"{like.dtype}{list(like.shape)}" for like in description]
    return ", ".join(parts) or "nothing"
