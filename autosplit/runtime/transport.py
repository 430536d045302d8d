"""How values of one microbatch go from stage to stage, and their gradients back: the seam between stages.

    stage s   forward ─► send(route, values)        recv(route.back) ─► backward
                              │                            ▲
    stage t          recv(route) ─► forward ... backward ─► send(route.back, gradients)

A stage names the route and nothing of its neighbour. The sender never waits; who receives waits for what was sent, on
its lane and at the action that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import transfer
from autosplit.runtime.step_log import StepLog
from autosplit.schedule.entry import Receive, Route, Send

Message = Sequence[torch.Tensor | None]
"""What travels together: the values of one stage for one other, or their gradients, None where there is none."""


class Transport(Protocol):
    """Brings messages from stage to stage; any thread may send and receive."""

    def send(self, route: Route, message: Message) -> None:
        """Give away what the lane of ``route.source`` has been told to make; return at once."""

    def recv(self, route: Route) -> Message:
        """Return what was sent, on the device of ``route.target``, whose lane's later work comes behind its making."""

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
        self._sent: dict[Route, tuple[Message, Any]] = {}

    def send(self, route: Route, message: Message) -> None:
        """Keep a message, and the event behind which it is ready."""
        self._note(Send(route))
        self._sent[route] = message, self._lane(route.source, route.microbatch).record() if self._asynchronous else None

    def recv(self, route: Route) -> Message:
        """Take a message and bring it to the receiver's device."""
        self._note(Receive(route))
        message, ready = self._sent.pop(route)
        detached = self._detached and not route.backward  # batched gradients cannot be detached, and have no graph
        if self._asynchronous or self._log is not None:
            message = self._moved(route, message, ready, detached=detached)
        elif detached:
            return [
                None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message
            ]
        return message

    def _note(self, entry: Send | Receive) -> None:
        """Note what goes from lane to lane."""
        source, target, microbatch, *_ = entry.route
        if self._log is not None and self._lane(source, microbatch) is not self._lane(target, microbatch):
            self._log.note(entry)

    def _moved(self, route: Route, message: Message, ready: Any, *, detached: bool) -> Message:
        there = tuple([tensor for tensor in message if tensor is not None])
        tensors = tuple([tensor.detach() for tensor in there]) if detached else there
        lanes = self._lane(route.source, route.microbatch), self._lane(route.target, route.microbatch)
        if self._log is None:
            moved = transfer(tensors, *lanes, ready)
        else:
            places = route.source, route.target, route.microbatch
            moved = self._log.copied(
                partial(transfer, tensors, *lanes, ready), *places, backward=route.backward, ready=ready
            )
        if detached:
            moved = tuple([m.requires_grad_(t.requires_grad) for m, t in zip(moved, there, strict=True)])
        arrived = iter(moved)
        return [None if tensor is None else next(arrived) for tensor in message]

    def clear(self) -> None:
        """Forget what nobody received."""
        self._sent.clear()
