"""How values of one microbatch go from stage to stage, and their gradients back: the seam between stages.

    stage s   forward ─► send(way, values)          recv(way back) ─► backward
                              │                            ▲
    stage t          recv(way) ─► forward ... backward ─► send(way back, gradients)

A stage names the way and nothing of its neighbour. The sender never waits; who receives waits for what was sent, on its
own lane and at the action that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import transfer
from autosplit.runtime.step_log import StepLog

Message = Sequence[torch.Tensor | None]
"""What travels together: the values of one stage for one other, or their gradients, None where there is none."""


class Way(NamedTuple):
    """From which stage to which something goes, of which microbatch.

    ``loss``: among what the stage gives the caller, for the loss behind the last stage. ``backward``: gradients, from
    the stage that took the values to the one that made them.
    """

    source: int
    target: int
    microbatch: int
    loss: bool = False
    backward: bool = False

    @property
    def back(self) -> Way:
        """The way of the gradients of what goes this way."""
        return Way(self.target, self.source, self.microbatch, self.loss, backward=True)


class Transport(Protocol):
    """Brings messages from stage to stage; any thread may send and receive."""

    def send(self, way: Way, message: Message) -> None:
        """Give away what the lane of ``way.source`` has been told to make; return at once."""

    def recv(self, way: Way) -> Message:
        """Return what was sent, on the device of ``way.target``, whose lane's later work comes behind its making."""

    def clear(self) -> None:
        """Forget what nobody received."""


class SharedMemory:
    """Between the lanes of one process: what is sent stays where it is until its receiver takes it.

    On one thread, and between threads, that is the tensor itself; between devices it is a copy on the receiver's
    streams (:mod:`autosplit.runtime.lanes.lanes`). The schedule ensures that something was sent by then. ``detached``:
    what arrives is no part of the sender's graph, and wants a gradient where what was sent does.
    """

    def __init__(
        self, lane: Callable[[int, int], Lane], log: StepLog | None, *, detached: bool, asynchronous: bool = True
    ) -> None:
        """``lane`` returns the lane that runs a microbatch of a stage; ``asynchronous``: whether any is."""
        self._lane, self._log, self._detached, self._asynchronous = lane, log, detached, asynchronous
        self._sent: dict[Way, tuple[Message, Any]] = {}

    def send(self, way: Way, message: Message) -> None:
        """Keep a message, and the event behind which it is ready."""
        self._sent[way] = message, self._lane(way.source, way.microbatch).record() if self._asynchronous else None

    def recv(self, way: Way) -> Message:
        """Take a message and bring it to the receiver's device."""
        message, ready = self._sent.pop(way)
        detached = self._detached and not way.backward  # batched gradients cannot be detached, and have no graph
        if self._asynchronous or self._log is not None:
            message = self._moved(way, message, ready, detached=detached)
        elif detached:
            return [
                None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message
            ]
        return message

    def _moved(self, way: Way, message: Message, ready: Any, *, detached: bool) -> Message:
        there = tuple([tensor for tensor in message if tensor is not None])
        given = tuple([tensor.detach() for tensor in there]) if detached else there
        lanes = self._lane(way.source, way.microbatch), self._lane(way.target, way.microbatch)
        if self._log is None:
            moved = transfer(given, *lanes, ready)
        else:
            places = way.source, way.target, way.microbatch
            moved = self._log.copied(
                partial(transfer, given, *lanes, ready), *places, backward=way.backward, ready=ready
            )
        if detached:
            moved = tuple([m.requires_grad_(t.requires_grad) for m, t in zip(moved, there, strict=True)])
        arrived = iter(moved)
        return [None if tensor is None else next(arrived) for tensor in message]

    def clear(self) -> None:
        """Forget what nobody received."""
        self._sent.clear()
