"""Minibatches in flight: a segment, what runs it, and what is to be done when it ends.

A flight belongs to its pipe (:class:`OpenStream`) until it has ended, also where its stream is dropped. Whoever reads
or changes the model meanwhile finishes it first: calls of the pipe, ``state_dict`` and ``load_state_dict``, copies.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import leave
from autosplit.stream.cells import Minibatch
from autosplit.stream.optimizers import StageOptimizer
from autosplit.stream.segment import Segment
from autosplit.stream.versions import StageWeights
from autosplit.units import format_bytes

_LOCKS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The lock of each model that has pipes, by its id."""


class OpenStream:
    """What a pipe knows of its last stream: the minibatches in flight, if any, and what the report says of it."""

    def __init__(self, model: nn.Module) -> None:
        self.flight: Flight | None = None
        self.text = ""
        self.lock = _LOCKS.setdefault(id(model), threading.RLock())
        """Held by who puts minibatches in, takes losses out, finishes, or calls a pipe of the model: one at a time."""

    def drain(self) -> None:
        """Finish minibatches in flight."""
        if self.flight is not None:
            self.flight.finish()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hold minibatches in flight where they are."""
        with contextlib.nullcontext() if self.flight is None else self.flight.segment.paused():
            yield


class Flight:
    """A segment and its surroundings.

    Attributes:
        under: which parameters it trains, in which groups of the optimizer, and the state of the thread.
        state: that state: autocast, whose cache would keep the leaves of all versions and is off, and modes.
        losses: where they go.
        rounds: runs the lanes in the caller's thread; None: they have threads.
        error: what ended it.
        ended: whether the lanes are done.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        segment: Segment,
        stages: Sequence[StageWeights],
        optimizers: Sequence[StageOptimizer | None],
        lanes: Sequence[Lane],
        losses: deque[torch.Tensor],
        *,
        before: int,
        under: tuple[Any, ThreadState],
        ahead: tuple[int, int],
    ) -> None:
        """``before`` is how many minibatches of the stream came before; ``lanes`` are the stages' and the caller's.

        ``ahead`` says how many are in flight before a loss is due (:func:`autosplit.schedule.stream.ahead`).
        """
        self.segment, self.losses, self.under = segment, losses, under
        _, self.state = under
        self._open, self._stages, self._optimizers, self._before = open_stream, stages, optimizers, before
        self._caller, self._lanes = lanes[-1], list(dict.fromkeys(lanes[:-1]))
        self._ahead = ahead
        self._flying: deque[int] = deque()
        """How many microbatches the minibatches have that came in and gave no loss yet."""
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()
        self.rounds: Iterator[None] | None = None
        self.error: BaseException | None = None
        self.ended = False
        open_stream.flight = self

    def watch(self, read: Sequence[Any]) -> None:
        """Finish before the state of modules and optimizers is read or loaded."""
        for target in read:
            for register in (target.register_state_dict_pre_hook, target.register_load_state_dict_pre_hook):
                self._hooks.append(register(_Drains(self._open)))

    def put(self, minibatch: Minibatch) -> bool:
        """Put one more minibatch in flight; return False where an error has ended the segment."""
        self._flying.append(minibatch.microbatches)
        return self.segment.put(minibatch)

    def wants_more(self) -> bool:
        """Tell whether stages may need more minibatches to step by the first in flight."""
        first, behind = self._ahead
        return sum(islice(self._flying, first, None)) < behind

    def finish(self) -> None:
        """Finish what is in flight; no more comes in.

        Raises InputError where one of its own lanes asks for that.
        """
        if self.segment.runs_here():
            raise InputError(
                "the model's state was asked for inside a stage of its stream (a hook, a loss, an optimizer's hook), "
                "while other stages are at other minibatches; ask between two losses"
            )
        with self._open.lock:
            self.segment.meet("finishes the minibatches in flight")
            self.segment.end()
            while not self.ended:
                self.receive()

    def leave(self) -> None:
        """Finish what is in flight where nobody asks for losses any more; raise what it has raised.

        In another thread than the caller's, which may be a lane that collects garbage, the pipe's next call does that.
        """
        if self.ended:
            return
        if self.segment.is_shared or threading.get_ident() != self._thread or self.segment.runs_here():
            self.segment.end()
        else:
            self.finish()
            if self.error is not None:
                raise self.error

    def receive(self) -> None:
        """Take the next loss, or end."""
        if self.rounds is not None:
            with torch.inference_mode(False), torch.enable_grad(), self.state.autocast():
                while self.segment.losses.empty() or self.segment.goes_on:
                    next(self.rounds, None)
        loss = self.segment.wait()
        leave(self._caller, self._lanes, [loss])
        if loss is not None:
            self._flying.popleft()
            self.losses.append(loss)
        else:
            self._end()

    def _end(self) -> None:
        self.ended, self._open.flight = True, None
        for hook in self._hooks:
            hook.remove()
        for optimizer in filter(None, self._optimizers):
            optimizer.hand_back()
        held = ", ".join(str(stage.most) for stage in self._stages)
        more = format_bytes(sum(stage.version_bytes for stage in self._stages))
        self._open.text = (
            f"\nstream: staleness={self.segment.staleness!r}, {held} versions of the stages' weights, {more} beside "
            "the newest"
        )
        updates = [self._before + stage.minibatches for stage in self._stages]
        if (error := self.segment.broken) is not None:
            error.add_note(
                f"stages have stepped {updates} minibatches of the stream: those before the error are ahead of the "
                "others where the numbers differ; resume from a checkpoint"
            )
        elif self.segment.failed is not None:
            number, error = self.segment.failed
            error.add_note(
                f"all stages are as after {self._before + number} minibatches of the stream; the rest was dropped"
            )
        self.error = error


class _Drains:
    """A hook that finishes the minibatches in flight; copying its module does so too, and the copy has no hook."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open = open_stream

    def __call__(self, *_: Any) -> None:
        self._open.drain()

    def __deepcopy__(self, memo: Any) -> Any:
        self._open.drain()
        return _nothing

    def __reduce__(self) -> Any:
        self._open.drain()
        return "_nothing"


def _nothing(*_: Any) -> None:
    """Stand for a hook of a stream in copies of its module."""
