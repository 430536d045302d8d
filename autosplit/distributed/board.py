"""What the watches of all ranks write into the store of the process group, and read there.

    writes    its state, and "moves" + 1 where it has begun something since the last beat
    reads     the cause, the counters, and the state of the next rank that has not closed

So a rank reads as many keys at a beat whatever the number of ranks, and each one is watched by another. That no rank
moves shows in the counter. States of more ranks are read when something is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from autosplit.distributed.ends import machine
from autosplit.errors import DeviceError

EVERYONE = (-1,)
"""Stands for all other ranks in what a rank waits for."""
_COUNTERS = ("moves", "closed", "lost")


class State(NamedTuple):
    """What a rank says of itself; ``limit_s``: None outside a step."""

    beat: int = 0
    limit_s: float | None = None
    action: str | None = None
    waits_for: tuple[int, ...] = ()
    closed: bool = False

    @property
    def place(self) -> str:
        """What the rank does, for messages."""
        return f"in {self.action}" if self.action else "between actions" if self.limit_s else "outside a step"


class Cause(NamedTuple):
    """Why all ranks end: a rank, -1 for none of them, and its fault; ``stopped``: it cannot end by itself."""

    rank: int
    text: str
    stopped: bool = False


class News(NamedTuple):
    """What a rank reads at a beat: the counters of moves, of ranks that have closed and of lost connections."""

    cause: Cause | None
    moves: int
    closed: int
    lost: int


class Board:
    """The keys of one watch in the store, over a connection of its own.

    Attributes:
        host: whose end takes the store with it.
        neighbours: for each process of this machine its rank, its number and torchrun's error file.
        seen: the last state that was read of each rank that is watched: the next one, and the one that hosts the store.
    """

    def __init__(self, rank: int, size: int, first: State, start_s: float) -> None:
        """Meet the other ranks; raise DeviceError where one has not come within ``start_s`` seconds."""
        self._rank, self._size = rank, size
        world: Any = dist.group.WORLD
        store = world.get_group_store().clone()
        self.host = _host(store)
        attempt = f"autosplit/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = PrefixStore(f"{attempt}/{store.add(f'{attempt}/{rank}', 1)}", store)
        if rank == 0:
            self._store.compare_set("cause", "", "")
            for counter in _COUNTERS:
                self.count(counter, 0)
        self.publish(first)
        process = json.dumps([rank, os.getpid(), os.environ.get("TORCHELASTIC_ERROR_FILE")])
        here = f"machine/{machine()}"
        self._store.set(f"{here}/{self.count(here)}", process)
        if self.count("met") == size:
            self._store.set("all have met", "")
        try:
            self._store.wait(["all have met"], timedelta(seconds=start_s))
        except RuntimeError as error:
            late = ", ".join(str(other) for other in range(size) if not self._store.check([f"state/{other}"]))
            raise DeviceError(f"rank {late} has not made the pipe within {start_s:g} s; every rank must") from error
        keys = [f"{here}/{number + 1}" for number in range(self.count(here, 0))]
        self.neighbours: list[tuple[int, int, str | None]] = [json.loads(text) for text in self._store.multi_get(keys)]
        self._next = (rank + 1) % size
        self.seen: dict[int, State] = {}

    def publish(self, state: State) -> None:
        """Say what this rank does."""
        self._store.set(f"state/{self._rank}", json.dumps(state))

    def count(self, counter: str, number: int = 1) -> int:
        """Add to a counter; return its value."""
        value: int = self._store.add(counter, number)
        return value

    def news(self) -> News:
        """Read what is to be known at a beat."""
        if self._next in self.seen and self.seen[self._next].closed:
            self._next = (self._next + 1) % self._size
        watched = sorted({self._next, 0 if self.host == "rank 0" else self._next} - {self._rank})
        cause, *texts = self._store.multi_get(["cause", *_COUNTERS, *(f"state/{rank}" for rank in watched)])
        self.seen = {rank: _state(text) for rank, text in zip(watched, texts[len(_COUNTERS) :], strict=True)}
        return News(Cause(*json.loads(cause)) if cause else None, *map(int, texts[: len(_COUNTERS)]))

    def other_ranks(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks for which one of some ranks stands, without this one."""
        asked = set(ranks)
        return ({*range(self._size)} if asked & {*EVERYONE} else asked) - {self._rank}

    def states(self, ranks: Iterable[int]) -> dict[int, State]:
        """Read the states of other ranks."""
        asked = sorted(self.other_ranks(ranks))
        texts = self._store.multi_get([f"state/{rank}" for rank in asked]) if asked else []
        return {rank: _state(text) for rank, text in zip(asked, texts, strict=True)}

    def blame(self, cause: Cause) -> Cause:
        """Make a cause the first one, unless there is one; return the first."""
        return Cause(*json.loads(self._store.compare_set("cause", "", json.dumps(cause))))


def _state(text: bytes) -> State:
    beat, limit_s, action, waits_for, closed = json.loads(text)
    return State(beat, limit_s, action, tuple(waits_for), closed)


def _host(store: Any) -> str:
    """Return whose end takes the store with it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "a machine"
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
